"""Stages without servers of which one is lost: all begin again at the last checkpoint, so that versions never mix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rainband.protocol import events
from rainband.runtimes.config import SimSettings
from tests.checkpoint_runs import CheckpointRun
from tests.test_checkpoint_stages import STEPPING, stepping

BATCHES = 36


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckpointRun]:
    """Return each kind of run without faults, and without checkpoints."""
    return {case: stepping(tmp_path_factory.mktemp("calm") / "run", case) for case in STEPPING}


def killed(directory: Path, case: str, at_s: float, rank: int, every_s: float = 0.0, **more: Any) -> CheckpointRun:
    faults = SimSettings(faults=f"{at_s:.9f} kill worker {rank}")
    return stepping(directory, case, sim=faults, checkpoint_every_s=every_s, **more)


def is_complete(run: CheckpointRun) -> bool:
    accounting = run.result.accounting
    counts = accounting["applied"], accounting["lost"], accounting["applied_twice"]
    return run.result.outcome == "finished" and counts == (BATCHES, 0, 0)


def are_equal(one: CheckpointRun, other: CheckpointRun) -> bool:
    ours, theirs = one.parameters, other.parameters
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("case", STEPPING)
def test_a_run_without_a_checkpoint_begins_again_and_ends_with_the_same_model(
    tmp_path: Path, case: str, undisturbed: dict[str, CheckpointRun]
) -> None:
    expected = undisturbed[case]
    run = killed(tmp_path / "run", case, 0.6 * expected.result.seconds, rank=1)
    assert is_complete(run), run.result.reason
    assert are_equal(run, expected)
    [restored] = run.events(events.Restored)
    assert (restored.place, restored.step) == ("", 0) and restored.repeated < BATCHES


@pytest.mark.parametrize("case", STEPPING)
@pytest.mark.parametrize("rank", [0, -1])
def test_a_lost_stage_goes_on_as_a_run_that_continues_from_the_last_checkpoint(
    tmp_path: Path, case: str, rank: int, undisturbed: dict[str, CheckpointRun]
) -> None:
    whole_s = undisturbed[case].result.seconds
    workers = 3 if case == "replicas" else 2
    calm = stepping(tmp_path / "calm", case, checkpoint_every_s=0.6 * whole_s)
    [first] = [event.at_s for event in calm.events(events.CheckpointWritten)]
    run = killed(tmp_path / "run", case, first + 0.01 * whole_s, rank % workers, every_s=0.6 * whole_s)
    assert is_complete(run), run.result.reason
    [restored] = run.events(events.Restored)
    assert restored.repeated is not None and 0 < restored.step < BATCHES
    [written] = run.events(events.CheckpointWritten)
    assert restored.step == written.step
    resumed = stepping(tmp_path / "again", case, resume_from=str(tmp_path / "run" / "checkpoints" / written.name))
    assert are_equal(run, resumed)


MOMENT = st.floats(0.01, 0.9)  # fractions of the time of a run


@given(case=st.sampled_from(sorted(STEPPING)), at=MOMENT, second=MOMENT, every=st.floats(0.05, 0.5))
@example(case="replicas", at=0.5, second=0.5, every=0.5)  # a dismissed worker reports that it has ended
@settings(max_examples=8, deadline=None)
def test_workers_may_be_lost_at_any_moment(
    tmp_path_factory: pytest.TempPathFactory,
    undisturbed: dict[str, CheckpointRun],
    case: str,
    at: float,
    second: float,
    every: float,
) -> None:
    whole_s = undisturbed[case].result.seconds
    script = f"{at * whole_s:.9f} kill worker 0\n{(at + second) * whole_s:.9f} kill worker 1\n"
    folder = tmp_path_factory.mktemp("any") / "run"
    run = stepping(folder, case, sim=SimSettings(faults=script), checkpoint_every_s=every * whole_s)
    over = [event.at_s for event in run.events(events.PhaseChanged) if event.phase == "finishing"]
    late = over and [event for event in run.events(events.Lost) if event.at_s >= over[0]]
    assert late or is_complete(run), run.result.reason
    if case == "single" and not late:  # flushed: no matter when checkpoints were written
        assert are_equal(run, undisturbed[case])


@pytest.mark.parametrize("case", STEPPING)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_pauses_goes_on(
    tmp_path: Path, case: str, rank: int, undisturbed: dict[str, CheckpointRun]
) -> None:
    at_s = 0.5 * undisturbed[case].result.seconds
    paused = SimSettings(faults=f"{at_s:.9f} pause worker {rank} for 60")
    run = stepping(tmp_path / "run", case, sim=paused, failure_timeout_s=2.0)
    assert is_complete(run), run.result.reason
    assert are_equal(run, undisturbed[case])
