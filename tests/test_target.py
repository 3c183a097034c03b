"""Runs that end when a metric is reached."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import rainband
from rainband.cli.options.words import configured
from rainband.coordinator.state import Target
from rainband.options import OptionError, RunOptions
from rainband.protocol import events
from rainband.runtimes.simulation.run import SimulatedResult, run
from rainband.views.history import RunSoFar
from rainband.views.summary import summary
from tests.test_stages_sim import Seen


def simulated(folder: Path, strategy: str, target: str, **settings: object) -> tuple[SimulatedResult, Seen]:
    words = ["tests.stage_tasks:Shaped", strategy, "task.name=chain", "task.samples=480", "task.epochs=4"]
    words += [f"{name}={value}" for name, value in settings.items()]
    config = configured(words, {"runtime": "sim", "target": target, "eval_every_s": 0.001, "workers": 2})
    folder.mkdir()
    seen = Seen()
    return run(msgspec.structs.replace(config, directory=str(folder)), seen), seen


@pytest.mark.parametrize(
    "strategy, settings", [("downpour", {"lr": 0.01}), ("sync", {"lr": 0.1}), ("averaging", {"lr": 0.05})]
)
def test_a_run_ends_when_its_target_is_reached(tmp_path: Path, strategy: str, settings: dict[str, object]) -> None:
    result, seen = simulated(tmp_path / "run", strategy, "loss=0.02", **settings)
    assert result.outcome == "finished"
    (reached,) = [event for event in seen if isinstance(event, events.TargetReached)]
    assert reached.metric == "loss" and reached.value <= 0.02 and 0 < reached.samples < 1920
    assert int(result.accounting["not_processed"]) > 0 and not result.accounting["lost"]  # type: ignore[call-overload]
    lines = summary(RunSoFar.from_events(seen), tmp_path / "run")
    (line,) = [line for line in lines if line.strip().startswith("target")]
    assert "(target 0.02) after" in line and f"{reached.samples:,} samples" in line


def test_full_batch_methods_end_at_a_target_too(tmp_path: Path) -> None:
    result, seen = simulated(tmp_path / "run", "sandblaster", "loss=0.01")
    assert result.outcome == "finished", result.reason
    assert any(isinstance(event, events.TargetReached) for event in seen)


def test_a_target_that_is_not_reached_is_in_the_summary(tmp_path: Path) -> None:
    result, seen = simulated(tmp_path / "run", "downpour", "loss=-1")
    assert result.outcome == "finished" and not result.accounting["not_processed"]
    assert any("loss=-1 was not reached" in line for line in summary(RunSoFar.from_events(seen), tmp_path))


def test_a_metric_that_the_task_does_not_measure_is_told_once_and_in_the_summary(tmp_path: Path) -> None:
    _, seen = simulated(tmp_path / "run", "downpour", "losss=0.1")
    warned = [event.text for event in seen if isinstance(event, events.Warned)]
    assert warned == ["the target is never reached: the task measures no losss (did you mean loss?), only loss."]
    lines = summary(RunSoFar.from_events(seen), tmp_path)
    assert any("losss=0.1 was not reached: no losss was measured, only loss" in line for line in lines)


@pytest.mark.parametrize(
    "metric, value, measured, reached",
    [
        ("accuracy", 0.9, 0.9, True),
        ("accuracy", 0.9, 0.89, False),
        ("loss", 0.1, 0.1, True),
        ("val_loss", 0.1, 0.2, False),
        ("accuracy", 0.9, float("nan"), False),
        ("loss", 0.9, float("nan"), False),
    ],
)
def test_losses_are_better_when_smaller(metric: str, value: float, measured: float, reached: bool) -> None:
    target = Target(metric, value)
    assert target.is_reached({metric: measured, "other": 1.0}) is reached
    assert not target.is_reached({"other": value})


@pytest.mark.parametrize(
    "strategy, options, told",
    [
        ("downpour", {"target": "accuracy"}, "type a metric and a number"),
        ("downpour", {"target": "accuracy=high"}, "type a metric and a number"),
        ("downpour", {"target": "=0.9"}, "type a metric and a number"),
        ("downpour", {"target": "accuracy=nan"}, "type a metric and a number"),
        ("downpour", {"target": "accuracy=0.9", "eval_every_s": 0.0}, "requires evaluations"),
        ("pipedream", {"target": "accuracy=0.9", "stages": 2}, "evaluates only at its end"),
        ("downpour", {"target": "accuracy=0.9", "time_only": True, "runtime": "sim"}, "nothing is evaluated"),
    ],
)
def test_a_target_that_cannot_be_measured_is_refused(strategy: str, options: RunOptions, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        configured(["digits", strategy], options)


def test_a_target_is_looked_for_every_second_unless_told_otherwise() -> None:
    assert configured(["digits", "downpour"], {"target": "accuracy=0.9"}).eval_every_s == 1.0
    assert configured(["digits", "downpour"], {"target": "accuracy=0.9", "eval_every_s": 3.0}).eval_every_s == 3.0


@pytest.mark.processes
def test_a_run_of_processes_ends_at_a_target(tmp_path: Path) -> None:
    options = {"eval_every_s": 0.1, "epochs": 500, "servers": 1, "runs": tmp_path}
    fitted = rainband.fit("digits", "downpour", 2, target="accuracy=0.2", **options)  # type: ignore[arg-type]
    assert fitted.outcome == "finished"
    assert fitted.accounting.not_processed
