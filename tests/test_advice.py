"""Warnings before a run: each with the number that makes it bad, and none where nothing is bad."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import rainband
from rainband.cli.main import build_app
from rainband.model_parallel.placement.placement import PlacedStage, Placement
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.plugins import load_strategy, strategy_names
from rainband.protocol import events
from rainband.runtimes.advice import straggler_among, straggler_of, warnings_for
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.run_directory import EventLog, new_directory, write_config
from rainband.runtimes.simulation import run as sim
from rainband.strategy import Straggler
from rainband.views.warnings import before_run, last_straggler

SLOW = Straggler("worker 3", 5.0)
NOW_AND_THEN = Straggler("one step in 20", 10.0, always=False)


def told(strategy: str, workers: int, straggler: Straggler | None = None, **settings: Any) -> str:
    return " | ".join(warnings_for(load_strategy(strategy, settings), workers, straggler))


@pytest.mark.parametrize("name", strategy_names())
def test_nobody_is_warned_of_defaults_with_four_workers_that_are_alike(name: str) -> None:
    assert told(name, 4) == ""


# ---- momentum ----


@pytest.mark.parametrize(
    "strategy, settings, missed, own",
    [
        ("downpour", {"optimizer": "sgd"}, 3, "0.75"),  # 3 / 4: that of four workers, each alone
        ("downpour", {"optimizer": "sgd", "overlap": True}, 7, "0.88"),  # fetched a step before it is used
        ("stale_sync", {}, 3, "0.75"),
        ("stale_sync", {"bound": 0}, 1.5, "0.60"),
        ("bounded_delay", {}, 7, "0.88"),
        ("soft_sync", {"n": 2}, 1.5, "0.60"),
        ("soft_sync", {"n": 1}, 0.75, "0.43"),
    ],
)
def test_momentum_beside_that_of_asynchrony_is_warned_of_with_both_numbers(
    strategy: str, settings: dict[str, Any], missed: float, own: str
) -> None:
    assert f"gradients miss {missed:g} updates on average, which acts as a momentum of {own} by itself" in told(
        strategy, 4, momentum=0.9, **settings
    )


def test_a_small_momentum_or_one_worker_or_lock_step_is_no_reason_to_warn() -> None:
    assert told("stale_sync", 4, momentum=0.2) == ""  # 0.75 + 0.2 < 1
    assert told("soft_sync", 4, momentum=0.5) == ""  # 0.43 + 0.5 < 1
    assert told("stale_sync", 1, momentum=0.9) == ""
    assert told("sync", 4, momentum=0.9) == ""


# ---- waiting for the slow ----


@pytest.mark.parametrize(
    "strategy, settings, how",
    [
        ("sync", {"batch_per_worker": True}, "in rounds all workers"),
        ("stale_sync", {"bound": 0}, "with a bound of 0 all workers"),
        ("stale_sync", {"bound": 3}, "with a bound of 3 after 3 steps all workers"),
        ("stale_sync", {"bound": 0, "compensation": 0.1}, "with a bound of 0 all workers"),
        ("bounded_delay", {"tau": 0}, "with a bound of 0 all workers"),
        ("adaptive_bound", {"max_bound": 4}, "with a bound of 4 after 4 steps all workers"),
    ],
)
def test_the_warning_of_a_worker_that_is_always_slow_says_how_long_others_wait(
    strategy: str, settings: dict[str, Any], how: str
) -> None:
    warning = told(strategy, 4, SLOW, **settings)
    assert f"worker 3 is 5 times slower, and {how} run at its speed: the others wait 80 % of the time" in warning


@pytest.mark.parametrize(
    "strategy, settings",
    [("soft_sync", {}), ("downpour", {}), ("hogwild", {}), ("sync", {"batch_per_worker": True, "backup_workers": 1})],
)
def test_who_waits_for_nobody_need_not_mind(strategy: str, settings: dict[str, Any]) -> None:
    assert told(strategy, 4, SLOW, **settings) == ""


def test_a_bound_is_for_those_who_are_slow_now_and_then() -> None:
    assert told("stale_sync", 4, NOW_AND_THEN, bound=3) == ""
    assert "one step in 20 takes 10 times as long" in told("stale_sync", 4, NOW_AND_THEN, bound=0)
    assert "90 % of such a step" in told("sync", 4, NOW_AND_THEN, batch_per_worker=True)


def test_who_is_slow_is_known_from_the_settings() -> None:
    def of(**compute: Any) -> Straggler | None:
        return straggler_of(
            RunConfig(task="", strategy="", num_workers=4, num_servers=1, sim=SimSettings(compute=compute))
        )

    assert of() is None
    assert of(slow_workers=(1, 2), slow_factor=3.0) == Straggler("worker 1 and worker 2", 3.0)
    assert of(slow_workers=(9,), slow_factor=3.0) is None  # there is none
    assert of(slow_workers=(1,), slow_factor=1.5) is None
    assert of(straggler_chance=0.05) == Straggler("one step in 20", 10.0, always=False)


def test_or_from_the_rates_of_an_earlier_run() -> None:
    assert straggler_among({0: 100.0, 1: 110.0, 2: 25.0}, "then") == Straggler("worker 2 (then)", 4.2)
    assert straggler_among({0: 100.0, 1: 60.0}, "then") is None
    assert straggler_among({0: 100.0, 1: 0.0}, "then") is None  # not known


# ---- numbers that do not fit ----


def test_the_warning_of_an_n_that_does_not_divide_the_workers_says_what_it_makes_of_them() -> None:
    warning = told("soft_sync", 7, n=3)
    assert "c = 7 / 3 is rounded down to 2, so there are 3.5 updates, not 3" in warning
    assert warning.endswith("Choose n from 1, 7.")
    assert told("soft_sync", 6, n=3) == ""


def test_the_warning_of_an_n_larger_than_the_workers_says_what_it_does_to_the_rate() -> None:
    assert "so n acts as 4. Choose n from 1 to 4." in told("soft_sync", 4, n=8)
    assert "so n acts as 4 and the learning rate is divided by 8" in told("soft_sync", 4, n=8, scaling="n")


def test_where_several_workers_compute_one_model_its_copies_count(tmp_path: Path) -> None:
    """Eight workers, two for each copy: four."""
    stages = (PlacedStage((0,), ("first",)), PlacedStage((1,), ("last",)))
    plan = Placement(model="", kind="pipeline", partitioner="", num_machines=2, stages=stages)
    config = RunConfig(
        task="digits",
        strategy="soft_sync",
        strategy_settings={"n": 3},
        num_workers=8,
        num_servers=1,
        stage_plan=StagePlan(plan=plan),
    )
    assert "n=3 does not divide 4 replicas of the model" in " ".join(
        line.strip() for line in before_run(config, tmp_path)
    )


def test_a_codec_that_is_not_used_in_one_memory_is_named(tmp_path: Path) -> None:
    config = RunConfig(task="digits", strategy="downpour", num_workers=2, num_servers=1, pull_codec="bf16")
    text = " ".join(line.strip() for line in before_run(config, tmp_path))
    assert "--pull-codec bf16 is not used here" in text
    over_tcp = msgspec.structs.replace(config, transport="tcp")
    assert before_run(over_tcp, tmp_path) == []


def test_the_warning_of_linear_scaling_without_a_warm_up_has_the_rate_of_its_first_step() -> None:
    assert "a learning rate of 0.8, 8 times that of one worker" in told(
        "sync", 8, batch_per_worker=True, scaling="linear", lr=0.1
    )
    assert told("sync", 8, batch_per_worker=True, scaling="linear", lr=0.1, warmup_fraction=0.1) == ""
    assert (
        told("sync", 8, batch_per_worker=True, scaling="sqrt")
        == told("sync", 1, batch_per_worker=True, scaling="linear")
        == ""
    )
    assert "0.6, 6 times" in told("sync", 8, batch_per_worker=True, scaling="linear", backup_workers=2)


def test_backups_that_throw_most_of_the_work_away_are_counted() -> None:
    assert "of 4 gradients 3 are computed and thrown away. Choose at most 2." in told(
        "sync", 4, batch_per_worker=True, backup_workers=3
    )
    assert told("sync", 4, batch_per_worker=True, backup_workers=2) == ""


def test_the_warning_of_many_workers_with_one_rate_says_how_much_smaller_it_must_be() -> None:
    """For 19 missed updates: 1 / sin(pi / 78) = 24.8."""
    assert "learning rate is then 25 times smaller" in told("stale_sync", 20)
    assert "learning rate is then 25 times smaller" in told("hogwild", 20)
    assert told("soft_sync", 20, n=20) == told("downpour", 10) == ""  # divided by the staleness; Adagrad


@pytest.mark.parametrize("workers, n", [(4, 1), (4, 4), (6, 2), (30, 15)])
def test_expected_staleness_is_lambda_minus_1_over_c(workers: int, n: int) -> None:
    assert math.isclose(load_strategy("soft_sync", {"n": n}).staleness(workers), (workers - 1) / (workers // n))


@pytest.mark.parametrize(
    "strategy, settings, missed",
    [
        ("downpour", {}, 3),
        ("downpour", {"overlap": True}, 7),
        ("downpour", {"n_fetch": 3}, 7),  # the second step after a fetch is one round older, ...
        pytest.param("downpour", {"n_fetch": 3, "overlap": True}, 11, marks=pytest.mark.slow),
        ("bounded_delay", {}, 7),
        pytest.param("bounded_delay", {"tau": 0}, 1.5, marks=pytest.mark.slow),  # 0, 1, 2 and 3
        ("stale_sync", {}, 3),
        pytest.param("stale_sync", {"bound": 0}, 1.5, marks=pytest.mark.slow),
        ("soft_sync", {"n": 2}, 1.5),
    ],
)
def test_the_staleness_that_is_expected_is_the_one_that_is_seen(
    tmp_path: Path, strategy: str, settings: dict[str, Any], missed: float
) -> None:
    """Of four workers that are alike."""
    config = RunConfig(
        task="linear",
        task_settings={"samples": 2048, "epochs": 1},
        strategy=strategy,
        strategy_settings=settings,
        num_workers=4,
        num_servers=1,
        runtime="sim",
        directory=str(tmp_path),
        sim=SimSettings(compute={"kind": "constant"}),
    )
    expected = load_strategy(strategy, settings).staleness(4)
    assert expected == missed
    assert sim.run(config, lambda event: None).staleness["mean"] == pytest.approx(expected, rel=0.05)


# ---- where they are told ----


def typed(*words: str) -> Any:
    return CliRunner().invoke(build_app(), list(words))


def test_train_says_it_before_it_begins(tmp_path: Path) -> None:
    words = ("linear", "stale_sync", "bound=0", "task.samples=64", "task.epochs=1", "lr=0.0625")
    where = ("--runtime", "sim", "--workers", "2", "compute.slow_workers=1", "--runs", str(tmp_path))
    result = typed("train", *words, *where)
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert text.index("WARNING: worker 1 is 4 times slower") < text.index("starting 2 workers")


def test_fit_warns_of_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(Exception):
        """The run need not begin."""

    def stop(*given: object, **named: object) -> None:
        raise Enough

    monkeypatch.setattr("rainband.runtimes.processes.launcher.run", stop)
    with pytest.warns(UserWarning, match="n=3 does not divide 4 workers"), pytest.raises(Enough):
        rainband.fit("digits", rainband.SoftSync(n=3), workers=4, runs=tmp_path)
    with warnings.catch_warnings(), pytest.raises(Enough):
        warnings.simplefilter("error")
        rainband.fit("digits", rainband.SoftSync(n=2), workers=4, runs=tmp_path)


def test_explain_says_what_is_to_be_expected_of_settings() -> None:
    text = " ".join(typed("explain", "soft_sync", "n=3", "--workers", "7").output.split())
    assert "Expect: staleness with 7 workers: 3 updates on average." in text
    assert "c = 7 / 3 is rounded down to 2" in text
    assert "n=3 updates in the time in which every worker pushes once" in text
    assert "c = workers / n; a whole number; given, default n=1" in text
    assert "momentum=0.0 for sgd and rmsprop; a number; default" in text
    assert "Use it: rainband train digits soft_sync n=3 " in text
    assert "Expect:" not in typed("explain", "single").output
    assert "Expect:" not in typed("explain", "pipedream").output
    assert typed("explain", "soft_sync", "m=3").exit_code == 2


def test_explain_says_that_the_staleness_of_a_strategy_is_unknown_unless_it_predicts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(rainband.Downpour, "staleness")
    monkeypatch.delattr(rainband.Downpour, "advice")
    text = typed("explain", "downpour").output
    assert "Expect:  staleness: unknown, because Downpour does not override `staleness`." in text
    assert "updates on average" not in text


def earlier_run(root: Path, task: str, rates: dict[int, float]) -> str:
    directory = new_directory(root, task, "downpour")
    config = RunConfig(task=task, strategy="downpour", num_workers=len(rates), num_servers=1, directory=str(directory))
    write_config(directory, config)
    log = EventLog(directory)
    for at_s in (1.0, 2.0):
        log.write(
            events.Progress(
                at_s=at_s,
                batches_done=1,
                batches=2,
                samples_done=1,
                samples=2,
                loss=None,
                samples_per_s=rates,
                staleness_mean=0.0,
                staleness_max=0,
                waited_s={},
            )
        )
    log.close()
    return directory.name


def test_a_worker_that_was_slow_the_last_time_is_remembered(tmp_path: Path) -> None:
    name = earlier_run(tmp_path, "digits", {0: 100.0, 1: 20.0, 2: 100.0})
    config = RunConfig(task="digits", strategy="stale_sync", num_workers=3, num_servers=1)

    assert last_straggler(config, tmp_path) == Straggler(f"worker 1 (in the run {name})", 5.0)
    assert f"worker 1 (in the run {name}) is 5 times slower" in " ".join(
        line.strip() for line in before_run(config, tmp_path)
    )
    for other in ({"task": "fashion"}, {"num_workers": 4}):
        assert last_straggler(msgspec.structs.replace(config, **other), tmp_path) is None
    assert last_straggler(config, tmp_path / "nowhere") is None
