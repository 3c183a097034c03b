"""A run in stages says how fast it should be and how fast it was: in virtual time both are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from rainband.cli.main import build_app
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split_loss import build_model
from rainband.model_parallel.placement.measure import measure
from rainband.model_parallel.placement.profile import Profile, Unit
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.protocol import events
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.runtimes.simulation.run import run
from rainband.runtimes.stage_forecast import forecast_of, predicted_of
from rainband.strategies.pipedream import Pipedream
from rainband.strategies.single import Single
from rainband.views import predicted_stages as predicted
from rainband.views.history import RunSoFar, read_run
from rainband.views.schedule_chart import WAIT, _typical, excerpt
from rainband.views.spans import read_spans
from tests.stage_tasks import Shaped, dealt, planned

STEP_S = 1.0


def round_profile(task: Shaped) -> Profile:
    """Profile the bytes of a real batch, with simple times: unit n takes n + 1 forward, and twice that backward."""
    profile = measure(cut(build_model(task), args := task.data().batch(range(task.batch_size))), args, repeats=1)
    units = [Unit(u.name, n + 1.0, 2.0 * (n + 1), u.parameter_bytes) for n, u in enumerate(profile.units)]
    return msgspec.structs.replace(profile, units=tuple(units))


def stage_plan_of(task: Shaped, placement: Any, kind: str = "pipeline", **settings: Any) -> StagePlan:
    if stages_per_worker := settings.pop("stages_per_worker", 0):
        interleaved = dealt(task, placement, stages_per_worker, settings["microbatches"])
        return msgspec.structs.replace(interleaved, profile=round_profile(task))
    return planned(task, placement, kind, profile=round_profile(task), **settings)


def simulated(
    folder: Path, task: Shaped, stage_plan: StagePlan, strategy: str, epochs: int, copies: int = 1
) -> RunSoFar:
    folder.mkdir(parents=True)
    seen: list[events.AnyEvent] = []
    config = RunConfig(
        task="tests.stage_tasks:Shaped",
        task_settings={"name": task.name, "samples": task.samples, "batch_size": task.batch_size},
        strategy=strategy,
        strategy_settings={"lr": 0.01} | ({"batch_per_worker": True} if strategy == "sync" else {}),
        num_workers=stage_plan.size * copies,
        num_servers=1 if strategy == "sync" else 0,
        runtime="sim",
        epochs=epochs,
        failure_timeout_s=1e3,
        directory=str(folder),
        sim=SimSettings(compute={"kind": "constant", "step_s": STEP_S}),
        stage_plan=stage_plan,
    )
    assert run(config, seen.append).outcome == "finished"
    return RunSoFar.from_events(seen)


CHAIN = Shaped("chain", samples=48)
CASES = {
    "one batch in two stages": (CHAIN, {"placement": 2, "microbatches": 1}, "single"),
    "1F1B": (CHAIN, {"placement": 2, "microbatches": 4}, "single"),
    "GPipe": (CHAIN, {"placement": 3, "microbatches": 2, "schedule": "gpipe"}, "single"),
    "deep": (CHAIN, {"placement": 4, "microbatches": 4}, "single"),
    "interleaved": (CHAIN, {"placement": 2, "stages_per_worker": 2, "microbatches": 4}, "single"),
    "PipeDream": (CHAIN, {"placement": 2}, "pipedream"),
    "a deep PipeDream": (CHAIN, {"placement": 3}, "pipedream"),
}


@pytest.mark.parametrize("case", CASES)
def test_in_virtual_time_a_batch_takes_what_was_predicted(tmp_path: Path, case: str) -> None:
    """Runs of one and of three passes over the data differ by two of them."""
    task, settings, strategy = CASES[case]
    stage_plan = stage_plan_of(task, **settings)
    short, long = (simulated(tmp_path / str(n), task, stage_plan, strategy, n) for n in (1, 3))
    assert long.predicted is not None
    took_s = (long.training.seconds - short.training.seconds) / (2 * task.samples / task.batch_size)
    assert took_s == pytest.approx(long.predicted.batch_s, rel=1e-9)
    seen = predicted.measured(long)
    assert seen is not None
    assert [s.compute_s for s in seen.stages] == pytest.approx([s.compute_s for s in long.predicted.stages])
    assert [s.sent_bytes for s in seen.stages] == [s.sent_bytes for s in long.predicted.stages]
    assert sum(s.compute_s for s in seen.stages) == pytest.approx(STEP_S)
    assert long.predicted.left_out == ()


def test_copies_of_the_model_are_as_many_times_as_fast(tmp_path: Path) -> None:
    stage_plan = stage_plan_of(CHAIN, 2, microbatches=4)
    one, two = (simulated(tmp_path / str(n), CHAIN, stage_plan, "sync", 1, copies=n) for n in (1, 2))
    assert one.predicted is not None and two.predicted is not None
    assert two.predicted.samples_per_s == pytest.approx(2 * one.predicted.samples_per_s)
    assert two.predicted.busy == pytest.approx(one.predicted.busy)
    assert two.predicted.left_out == ("servers",)


def test_the_end_of_a_run_says_both_stage_by_stage(tmp_path: Path) -> None:
    """Five units of 3, 6, 9, 12 and 15 parts of 45: 18 before the cut, 27 after it. Messages take a little."""
    stage_plan = stage_plan_of(CHAIN, {"_0": 0, "_1": 0, "_2": 0, "_3": 1, "_4": 1}, microbatches=1)
    so_far = simulated(tmp_path / "run", CHAIN, stage_plan, "single", 1)
    head, columns, first, second = predicted.lines(so_far)
    assert head == "predicted 4 samples/s (busy 49 %), measured 4 samples/s (busy 49 %)"
    assert columns.split() == ["a", "batch", "computes", "predicted", "waits", "else", "sends", "predicted"]
    assert first.startswith("stage 0  400 ms    400 ms     60")
    assert second.startswith("stage 1  600 ms    600 ms     40")
    assert first.endswith("256 B  256 B") and second.endswith("256 B  256 B")  # 4 samples of 8 float64
    app = CliRunner().invoke(build_app(), ["runs", "show", str(tmp_path / "run")])
    assert head in app.output
    shown = json.loads(CliRunner().invoke(build_app(), ["runs", "show", str(tmp_path / "run"), "--json"]).output)
    assert shown["pipeline"]["predicted"]["batch_s"] == pytest.approx(1.0, rel=1e-3)
    assert shown["pipeline"]["measured"]["stages"][1]["compute_s"] == pytest.approx(0.6)


def test_where_a_worker_was_lost_only_the_prediction_is_reported(tmp_path: Path) -> None:
    so_far = simulated(tmp_path / "run", CHAIN, stage_plan_of(CHAIN, 2), "single", 1)
    assert len(predicted.lines(so_far)) == 4 and so_far.last is not None
    so_far.progress[-1] = msgspec.structs.replace(so_far.last, computed_s={0: so_far.last.computed_s[0]})
    (line,) = predicted.lines(so_far)
    assert line.startswith("predicted 4 samples/s") and "measured" not in line
    state = predicted.as_facts(so_far)
    assert state is not None and state["measured"] is None


def test_a_run_of_whole_models_says_nothing_of_stages() -> None:
    assert predicted.lines(RunSoFar()) == [] and predicted.as_facts(RunSoFar()) is None


BRANCHES = Shaped("branches", samples=48)


@pytest.mark.parametrize(
    ("task", "settings", "strategy"),
    [
        (CHAIN, {"placement": 2, "microbatches": 4}, "single"),
        (CHAIN, {"placement": 3, "microbatches": 4, "schedule": "gpipe"}, "single"),
        (CHAIN, {"placement": 2, "stages_per_worker": 2, "microbatches": 2}, "single"),
        (CHAIN, {"placement": 2}, "pipedream"),
        (
            BRANCHES,
            {
                "placement": {
                    "stem": 0, "tanh": 0, "left": 0, "tanh_1": 0, "right": 1, "sigmoid": 1, "mul": 0, "join": 0
                },
                "kind": "partition",
            },
            "single",
        ),
    ],
)  # fmt: skip
def test_the_schedule_that_was_is_the_one_that_was_predicted(
    tmp_path: Path, task: Shaped, settings: dict[str, Any], strategy: str
) -> None:
    simulated(tmp_path / "run", task, stage_plan_of(task, **settings), strategy, 2)
    found = excerpt(read_run(tmp_path / "run"), read_spans(tmp_path / "run"))
    assert found is not None
    seen = sorted((d.rank, d.from_s, d.label) for d in found.measured if d.label != WAIT and d.to_s - d.from_s > 1e-9)
    expected = sorted((d.rank, d.from_s, d.label) for d in found.predicted if d.label != WAIT)
    assert [(place, label) for place, _, label in seen] == [(place, label) for place, _, label in expected]
    assert [at for _, at, _ in seen] == pytest.approx([at for _, at, _ in expected], abs=1e-6)


def test_the_timeline_draws_both_and_names_microbatches_for_chrome(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    simulated(tmp_path / "run", CHAIN, stage_plan_of(CHAIN, 2, microbatches=4), "single", 1)
    shown = CliRunner().invoke(build_app(), ["timeline", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "run" / "schedule.png").read_bytes()[:4] == b"\x89PNG"
    trace = json.loads((tmp_path / "run" / "timeline.json").read_bytes())["traceEvents"]
    assert {e["name"] for e in trace if e.get("cat") == "forward"} == {"F0", "F1", "F2", "F3"}
    assert {e["name"] for e in trace if e.get("cat") == "backward"} == {"B0", "B1", "B2", "B3"}
    assert {"worker 0, predicted", "worker 1, predicted"} <= {e["args"]["name"] for e in trace if e["ph"] == "M"}


def test_what_is_shown_took_as_long_as_most_batches_did() -> None:
    assert _typical([9.0, 2.0, 9.0, 2.0, 3.0]) == 4  # the median
    assert _typical([5.0, 2.0, 2.0, 9.0, 2.0]) == 2  # of three alike the one in the middle


def config_of(stage_plan: StagePlan, **settings: Any) -> RunConfig:
    return RunConfig(
        task="", strategy="single", num_workers=stage_plan.size, num_servers=0, stage_plan=stage_plan, **settings
    )


def test_on_fewer_cores_workers_compute_in_turns() -> None:
    """A batch of 4 takes 1 s of computing: one core gives no more than 4 samples/s, and two workers are half busy."""
    stage_plan = stage_plan_of(CHAIN, 2)
    models = [ClusterModel(compute=ComputeModel("constant", 1.0), nodes=NodeModel(cores=n)) for n in (0, 2, 1)]
    found = [predicted_of(config_of(stage_plan), Pipedream(), model) for model in models]
    own, two, one = (event for event in found if event is not None)
    assert own.samples_per_s == two.samples_per_s > one.samples_per_s
    assert (one.samples_per_s, one.busy) == pytest.approx((4.0, 0.5))


def test_two_versions_are_predicted_under_their_own_name() -> None:
    """Updates are left out of predictions, so the times are those of plain pipedream."""
    stage_plan = stage_plan_of(CHAIN, 3)
    model = ClusterModel(compute=ComputeModel("constant", STEP_S))
    plain, two = (predicted_of(config_of(stage_plan), Pipedream(pipedream_2bw=on), model) for on in (False, True))
    assert plain is not None and two is not None
    assert (plain.schedule, two.schedule) == ("pipedream", "pipedream_2bw")
    assert two == msgspec.structs.replace(plain, schedule="pipedream_2bw")


def test_processes_are_expected_to_take_what_a_microbatch_takes() -> None:
    """Of 4 samples in 45 s a microbatch of 2 takes 30 s, not 22.5; by TCP values take longer."""
    stage_plan = stage_plan_of(CHAIN, 2, microbatches=2)
    assert stage_plan.profile is not None
    microbatch = msgspec.structs.replace(stage_plan.profile.scaled(30 / 45, 0.5), batch_size=2)
    cut_batches = msgspec.structs.replace(stage_plan, microbatch_profile=microbatch)
    plain, found = (forecast_of(config_of(plan), "one_f_one_b") for plan in (stage_plan, cut_batches))
    assert plain is not None and found is not None
    assert plain.alone_s == pytest.approx(45.0) and found.alone_s == pytest.approx(2 * 30.0)
    assert found.shares[0].sent_bytes == plain.shares[0].sent_bytes
    by_tcp = forecast_of(config_of(cut_batches, transport="tcp"), "one_f_one_b")
    assert by_tcp is not None and by_tcp.batch_s > found.batch_s


def test_what_is_left_out_is_reported() -> None:
    stage_plan = stage_plan_of(CHAIN, 2, microbatches=2)
    assert stage_plan.profile is not None
    local = predicted_of(config_of(stage_plan), Single())
    assert local is not None and local.left_out == ("reading data", "the loss", "updates")
    counted = msgspec.structs.replace(stage_plan, profile=msgspec.structs.replace(stage_plan.profile, counted=True))
    guessed = predicted_of(config_of(counted), Single())
    assert guessed is not None and "nothing was measured" in guessed.left_out[-1]
    slow = ClusterModel(compute=ComputeModel("constant", 1.0, slow_workers=(1,)))
    simulated = predicted_of(config_of(stage_plan), Single(), slow)
    assert simulated is not None and simulated.left_out == ("slow workers",)
    assert predicted_of(config_of(planned(CHAIN, 2)), Single()) is None  # nothing was measured at all
