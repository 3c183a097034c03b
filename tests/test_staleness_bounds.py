"""Staleness bounds in every runtime: a bound that was exceeded fails the run; one that was kept reports waiting times.

Every story is the same: one worker stands still at its first batch, and the other goes on as far as it is let.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import rainband
from rainband.cli.main import build_app
from rainband.errors import RainbandError
from rainband.strategies.stale_sync import StaleSync
from tests.broken_bound import Boundless
from tests.processes import Run, RunLauncher
from tests.test_consistency import ONE_IS_SLOW, TASK
from tests.test_run_script import Told
from tests.test_simulation import cluster_of

SAMPLES = 64
PROMISED = "the staleness bound was exceeded: readers may miss 0 clocks, and"
# The sample that the first batch of all begins with: the worker that has it is still at clock 0.
FIRST_SAMPLE = int(np.random.Generator(np.random.PCG64([0, 0])).permutation(SAMPLES)[0])


def steps_until(strategy: StaleSync, until_s: float) -> int:
    """Of the fast one: it takes 1 s a step, the other 4 s."""
    cluster = cluster_of(strategy, 2, ONE_IS_SLOW, task=TASK)
    cluster.start()
    cluster.run(until_s=until_s)
    return cluster.workers[0].stats.steps


def test_it_does_break_its_promise() -> None:
    assert (steps_until(StaleSync(bound=0, lr=0.25), 3.5), steps_until(Boundless(lr=0.25), 3.5)) == (1, 3)


# ---- virtual time ----


def test_in_virtual_time_the_command_fails_and_says_by_how_much(tmp_path: Path) -> None:
    where = ["--runtime", "sim", "--workers", "2", "compute.slow_workers=1", "--runs", str(tmp_path)]
    settings = ["lr=0.0625", "task.samples=64", "task.epochs=1"]
    told = CliRunner().invoke(build_app(), ["train", "linear", "tests.broken_bound:Boundless", *settings, *where])
    assert told.exit_code == 1 and PROMISED in " ".join(told.output.split())


def test_fit_raises_it(tmp_path: Path) -> None:
    """Machines that are alike: the worker that is a moment sooner reads what another one has not pushed yet."""
    with pytest.raises(RainbandError, match=PROMISED):
        rainband.fit("digits", Boundless(), workers=4, servers=1, epochs=1, runtime="sim", runs=tmp_path)


# ---- processes ----


def one_stands_still(launcher: RunLauncher, path: Path, strategy: str) -> AbstractContextManager[Run]:
    return launcher.run(path, strategy, servers=1, samples=SAMPLES, hang_at=FIRST_SAMPLE)


@pytest.mark.processes
def test_processes_whose_bound_was_exceeded_end_with_an_error(launcher: RunLauncher, tmp_path: Path) -> None:
    with one_stands_still(launcher, tmp_path, "tests.broken_bound:Boundless") as run:
        run.under_way()
        run.gate.open()
        run.done(2)  # the other's second one was read at clock 1, and the first one's clock is 0
        run.gate.end_hanging()
        result = run.result()
        assert (result.outcome, result.exit_code) == ("failed", 1) and result.reason.startswith(PROMISED)
        assert result.accounting["applied"] == 16 and result.staleness["exceeded"] >= 1


@pytest.mark.processes
def test_processes_that_keep_their_bound_say_who_waited_for_whom(launcher: RunLauncher, tmp_path: Path) -> None:
    """With a bound of 3 the other begins its batches at clocks 0, 1, 2 and 3, and then waits."""
    with one_stands_still(launcher, tmp_path, "stale_sync") as run:
        run.under_way()
        run.gate.open()
        run.done(4)
        assert sorted(run.gate.begun().values()) == [1, 4]
        run.gate.end_hanging()
        result = run.result()
        assert (result.outcome, result.exit_code) == ("finished", 0), result.reason
        staleness = result.staleness
        assert (staleness["bound"], staleness["largest"], staleness["exceeded"]) == (3, 3, 0)
        (waits,) = [(int(who), {int(whom) for whom in waited}) for who, waited in staleness["waited_for"].items()]
        assert waits in ((0, {1}), (1, {0}))


@pytest.mark.processes
@pytest.mark.slow
def test_loops_of_ones_own_whose_bound_was_exceeded_end_with_an_error(launcher: RunLauncher, tmp_path: Path) -> None:
    """Worker 1 goes on when worker 0 has done five steps, which it should not be let."""
    os.mkfifo(tmp_path / "steps")
    told = Told(
        launcher,
        tmp_path,
        ["--workers", "2", "--servers", "1", "--strategy", "tests.broken_bound:Boundless", "train.py"],
        inside="__import__('tests.broken_bound').broken_bound.stand_still(run, 'steps')",
    )
    assert told.exit_code == 1 and PROMISED in " ".join(told.err.split()), told.err
