"""Real workers at a chosen pace, and what the benchmark of stragglers reads out of a run."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from rainband.bench.baselines.data_parallel import PacedOrder
from rainband.bench.cases.stragglers import CONTENDERS, StragglerResult, _speedup, result_of
from rainband.bench.harness.processes import PRELOAD, BenchProcess, free_port
from rainband.cli.main import build_app
from rainband.cli.options.words import configured
from rainband.plugins import load_strategy
from rainband.protocol import events
from rainband.runtimes.processes.compute import MinStepTime
from rainband.runtimes.processes.zygote import Zygote
from rainband.runtimes.simulation.models.compute import ComputeModel, ComputePace
from rainband.worker.worker import Compute


class Time:
    """A clock that goes on only while someone computes or sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.now_s

    def pass_(self, seconds: float) -> None:
        self.now_s += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.pass_(seconds)


def steps(compute_s: float, worker: int) -> Time:
    """Two steps of a worker; worker 1 is five times slower than 2 s."""
    time = Time()

    class Gradient(Compute):
        def __init__(self) -> None:
            pass

        def perform(self) -> None:
            time.pass_(compute_s)

    model = ComputeModel(kind="constant", step_s=2.0, slow_workers=(1,), slow_factor=5.0)
    paced = MinStepTime(ComputePace(model, seed=0, worker=worker), time.now, time.sleep)
    for _ in range(2):
        paced.perform(Gradient())
    return time


def test_a_step_takes_as_long_as_it_should_whatever_computing_takes_of_it() -> None:
    assert steps(0.5, worker=0).slept == [1.5, 1.5]
    assert steps(0.5, worker=1).slept == [9.5, 9.5]


def test_a_step_that_takes_longer_by_itself_is_not_made_longer() -> None:
    time = steps(3.0, worker=0)
    assert time.slept == [0.0, 0.0] and time.now_s == 6.0


def test_a_pace_can_be_typed_for_real_workers_and_what_is_wrong_with_it_is_reported() -> None:
    paced_config = configured(["digits", "downpour", "compute.step_s=0.02", "compute.slow_workers=3"], {})
    assert paced_config.sim.compute == {"step_s": "0.02", "slow_workers": "3"}

    told = CliRunner().invoke(build_app(), ["train", "digits", "downpour", "compute.speed=2"])
    assert told.exit_code == 2 and "compute has no setting 'speed'" in told.output


def progress(at_s: float, samples: int, accuracy: float | None = None) -> events.Progress:
    return events.Progress(
        at_s=at_s,
        batches_done=samples // 10,
        batches=100,
        samples_done=samples,
        samples=1000,
        loss=None,
        samples_per_s={},
        steps_per_s={},
        staleness_mean=0.0,
        staleness_max=0,
        waited_s={},
        metrics={} if accuracy is None else {"accuracy": accuracy},
    )


def test_the_rate_leaves_out_the_start_and_the_end_and_the_time_counts_from_when_all_is_ready() -> None:
    seen: list[events.AnyEvent] = [
        events.PhaseChanged(at_s=1.5, phase="loading"),
        events.PhaseChanged(at_s=2.0, phase="running"),
        events.FirstStep(at_s=2.2, worker=0),
        progress(2.5, 0),
        progress(3.0, 100),
        progress(4.0, 400, 0.9),
        progress(5.0, 700, 0.96),
        progress(9.0, 1000, 0.97),  # the slow one had the last batch
    ]
    assert result_of(seen) == StragglerResult(samples_per_s=300.0, reached_s=3.0)


def test_what_never_reached_the_accuracy_is_not_sooner() -> None:
    assert _speedup(StragglerResult(1.0, 12.0), StragglerResult(1.0, 4.0)) == 3.0
    assert _speedup(StragglerResult(1.0, 12.0), StragglerResult(1.0, None)) == 0.0


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_every_contender_can_be_made(contender: Any) -> None:
    assert load_strategy(contender.strategy, contender.settings)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("accuracy, reached", [(0.3, True), (1.1, False)])
def test_ddp_ends_when_its_first_rank_has_seen_the_accuracy_and_at_its_last_step_otherwise(
    accuracy: float, reached: bool
) -> None:
    """Not one rank waits for a step that another one does not make."""
    zygote, port = Zygote.start(PRELOAD), free_port()
    try:
        orders = [PacedOrder(rank, 2, port, 0.0, lr=0.2, accuracy=accuracy, max_steps=60) for rank in range(2)]
        ranks = [
            BenchProcess(zygote, "rainband.bench.baselines.data_parallel:paced_main", order, "DDP") for order in orders
        ]
        (rate, reached_s), (_, unknown_s) = [rank.result() for rank in ranks]
    finally:
        zygote.close(1.0)
    assert rate > 0 and (reached_s > 0) is reached and unknown_s == 0
