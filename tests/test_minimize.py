"""rainband.minimize: called as scientific code calls it, with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

import rainband
from rainband.cli.main import build_app
from rainband.cli.options.words import configured
from rainband.minimize import _result
from rainband.plugins import load_strategy
from rainband.protocol.accounting import BatchAccounting
from rainband.protocol.events import EndCause, IterationDone
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.configure import check_custom_loop
from rainband.runtimes.simulation.run import make_scenario
from rainband.tasks.quadratic import Quadratic

TASK = Quadratic(dimension=40, samples=96, condition=3.0, batch_size=8)


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("method", ["lbfgs", "cg"])
def test_the_lowest_point_of_a_bowl_is_found(method: str, tmp_path: Path) -> None:
    seen: list[int] = []
    found = rainband.minimize(
        TASK, method, workers=2, servers=2, tol=1e-3, n_push=2,
        callback=lambda now: seen.append(now.iteration), run={"runs": tmp_path},
    )  # fmt: skip

    assert found.success and found.status == 0 and "gradient norm" in found.message
    np.testing.assert_allclose(found.x, TASK.optimum().numpy(), atol=0.01)
    assert found.fun == pytest.approx(found.metrics["loss"], rel=1e-5)
    assert seen == list(range(found.nit + 1)) and found.nfev >= found.nit + 1
    assert (
        found.accounting.balanced and found.accounting.applied == 12 * found.nfev
    )  # every batch once in each evaluation


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_what_runs_out_of_iterations_is_no_success(tmp_path: Path) -> None:
    found = rainband.minimize(TASK, workers=1, servers=1, tol=0.0, iterations=2, run={"runs": tmp_path})
    assert (found.success, found.status, found.nit, found.message) == (False, 1, 2, "2 iterations are done")


@pytest.mark.parametrize("cause, status", [(EndCause.NOT_FINITE, 3), (None, 4), (EndCause.NO_LOWER_LOSS, 2)])
def test_each_end_has_a_number(cause: EndCause | None, status: int) -> None:
    class FitResult:
        module = TASK.model()
        metrics: ClassVar[dict[str, float]] = {}
        accounting = BatchAccounting(0, 0, {}, 0, 0, 0, 0, {}, 0)
        directory = Path()

    last = IterationDone(
        at_s=0.0,
        iteration=1,
        loss=None,
        gradient_norm=1.0,
        step=0.0,
        evaluations=2,
        work_items=2,
        backups=0,
        end_cause=cause,
    )
    assert _result(FitResult(), [last]).status == status


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"method": "newton"}, """^method='newton': must be "lbfgs" or "cg".$"""),
        ({"method": "lbgfs"}, r"^method='lbgfs' \(did you mean lbfgs\?\): must be"),
        ({"method": 3}, '^method=3: must be "lbfgs" or "cg".$'),
        ({"method": ["cg"]}, '^method=.*: must be "lbfgs" or "cg".$'),
        ({"histroy": 3}, r'minimize\(method="lbfgs"\) has no setting histroy \(did you mean history\?\)'),
        ({"maxiter": 1}, r"minimize\(\) has no setting maxiter: use iterations."),
        ({"epochs": 3}, r"minimize\(\) has no setting epochs: use iterations."),
        ({"batch_size": 3}, r'batch_size is an option of the run: use run=\{"batch_size": ...\}'),
        ({"run": {"epochs": 3}}, "set iterations=3 instead of epochs"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rainband.minimize(TASK, **arguments)


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_a_strategy_of_ones_own_can_lead_too(tmp_path: Path) -> None:
    """It is handed to the coordinator, the servers and the workers, without a name."""
    from dataclasses import dataclass

    from rainband.coordinator_api import CoordinatorApi, End
    from rainband.protocol.vectors import GRADIENT, PARAMS, axpy
    from rainband.strategies.sandblaster import Sandblaster

    enough = End(EndCause.CONVERGED, "enough")

    @dataclass(frozen=True)
    class ThreeSteps(Sandblaster):
        async def coordinate(self, coordinator: CoordinatorApi) -> None:
            for iteration in range(3):
                found = await coordinator.evaluate()
                await coordinator.compute(axpy(PARAMS, -1.0 / found.samples, GRADIENT))
                coordinator.report(iteration, found.loss, 0.0, 1.0, enough if iteration == 2 else None)

    bowl = Quadratic(dimension=4, samples=16, condition=1.0, batch_size=8)  # a step of 1 goes to its lowest point
    fitted = rainband.fit(bowl, ThreeSteps(), workers=1, servers=1, runs=tmp_path)
    assert fitted.metrics["distance"] < 1e-6


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nothing_but_time(tmp_path: Path) -> None:
    """Two iterations of one life and the rest of another: the end is that of a run in which nobody died."""

    def kill_one(now: IterationDone) -> None:
        if now.iteration == 2:
            for process in psutil.Process().children(recursive=True):
                if process.cmdline() and "rainband worker 1" in process.cmdline()[0]:
                    process.kill()

    task = Quadratic(dimension=40, samples=2048, condition=3.0, batch_size=8)
    settings: dict[str, Any] = {"workers": 2, "servers": 1, "tol": 0.0, "iterations": 6}
    quiet = rainband.minimize(task, **settings, run={"runs": tmp_path})
    stormy = rainband.minimize(task, **settings, callback=kill_one, run={"runs": tmp_path})

    events = (stormy.directory / "events.jsonl").read_text(encoding="utf-8")
    assert '"Lost"' in events and "worker 1" in events
    assert stormy.nfev == quiet.nfev and stormy.accounting.applied == stormy.accounting.batches == 256 * stormy.nfev
    np.testing.assert_allclose(stormy.x, quiet.x, atol=1e-4)


# ---- where it has no place ----


def test_a_loop_of_ones_own_cannot_be_led() -> None:
    with pytest.raises(
        ValueError, match=r"because it uses the data as often as it needs: use rainband.minimize\(task\)"
    ):
        check_custom_loop("sandblaster", load_strategy("sandblaster", {}).requires)
    check_custom_loop("downpour", load_strategy("downpour", {}).requires)


def test_epochs_are_for_strategies_that_count_them() -> None:
    with pytest.raises(ValueError, match="sandblaster counts iterations"):
        configured(["digits", "sandblaster"], {"epochs": 3})
    assert configured(["digits", "downpour"], {"epochs": 3}).epochs == 3


@pytest.mark.parametrize(
    "options, says",
    [
        (
            ["--runtime", "sim", "--time-only"],
            "--time-only computes no loss, and sandblaster needs it: omit --time-only.",
        ),
        (
            ["--record"],
            "--record: sandblaster goes by iterations",
        ),
    ],
)
def test_what_has_no_meaning_for_it_is_reported_on_the_command_line(options: list[str], says: str) -> None:
    result = CliRunner().invoke(build_app(), ["train", "digits", "sandblaster", *options])
    assert result.exit_code == 2 and says in " ".join(result.output.split())


def test_time_alone_says_nothing_about_a_loss() -> None:
    config = RunConfig(
        task="quadratic", strategy="sandblaster", num_workers=2, num_servers=1, runtime="sim",
        sim=SimSettings(time_only=True),
    )  # fmt: skip
    with pytest.raises(ValueError, match="computes no loss, and sandblaster needs it: omit --time-only"):
        make_scenario(config)
