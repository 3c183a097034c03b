"""Periodic evaluation: one worker measures the task's metrics between two steps."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable

import torch
from torch import nn

from rainband.model.unchanged import same_modes
from rainband.protocol.worker_stats import Stats
from rainband.tasks.task import Task

SHARE = 20  # an evaluation that takes t seconds is followed by at least 20 t of training


class PeriodicEval:
    """Evaluates every `every_s` seconds, with the worker's current parameters."""

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
            with same_modes(self.module), torch.random.fork_rng(devices=[]):
                self.stats.metrics = measure(self.task, self.module)
        except Exception:  # in the user's code: it is printed, and training continues
            print("rainband: the evaluation failed; the next one is at the end of the run:", file=sys.stderr)
            traceback.print_exc()
            self.next_at = float("inf")
            return
        self.next_at = began + max(self.every_s, SHARE * (self.now() - began))


def measure(task: Task, module: nn.Module) -> dict[str, float]:
    """Return the task's metrics for the module, which is left in evaluation mode."""
    module.eval()
    return {name: float(value) for name, value in task.evaluate(module).items()}
