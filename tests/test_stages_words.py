"""Whatever cannot be computed in stages is refused before anything is measured or started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import rainband
from rainband.cli.options.words import configured
from rainband.model_parallel.placement.placement import PlacedStage, Placement, save
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.options import OptionError, RunOptions, on_command_line
from rainband.plugins import load_strategy


def refused(words: list[str], options: RunOptions) -> str:
    """Return what the command line says about these words and options."""
    with pytest.raises(ValueError) as told:
        configured(["digits", *words], {"runtime": "sim", **options})
    return told.value.written(on_command_line) if isinstance(told.value, OptionError) else str(told.value)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be measured."""
    monkeypatch.setattr("rainband.runtimes.configure.make_stage_plan", None)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "strategy, options, told",
    [
        (
            "all_reduce",
            {"stages": 2},
            "omit --stages, or choose sync, whose workers share each batch within the stages",
        ),
        (
            "downpour",
            {"workers": 3, "stages": 2},
            "--workers 3 is not a multiple of --stages 2: use --workers 2 or --w",
        ),
        (
            "downpour",
            {"workers": 1, "stages": 2, "listen": "127.0.0.1:0"},
            "use --workers 2 or --workers 4, or --min-workers 2 if other machines bring the rest",
        ),
        (
            "downpour",
            {"workers": 1, "stages": 2, "min_workers": 3, "listen": "127.0.0.1:0"},
            "--min-workers 3 is not a multiple of --stages 2: use --min-workers 2 or --min-workers 4.",
        ),
        (
            "pipedream",
            {"workers": 1, "stages": 2, "listen": "127.0.0.1:0"},
            "pipedream runs one replica of the model, on 2 workers: use --workers 2, or --min-workers 2 if other",
        ),
        ("hogwild", {"stages": 2}, "hogwild requires the whole model on each worker"),
        ("averaging", {"stages": 2}, "averaging requires the whole model on each worker"),
        ("pipedream", {}, "pipedream is a pipeline of stages: use --stages 2"),
        ("single", {"workers": 5, "stages": 2}, "single runs one replica of the model, on 2 workers: omit --workers 5"),
        ("pipedream", {"servers": 1, "stages": 2}, "pipedream has no servers: omit --servers 1"),
    ],
)
def test_workers_that_make_no_whole_models_are_refused(strategy: str, options: RunOptions, told: str) -> None:
    assert told in refused([strategy], options)


def test_workers_are_a_multiple_of_the_stages_and_strategies_count_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rainband.runtimes.configure.make_stage_plan", lambda *given, **named: split_in(3))

    def workers(strategy: str, **given: int) -> int:
        options: RunOptions = {"stages": 3, "runtime": "sim", **given}  # type: ignore[typeddict-item]
        return configured(["digits", strategy], options).num_workers

    assert workers("downpour") == 3  # of the usual four
    assert workers("single") == 3
    assert workers("downpour", workers=6) == 6


def split_in(stages: int) -> StagePlan:
    plan = in_turn(list(range(stages)))
    return StagePlan(plan=msgspec.structs.replace(plan, num_machines=stages))


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "words, options, told",
    [
        (["pipedream"], {"microbatches": 4}, "has its own schedule"),
        (["pipedream"], {"schedule": "gpipe"}, "has its own schedule"),
        (["pipedream"], {"stages_per_worker": 2}, "omit --microbatches, --schedule and --stages-per-worker"),
        (["pipedream"], {"schedule": "pipedream_2bw"}, "use pipedream pipedream_2bw=yes"),
        (["sync", "batch_per_worker=true"], {"schedule": "pipedream_2bw"}, "use pipedream pipedream_2bw=yes"),
        (["sync", "batch_per_worker=true"], {"schedule": "zigzag"}, "choose from gpipe, one_f_one_b, interleaved"),
        (["sync", "batch_per_worker=true"], {"schedule": "gpip"}, "(did you mean gpipe?)"),
        (
            ["sync", "batch_per_worker=true"],
            {"schedule": "gpipe", "stages_per_worker": 2},
            "the schedule is gpipe: omit one of them",
        ),
        (["sync", "batch_per_worker=true"], {"stages_per_worker": 1}, "--stages-per-worker 1: must be at least 2"),
        (
            ["sync", "batch_per_worker=true"],
            {"microbatches": 5, "schedule": "interleaved"},
            "must be a multiple of 2, the number of workers",
        ),
        (["sync", "batch_per_worker=true"], {"microbatches": 5, "schedule": "interleaved"}, "Use --microbatches 6."),
        (["sync", "batch_per_worker=true"], {"microbatches": 3, "stages_per_worker": 3}, "Use --microbatches 4."),
        (
            ["sync", "batch_per_worker=true"],
            {"record": True, "runtime": "processes"},
            "--record is for workers with the whole model",
        ),
        (["sync", "batch_per_worker=true"], {"time_only": True}, "--time-only does not work with stages"),
        (["pipedream", "pipedream_2bw=yes", "batches_per_update=1"], {}, "type batches_per_update=2 or more"),
    ],
)
def test_what_does_not_go_with_stages_is_refused_before_measuring(
    words: list[str], options: RunOptions, told: str
) -> None:
    assert told in refused(words, {"stages": 2, **options})


@pytest.mark.parametrize("options", [{"schedule": "interleaved"}, {"stages_per_worker": 2}])
def test_schedules_without_stages_are_refused(options: RunOptions) -> None:
    assert "is for a model in several stages: also use --stages 2" in refused(
        ["sync", "batch_per_worker=true"], options
    )


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"pipedream_2bw": True, "vertical_sync": True}, "and vertical_sync both set which versions are used"),
        ({"pipedream_2bw": True, "stash": False}, "and stash=no both set which versions are used"),
        ({"batches_per_update": 4}, "add pipedream_2bw=yes"),
        ({"pipedream_2bw": True, "batches_per_update": -1}, "must be at least the number of stages"),
    ],
)
def test_settings_of_pipedream_that_contradict_each_other_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load_strategy("pipedream", settings)


def in_turn(machines: list[int]) -> Placement:
    stages = tuple(PlacedStage((machine,), (f"u{number}",)) for number, machine in enumerate(machines))
    return Placement(model="m", kind="pipeline", partitioner="hand", num_machines=2, stages=stages)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "strategy, machines, options, told",
    [
        ("downpour", [0, 1, 0, 1], {"schedule": "gpipe"}, "only interleaved supports, not gpipe: omit --schedule"),
        (
            "downpour",
            [0, 1, 0, 1],
            {"stages_per_worker": 3},
            "the placement has 2 stages on each machine, not 3: omit --stages-per-worker",
        ),
        ("downpour", [0, 1, 0, 1], {"microbatches": 3}, "Use --microbatches 4."),
        ("downpour", [0, 1], {"schedule": "interleaved"}, "interleaved needs several: omit --placement"),
        ("downpour", [0, 1], {"stages_per_worker": 2}, "interleaved needs several: omit --placement"),
        ("pipedream", [0, 1, 0, 1], {}, "pipedream has one on each: use rainband placement --partitioner pipedream"),
    ],
)
def test_a_plan_and_what_is_typed_must_agree(
    strategy: str, machines: list[int], options: RunOptions, told: str, tmp_path: Path
) -> None:
    save(in_turn(machines), tmp_path / "plan.json")
    assert told in refused([strategy], {"placement": tmp_path / "plan.json", **options})


def test_a_plan_has_as_many_workers_as_machines_whatever_its_stages(tmp_path: Path) -> None:
    save(in_turn([0, 1, 0, 1, 0, 1]), tmp_path / "plan.json")
    told = refused(["sync", "batch_per_worker=true"], {"placement": tmp_path / "plan.json", "stages": 6})
    assert "--stages 6: the placement" in told and "plan.json has 2: omit --stages" in told


def test_a_team_plan_whose_schedule_does_not_know_its_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="requires the schedule interleaved, not one_f_one_b"):
        StagePlan(plan=in_turn([0, 1, 0, 1]), microbatches=2)
    with pytest.raises(ValueError, match="use --microbatches 2"):
        StagePlan(plan=in_turn([0, 1, 0, 1]), microbatches=1, schedule="interleaved")


def test_a_model_with_too_few_units_says_what_to_type() -> None:
    options: RunOptions = {"runtime": "sim", "stages": 2, "stages_per_worker": 2}
    with pytest.raises(OptionError) as told:
        configured(["linear", "downpour"], options)
    assert "2 stages on each of 2 workers are 4: use fewer stages or stages_per_worker" in str(told.value)
    assert "use fewer --stages or --stages-per-worker" in told.value.written(on_command_line)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"stages": 2, "schedule": "zigzag"}, "choose from gpipe, one_f_one_b, interleaved"),
        ({"stages": 2, "schedule": "interleaved", "microbatches": 3}, "Use microbatches=4."),
        ({"stages_per_worker": 2}, "also use stages=2"),
        ({"schedule": "gpipe"}, "also use stages=2"),
    ],
)
def test_fit_refuses_the_same(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        rainband.fit("digits", "downpour", 2, 1, runtime="sim", **options)


@pytest.mark.usefixtures("unmeasured")
def test_replicas_of_stages_are_for_all_but_2bw_and_partitions_are_not_for_pipedream(tmp_path: Path) -> None:
    stages = (PlacedStage((0, 1), ("a",)), PlacedStage((2,), ("b",)))
    replicated = Placement(model="m", kind="pipeline", partitioner="hand", num_machines=3, stages=stages)
    save(replicated, tmp_path / "replicated.json")
    save(msgspec.structs.replace(replicated, kind="partition"), tmp_path / "partition.json")
    placed: RunOptions = {"placement": tmp_path / "replicated.json"}
    for strategy in ("sync", "downpour", "pipedream"):
        with pytest.raises(TypeError):  # all is well up to measuring
            configured(["digits", strategy], {"runtime": "sim", **placed})
    told = refused(["pipedream", "pipedream_2bw=yes"], placed)
    assert "one worker per stage, and the placement has (2, 1): omit pipedream_2bw" in told
    told = refused(["pipedream"], {"placement": tmp_path / "partition.json"})
    assert "pipedream is a pipeline, and the placement is a partition" in told
