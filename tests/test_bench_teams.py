"""The benchmarks of split models: both sides of a comparison compute the same, and the figures are right."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rainband.bench.cases.stages import partition, pipeline
from rainband.bench.harness.models import Branches, Chain
from rainband.bench.harness.rows import Effort, Row
from rainband.bench.harness.stage_runs import two_stage_placement
from rainband.model_parallel.execution.in_process import Partitioned
from rainband.model_parallel.graph.split_loss import cut_task
from rainband.model_parallel.placement.profile import CutValue, Profile, Unit

SMALL = {"layers": 4, "width": 8, "samples": 32, "batch_size": 16}


def test_torchs_stages_are_those_of_our_plan() -> None:
    task = Chain(**SMALL)
    torch.manual_seed(0)
    model = task.model()
    torch.manual_seed(0)
    first, second = task.stages()
    inputs, _ = task.data().batch(range(4))
    assert second(first(inputs)).equal(model(inputs))
    cut, _, _ = cut_task(task, model, task.data(), 4)
    for stage, module in zip(two_stage_placement(task).stages, (first, second), strict=True):
        ours = cut.parameters_of(stage.units).values()
        assert [p.shape for p in ours] == [p.shape for p in module.parameters()]


def test_each_half_of_a_chain_has_half_of_its_layers() -> None:
    """Four layers with their activations, two of each pair on each machine; and the last layer for the classes."""
    plan = two_stage_placement(Chain(**SMALL))
    assert (plan.kind, [len(stage.units) for stage in plan.stages]) == ("pipeline", [4, 5])


def test_of_two_branches_one_value_crosses_and_its_gradient_comes_back() -> None:
    task = Branches(**SMALL)
    model = task.model()
    cut, args, _ = cut_task(task, model, task.data(), 4)
    plan = two_stage_placement(task)
    parts = Partitioned(cut, plan.stage_of())
    parts.loss_and_gradients(lambda answer: answer.sum(), args)
    assert plan.kind == "partition"
    assert [(m.kind, m.source, m.destination) for m in parts.messages] == [("value", 1, 0), ("gradient", 0, 1)]


def test_rates_are_predicted_from_what_a_microbatch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of 1 s forward and 2 s back: 4 and 5 s there, 8 and 10 back, for microbatches of 2 samples.

    The second stage has all eight of them in 120 s; before it there are 4 s of the first, and 8 after it.
    """
    task = Chain(**SMALL)

    def layers(task: Chain, samples: int) -> Profile:
        names = [unit for stage in two_stage_placement(task).stages for unit in stage.units]
        values = tuple(CutValue(a, a, (b,), 64, 64) for a, b in pairwise(names))
        return Profile("", samples, tuple(Unit(name, 1.0, 2.0) for name in names), values)

    monkeypatch.setattr(pipeline, "profile_of", layers)
    flushed = 16 / (4 + 8 * 15 + 8)
    assert pipeline.predicted(task) == pytest.approx(
        {"gpipe, predicted": flushed, "one_f_one_b, predicted": flushed, "pipedream, predicted": 2 / 15}, rel=1e-4
    )


def shown(rows: list[Row]) -> list[tuple[str, float, float | None, bool | None]]:
    return [(row.against, row.value, row.target, row.met) for row in rows if row.against]


def test_each_schedule_is_held_against_one_process_and_against_torchs_own() -> None:
    """Ratios are taken within each turn: 2 and 3 and 2 times give 2, however fast the machine was."""
    rates = {
        "plain": [10.0, 100.0, 10.0],
        "plain, small": [10.0, 100.0, 10.0],
        "pipedream": [20.0, 300.0, 20.0],
        "gpipe": [13.0, 130.0, 13.0],
        "ScheduleGPipe": [10.0, 100.0, 10.0],
        "one_f_one_b": [9.0, 90.0, 9.0],
        "Schedule1F1B": [10.0, 100.0, 10.0],
        "pipedream, predicted": [40.0, 400.0, 40.0],
        "gpipe, predicted": [13.0, 130.0, 13.0],
        "one_f_one_b, predicted": [10.0, 100.0, 10.0],
    }
    assert shown(pipeline._rows(rates, Chain())) == [
        ("one plain process", 2.0, 1.6, True),
        ("one plain process, batches of 1024", 2.0, None, None),
        ("the prediction", 0.5, None, None),
        ("one plain process", 1.3, 1.4, False),
        ("torch.distributed.pipelining", 1.3, 1.1, True),
        ("the prediction", 1.0, None, None),
        ("one plain process", 0.9, None, None),
        ("torch.distributed.pipelining", 0.9, 1.1, False),
        ("the prediction", 0.9, None, None),
    ]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("bench", [pipeline, partition])
def test_a_benchmark_measures_everything_it_names(bench: object) -> None:
    effort: Effort = "quick"
    rows = bench.run(effort)  # type: ignore[attr-defined]
    assert all(row.value > 0 for row in rows)
