"""Measuring while it trains: how often, with what left as it was, and that it harms nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from rainband.protocol.worker_stats import Stats
from rainband.views.event_text import progress_line
from rainband.views.history import RunSoFar
from rainband.worker.periodic_eval import PeriodicEval
from tests.synthetic_runs import planned, progress, started


@dataclass
class Watch:
    """A clock that the test sets."""

    s: float = 0.0

    def __call__(self) -> float:
        return self.s


class Counted:
    """Counts its evaluations; each takes the same time."""

    def __init__(self, watch: Watch, takes_s: float = 0.0) -> None:
        self.watch = watch
        self.takes_s = takes_s
        self.times = 0
        self.fails = False

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        torch.rand(3)  # a shuffling loader, say
        assert not module.training
        if self.fails:
            raise ZeroDivisionError
        self.times += 1
        self.watch.s += self.takes_s
        return {"accuracy": self.times / 10}


def measuring(takes_s: float = 0.0) -> tuple[PeriodicEval, Any, Watch, Stats]:
    watch, stats = Watch(), Stats()
    task: Any = Counted(watch, takes_s)
    module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())  # of which one part was frozen by the user
    return PeriodicEval(task, module, stats, 10.0, watch), task, watch, stats


def test_it_measures_every_ten_seconds_and_the_heartbeat_tells() -> None:
    measuring_, task, watch, stats = measuring()
    for second in range(31):
        watch.s = float(second)
        measuring_.before_step()
    assert task.times == 3
    assert stats.heartbeat().metrics == {"accuracy": 0.3}


def test_measuring_that_takes_a_second_is_done_every_twenty() -> None:
    measuring_, task, watch, _ = measuring(takes_s=1.0)
    began = []
    while watch.s < 60:
        before = task.times
        at = watch.s
        measuring_.before_step()
        began += [at] if task.times > before else []
        watch.s += 1.0
    assert began == [10.0, 30.0, 50.0]


def test_modes_and_random_numbers_are_as_they_were() -> None:
    measuring_, _, watch, _ = measuring()
    torch.manual_seed(1)
    watch.s = 10.0
    measuring_.before_step()
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))
    assert [part.training for part in measuring_.module.modules()] == [True, True, False]


def test_an_error_in_measuring_is_reported_once_and_the_training_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    measuring_, task, watch, stats = measuring()
    task.fails = True
    for second in (10.0, 20.0, 30.0):
        watch.s = second
        measuring_.before_step()
    assert capsys.readouterr().err.count("the evaluation failed") == 1
    assert stats.metrics == {} and measuring_.next_at == math.inf


def test_the_line_of_progress_has_the_metric_beside_the_loss() -> None:
    so_far = RunSoFar()
    told = msgspec.structs.replace(progress(2.0, 100), metrics={"accuracy": 0.875, "loss": 9.0})
    for event in (started(), planned(), told):
        so_far.absorb(event)
    assert "accuracy 0.875" in progress_line(so_far) and "loss 9" not in progress_line(so_far)
