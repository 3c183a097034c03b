"""Stages of several workers: split layers, replicas that share microbatches, and both; the numbers of one process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from rainband.cli.options.words import configured
from rainband.model_parallel.execution.in_process import MemoryNetwork, run_together
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split_loss import split_layers
from rainband.model_parallel.placement import hybrid
from rainband.model_parallel.placement.measure import measure
from rainband.model_parallel.placement.placement import load, save
from rainband.model_parallel.placement.profile import CutValue, Profile, Unit
from rainband.model_parallel.placement.split_words import parse_split, splits_of
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.model_parallel.placement.wide_stages import wide_stages
from rainband.options import OptionError, RunOptions
from rainband.protocol import events
from rainband.runtimes.simulation.run import run
from tests.pipeline_models import one_thread  # noqa: F401 (a fixture for all)
from tests.split_tasks import Unsplit
from tests.stage_tasks import Shaped, planned, whole_gradient, worker_of
from tests.test_stages import BATCH
from tests.test_stages_sim import Seen

MLP = {"0": "2", "2": "rows:2"}


def profiled(task: Unsplit, splits: dict[str, str]) -> Profile:
    model = task.model()
    split_layers(task, model, task.data(), splits)
    return measure(cut(model, args := task.data().batch(range(4))), args, counted=True, model=task.name)


def plan_for(task: Unsplit, stages: int, width: int, splits: dict[str, str], microbatches: int) -> StagePlan:
    placement = wide_stages(profiled(task, splits), stages, width, splits)
    return StagePlan(plan=placement, example_size=2, microbatches=microbatches)


SHAPES = [
    ("mlp", 2, 2, {}),  # data parallel
    ("mlp", 1, 2, MLP),  # split layers alone
    ("mlp", 2, 2, {"0": "2"}),  # a stage of shards, and one of two replicas
    ("mlp", 2, 4, MLP),  # two replicas of two shards each
    ("net", 2, 4, {"0:4": "2x2", "5": "2"}),  # tiles, and two replicas of two shards
    ("net", 1, 2, {"0:4": "1x2"}),
]
RANDOM = ("dropping", 2, 2, {"2": "2"})  # not the numbers of one process: fragments draw their own


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("name, stages, width, splits", SHAPES)
def test_the_gradient_is_that_of_one_process_and_held_once(
    name: str, stages: int, width: int, splits: dict[str, str], microbatches: int
) -> None:
    task = Unsplit(name)
    plan = plan_for(task, stages, width, splits, microbatches)
    assert plan.size == stages * width
    network = MemoryNetwork(plan.size)
    workers = [worker_of(task, plan, rank, network) for rank in range(plan.size)]
    gradients = run_together([worker.gradient(BATCH) for worker in workers])
    whole = whole_gradient(task, BATCH)
    assert {gradient.loss for gradient in gradients} == {whole.loss}
    layout = workers[0].flat.layout
    squares = 0.0
    for number, _ in enumerate(layout.parameters):
        held = [gradient.tensors[number] for gradient in gradients if gradient.tensors[number] is not None]
        assert len(held) == 1
        squares += float((held[0] ** 2).sum())
    assert squares == sum(float((tensor**2).sum()) for tensor in whole.tensors if tensor is not None)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name, stages, width, splits", SHAPES)
def test_a_value_crosses_once_for_each_reading_machine_and_microbatch(
    name: str, stages: int, width: int, splits: dict[str, str], microbatches: int
) -> None:
    task = Unsplit(name)
    plan = plan_for(task, stages, width, splits, microbatches)
    network = MemoryNetwork(plan.size)
    workers = [worker_of(task, plan, rank, network) for rank in range(plan.size)]
    run_together([worker.gradient(BATCH) for worker in workers])
    sent = Counter(tag[:-1] for source, to, tag in network.sent if tag[-2] == "value" for tag in [(*tag, to)])
    values = Counter((tag[-1], to) for _, to, tag in network.sent if tag[-2] == "value")
    crossings = workers[0].submodel.layout.crossings()
    assert sum(sent.values()) == microbatches * len(crossings)
    assert max(values.values(), default=0) <= microbatches


def trained(folder: Path, words: list[str], options: RunOptions) -> tuple[dict[str, torch.Tensor], Seen]:
    folder.mkdir()
    config = configured(words, {"runtime": "sim", **options})
    seen = Seen()
    result = run(msgspec.structs.replace(config, directory=str(folder)), seen)
    assert result.outcome == "finished", result.reason
    return load_file(folder / "model.safetensors"), seen


SPLIT: RunOptions = {"split": ["0:4=2x2", "5=2"], "stages": 2, "workers": 8}
SGD = ["lr=0.0625", "optimizer=sgd"]
TASK = ["tests.split_tasks:Unsplit"]
NET = ["task.name=net", "task.samples=16", "task.epochs=2"]


@pytest.mark.parametrize("strategy", ["sync", "single"])
def test_synchronous_training_is_that_of_one_process(tmp_path: Path, strategy: str) -> None:
    expected, _ = trained(tmp_path / "one", [*TASK, "single", *SGD, *NET], {})
    found, _ = trained(tmp_path / "many", [*TASK, strategy, *SGD, *NET], SPLIT)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["sandblaster", "conjugate_gradient"])
def test_full_batch_methods_have_the_iterates_of_one_process(tmp_path: Path, strategy: str) -> None:
    words = [*TASK, strategy, "iterations=4", "gradient_tolerance=0", "loss_tolerance=0", "n_push=1", *NET]

    def losses(folder: str, options: RunOptions) -> list[float]:
        _, seen = trained(tmp_path / folder, words, options)
        return [event.loss for event in seen if isinstance(event, events.IterationDone)]

    one, many = (
        losses(folder, options)
        for folder, options in (("one", RunOptions(workers=1)), ("many", RunOptions(**{**SPLIT, "workers": 16})))
    )
    assert len(one) == 5
    assert many == pytest.approx(one, rel=1e-8)


@pytest.mark.parametrize("strategy", ["downpour", "pipedream", "stale_sync"])
def test_other_strategies_apply_every_batch(tmp_path: Path, strategy: str) -> None:
    model, seen = trained(tmp_path / "run", [*TASK, strategy, "lr=0.001", *NET], SPLIT)
    assert model.keys() == Unsplit("net").model().state_dict().keys()
    (ended,) = [event for event in seen if isinstance(event, events.RunEnded)]
    assert (ended.accounting["applied"], ended.accounting["lost"], ended.accounting["applied_twice"]) == (8, 0, 0)


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_saved_placement_trains_as_the_options_do(tmp_path: Path, suffix: str) -> None:
    task = Unsplit("net", samples=16)
    placement = plan_for(task, 2, 4, splits_of(SPLIT["split"] or []), 4).plan
    save(placement, tmp_path / f"plan{suffix}")
    assert load(tmp_path / f"plan{suffix}") == placement
    options: RunOptions = {"placement": tmp_path / f"plan{suffix}", "microbatches": 4}
    found, _ = trained(tmp_path / "saved", [*TASK, "sync", *SGD, *NET], options)
    expected, _ = trained(tmp_path / "typed", [*TASK, "sync", *SGD, *NET], {**SPLIT, "microbatches": 4})
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "words, options, told",
    [
        (["sync"], {"split": ["5"]}, "is not a split"),
        (["sync"], {"split": ["5=0"]}, "is not a split"),
        (["sync"], {"split": ["5=2", "5=rows:2"]}, "given twice"),
        (["sync"], {"split": ["9=2"]}, "no layer '9'"),
        (["averaging"], {"split": ["5=2"]}, "requires the whole model"),
        (["hogwild"], {"split": ["5=2"]}, "requires the whole model"),
        (["all_reduce"], {"split": ["5=2"]}, "divides each batch"),
        (
            ["downpour"],
            {"split": ["5=2"], "stages": 2, "workers": 6},
            "not a multiple of 4, the workers of one",
        ),
        (["downpour"], {"split": ["5=2"], "schedule": "interleaved", "stages": 2}, "interleaved has one worker"),
    ],
)
def test_what_cannot_be_split_is_refused_in_one_sentence(words: list[str], options: RunOptions, told: str) -> None:
    from rainband.options import on_command_line

    with pytest.raises(ValueError) as refused:
        configured([*TASK, *words, *NET], {"runtime": "sim", **options})
    error = refused.value
    assert told in (error.written(on_command_line) if isinstance(error, OptionError) else str(error))


@pytest.mark.parametrize("words, ways", [("a=3", 3), ("a.b=rows:2", 2), ("0:3=pair:4", 4), ("c=2x3", 6)])
def test_the_number_of_shards_is_known_without_torch(words: str, ways: int) -> None:
    assert parse_split(words).ways == ways


def test_hybrids_split_layers_whose_weights_are_larger_than_their_values() -> None:
    units = (
        Unit("conv", 1.0, 1.0, 1_000, 100_000, "Conv2d", "conv"),
        Unit("wide", 1.0, 1.0, 1_000_000, 4_000, "Linear", "wide"),
        Unit("narrow", 1.0, 1.0, 400, 400, "Linear", "narrow"),
    )
    values = (CutValue("a", "conv", ("wide",), 100_000, 100_000), CutValue("b", "wide", ("narrow",), 4_000, 4_000))
    choices = hybrid.choose(Profile("m", 32, units, values), 4)
    assert [choice.ways for choice in choices] == [1, 4, 1]
    assert hybrid.has_data_parallel_stage(choices)
    # 2 (m - 1) w and 2 (m - 1) (x + y / m) with m = 4
    assert (choices[1].data_bytes, choices[1].model_bytes) == (6_000_000, 606_000)
    assert [line.partition(":")[2].split(",")[0].strip() for line in hybrid.explained(choices)][:2] == [
        "data parallel: only linear layers are split (6.0 kB of gradients a batch)",
        "model parallel",
    ]


def test_a_hybrid_keeps_a_layer_whole_that_cannot_be_split() -> None:
    """Its table of weights is larger than its values, and another layer shares it."""
    unit = Unit("o", parameter_bytes=1000, what="Linear", layer="out")
    choice = hybrid.refused(hybrid.LayerChoice(unit, 4, 6000.0, 10.0), "'out' shares a parameter with another layer.")
    assert choice.ways == 1
    assert hybrid.explained([choice]) == ["out (Linear): data parallel: 'out' shares a parameter with another layer."]


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name, stages, width, splits", [*SHAPES, RANDOM])
def test_recomputing_changes_no_bit(
    name: str, stages: int, width: int, splits: dict[str, str], microbatches: int, schedule: str
) -> None:
    task = Unsplit(name)
    plan = msgspec.structs.replace(plan_for(task, stages, width, splits, microbatches), schedule=schedule)

    def gradients(recompute: bool) -> list[torch.Tensor | None]:
        network = MemoryNetwork(plan.size)
        again = msgspec.structs.replace(plan, recompute=recompute)
        workers = [worker_of(task, again, rank, network) for rank in range(plan.size)]
        return [tensor for found in run_together([w.gradient(BATCH) for w in workers]) for tensor in found.tensors]

    for kept, recomputed in zip(gradients(False), gradients(True), strict=True):
        assert (kept is None) == (recomputed is None)
        assert kept is None or recomputed is None or torch.equal(kept, recomputed)


@pytest.mark.parametrize("name", ["tied", "transformer", "on_shapes", "skips", "recurrent"])
def test_recomputing_draws_the_same_numbers_and_counts_buffers_once(name: str) -> None:
    task = Shaped(name)

    def trained_once(recompute: bool) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        plan = planned(task, 2, microbatches=2, recompute=recompute)
        network = MemoryNetwork(2)
        workers = [worker_of(task, plan, rank, network) for rank in range(2)]
        gradients = run_together([worker.gradient(BATCH) for worker in workers])
        buffers = [buffer.clone() for worker in workers for buffer in worker.module.buffers()]
        return [tensor for gradient in gradients for tensor in gradient.tensors], buffers

    (kept, buffers), (recomputed, buffers_again) = trained_once(False), trained_once(True)
    for one, again in zip(kept, recomputed, strict=True):
        assert (one is None) == (again is None)
        assert one is None or again is None or torch.equal(one, again)
    assert len(buffers) == len(buffers_again) and all(map(torch.equal, buffers, buffers_again))
