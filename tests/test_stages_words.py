"""What cannot be computed by several workers together is told before anything is measured or started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import rainband
from rainband.cli.configure import configured
from rainband.cli.stage_options import with_stages
from rainband.model_parallel.placement.placement import PlacedStage, Placement, save
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.plugins import load_strategy
from rainband.runtimes.stage_options import PipelineOptions, check_plan, check_versions, read_plan, workers_per_replica


@pytest.mark.parametrize(
    "words, given, stages, told",
    [
        (["digits", "sync"], {"num_workers": 3}, 2, "type --workers 2 or 4"),
        (["digits", "hogwild"], {}, 2, "hogwild needs the whole model in each worker"),
        (["digits", "sandblaster"], {}, 2, "sandblaster needs the whole model in each worker"),
        (["digits", "pipedream"], {}, None, "say how many, for example --stages 2"),
        (["digits", "single"], {"num_workers": 4}, 2, "--workers 4 cannot be"),
        (["digits", "pipedream"], {"num_servers": 1}, 2, "--servers 1 cannot be"),
    ],
)
def test_workers_that_make_no_whole_models_are_refused(
    words: list[str], given: dict[str, int], stages: int | None, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        configured(words, None, given, "sim", stages)


def test_workers_are_a_multiple_of_the_stages_and_strategies_count_models() -> None:
    assert configured(["digits", "sync"], None, {}, "sim", 3).num_workers == 3  # of the usual four
    assert configured(["digits", "single"], None, {}, "sim", 3).num_workers == 3
    assert configured(["digits", "downpour"], None, {"num_workers": 6}, "sim", 3).num_workers == 6


@pytest.mark.parametrize(
    "words, flow, record, told",
    [
        (["pipedream"], PipelineOptions(4), False, "has a schedule of its own"),
        (["pipedream"], PipelineOptions(schedule="gpipe"), False, "has a schedule of its own"),
        (
            ["pipedream"],
            PipelineOptions(stages_per_worker=2),
            False,
            "leave out --microbatches, --schedule and --stages-per-worker",
        ),
        (["pipedream"], PipelineOptions(schedule="pipedream_2bw"), False, "type pipedream pipedream_2bw=yes"),
        (["sync"], PipelineOptions(schedule="pipedream_2bw"), False, "type pipedream pipedream_2bw=yes"),
        (["sync"], PipelineOptions(schedule="zigzag"), False, "choose from gpipe, one_f_one_b, interleaved"),
        (
            ["sync"],
            PipelineOptions(schedule="gpipe", stages_per_worker=2),
            False,
            "the schedule is gpipe: leave one of them out",
        ),
        (
            ["sync"],
            PipelineOptions(stages_per_worker=1),
            False,
            "--stages-per-worker 1: give each worker two stages or more",
        ),
        (["sync"], PipelineOptions(5, "interleaved"), False, r"5 are not a multiple of 2. Choose 6 \(--microbatches\)"),
        (
            ["sync"],
            PipelineOptions(3, stages_per_worker=3),
            False,
            r"3 are not a multiple of 2. Choose 4 \(--microbatches\)",
        ),
        (["sync"], PipelineOptions(), True, "--record is for workers with the whole model"),
        (
            ["pipedream", "pipedream_2bw=yes", "batches_per_update=1"],
            PipelineOptions(),
            False,
            "type batches_per_update=2 or more",
        ),
    ],
)
def test_what_does_not_go_with_stages_is_refused_before_measuring(
    words: list[str], flow: PipelineOptions, record: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rainband.runtimes.stage_plan.make_stage_plan", None)
    config = msgspec.structs.replace(configured(["digits", *words], None, {}, "sim", 2), record=record)
    with pytest.raises(ValueError, match=told):
        with_stages(config, 2, None, flow)


@pytest.mark.parametrize(
    "flow", [PipelineOptions(4), PipelineOptions(schedule="interleaved"), PipelineOptions(stages_per_worker=2)]
)
def test_microbatches_without_stages_are_refused(flow: PipelineOptions) -> None:
    with pytest.raises(ValueError, match="type --stages 2, too"):
        with_stages(configured(["digits", "sync"], None, {}, "sim"), None, None, flow)


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"pipedream_2bw": True, "vertical_sync": True}, "so does vertical_sync: leave one of them out"),
        ({"pipedream_2bw": True, "stash": False}, "so does stash=no: leave one of them out"),
        ({"batches_per_update": 4}, "type pipedream_2bw=yes, too"),
        ({"pipedream_2bw": True, "batches_per_update": -1}, "must be at least the number of stages"),
    ],
)
def test_settings_of_pipedream_that_contradict_each_other_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load_strategy("pipedream", settings)


def in_turn(machines: list[int]) -> Placement:
    stages = tuple(PlacedStage((machine,), (f"u{number}",)) for number, machine in enumerate(machines))
    return Placement(model="m", kind="pipeline", partitioner="hand", num_machines=2, stages=stages)


@pytest.mark.parametrize(
    "strategy, machines, flow, told",
    [
        (
            "sync",
            [0, 1, 0, 1],
            PipelineOptions(schedule="gpipe"),
            "only interleaved knows, not gpipe: leave out --schedule",
        ),
        (
            "sync",
            [0, 1, 0, 1],
            PipelineOptions(stages_per_worker=3),
            "the placement has 2 stages on each machine, not 3: omit --stages-per-worker",
        ),
        ("sync", [0, 1, 0, 1], PipelineOptions(3), r"Choose 4 \(--microbatches\)"),
        ("sync", [0, 1], PipelineOptions(schedule="interleaved"), "interleaved needs several: leave out --placement"),
        ("sync", [0, 1], PipelineOptions(stages_per_worker=2), "interleaved needs several: leave out --placement"),
        ("pipedream", [0, 1, 0, 1], PipelineOptions(), "pipedream has one on each: plan with --partitioner pipedream"),
    ],
)
def test_a_plan_and_what_is_typed_must_agree(
    strategy: str, machines: list[int], flow: PipelineOptions, told: str
) -> None:
    plan = in_turn(machines)
    config = configured(["digits", strategy], None, {}, "sim", workers_per_replica(plan, None))
    assert config.num_workers % 2 == 0
    with pytest.raises(ValueError, match=told):
        with_stages(config, None, plan, flow)


def test_a_plan_has_as_many_workers_as_machines_whatever_its_stages(tmp_path: Path) -> None:
    save(in_turn([0, 1, 0, 1, 0, 1]), tmp_path / "plan.json")
    plan = read_plan(tmp_path / "plan.json", 2)
    assert workers_per_replica(plan, None) == 2
    with pytest.raises(ValueError, match=r"plan.json has 2 stages, not 6: leave out --stages"):
        read_plan(tmp_path / "plan.json", 6)


def test_a_team_plan_whose_schedule_does_not_know_its_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="only interleaved knows, not one_f_one_b"):
        StagePlan(plan=in_turn([0, 1, 0, 1]), microbatches=2)
    with pytest.raises(ValueError, match="Choose 2"):
        StagePlan(plan=in_turn([0, 1, 0, 1]), microbatches=1, schedule="interleaved")


def test_a_model_with_too_few_units_says_what_to_type() -> None:
    config = configured(["linear", "sync"], None, {}, "sim", 2)
    with pytest.raises(
        ValueError, match="2 stages on each of 2 workers are 4: type fewer --stages or --stages-per-worker"
    ):
        with_stages(config, 2, None, PipelineOptions(stages_per_worker=2))


@pytest.mark.parametrize(
    "options, told",
    [
        ({"stages": 2, "schedule": "zigzag"}, "choose from gpipe, one_f_one_b, interleaved"),
        ({"stages": 2, "schedule": "interleaved", "microbatches": 3}, "Choose 4"),
        ({"stages_per_worker": 2}, "give stages=2, too"),
        ({"schedule": "gpipe"}, "give stages=2, too"),
    ],
)
def test_fit_refuses_the_same(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        rainband.fit("digits", "sync", 2, 1, runtime="sim", **options)


def test_replicas_of_stages_are_for_pipedream_and_partitions_are_not() -> None:
    stages = (PlacedStage((0, 1), ("a",)), PlacedStage((2,), ("b",)))
    replicated = Placement(model="m", kind="pipeline", partitioner="hand", num_machines=3, stages=stages)
    with pytest.raises(ValueError, match=r"several machines \(2, 1\), which only pipedream knows"):
        check_plan(load_strategy("sync", {}), "sync", replicated)
    check_plan(load_strategy("pipedream", {}), "pipedream", replicated)
    with pytest.raises(ValueError, match=r"one worker for each stage, and the plan has \(2, 1\): leave it out"):
        check_versions(load_strategy("pipedream", {"pipedream_2bw": True}), replicated.replicas())
    partition = msgspec.structs.replace(replicated, kind="partition")
    with pytest.raises(ValueError, match="pipedream is a pipeline, and the plan is a partition"):
        check_plan(load_strategy("pipedream", {}), "pipedream", partition)
