"""What cannot be computed by several workers together is told before anything is measured or started."""

from __future__ import annotations

import msgspec
import pytest

from rainband.catalogue import load_strategy
from rainband.cli.configure import configured
from rainband.cli.teams import in_teams
from rainband.pipeline.plan import Plan, Stage
from rainband.worlds.teaming import check_plan


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
    "strategy, micros, schedule, record, told",
    [
        ("pipedream", 4, None, False, "has a schedule of its own"),
        ("pipedream", None, "gpipe", False, "has a schedule of its own"),
        ("sync", None, "zigzag", False, "choose from gpipe, one_f_one_b"),
        ("sync", None, None, True, "--record is for workers with the whole model"),
    ],
)
def test_what_does_not_go_with_stages_is_refused_before_measuring(
    strategy: str, micros: int | None, schedule: str | None, record: bool, told: str
) -> None:
    config = msgspec.structs.replace(configured(["digits", strategy], None, {}, "sim", 2), record=record)
    with pytest.raises(ValueError, match=told):
        in_teams(config, 2, None, micros, schedule)


def test_microbatches_without_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="type --stages 2, too"):
        in_teams(configured(["digits", "sync"], None, {}, "sim"), None, None, 4, None)


def test_replicas_of_stages_are_for_pipedream_and_partitions_are_not() -> None:
    stages = (Stage((0, 1), ("a",)), Stage((2,), ("b",)))
    replicated = Plan(model="m", kind="pipeline", partitioner="hand", num_machines=3, stages=stages)
    with pytest.raises(ValueError, match=r"several machines \(2, 1\), which only pipedream knows"):
        check_plan(load_strategy("sync", {}), "sync", replicated)
    check_plan(load_strategy("pipedream", {}), "pipedream", replicated)
    partition = msgspec.structs.replace(replicated, kind="partition")
    with pytest.raises(ValueError, match="pipedream is a pipeline, and the plan is a partition"):
        check_plan(load_strategy("pipedream", {}), "pipedream", partition)
