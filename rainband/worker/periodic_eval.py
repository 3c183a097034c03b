"""The task's own measures while it trains: one worker takes them now and then, between two steps."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rainband.protocol.worker_stats import Stats
from rainband.tasks.task import Task

SHARE = 20  # times as long as measuring takes, it trains before the next


class PeriodicEval:
    """Evaluates the task periodically, with the parameters that the worker has at that moment."""

    def __init__(
        self, task: Task, module: nn.Module, stats: Stats, every_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.task = task
        self.module = module
        self.stats = stats
        self.every_s = every_s
        self.now = now
        self.next_at = now() + every_s

    def before_step(self) -> None:
        began = self.now()
        if began < self.next_at:
            return
        try:
            with as_it_was(self.module):
                self.stats.metrics = measure(self.task, self.module)
        except Exception:  # of the user's code: it is told, and must not end a training that goes well
            print("rainband: measuring failed, and is tried again only at the end of the run:", file=sys.stderr)
            traceback.print_exc()
            self.next_at = float("inf")
            return
        self.next_at = began + max(self.every_s, SHARE * (self.now() - began))


def measure(task: Task, module: nn.Module) -> dict[str, float]:
    """Return the task's metrics of the module, which is left in evaluation mode."""
    module.eval()
    return {name: float(value) for name, value in task.evaluate(module).items()}


@contextmanager
def as_it_was(module: nn.Module) -> Iterator[None]:
    """Whatever is done inside: every part has its mode again afterwards, and random numbers go on where they were."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for part, training in modes:
            part.training = training
