"""How long a gradient takes: constant, log-normal, exponential or measured; with slow machines and stragglers."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from rainband.runtimes.simulation.models.random_times import exponential, lognormal


@dataclass(frozen=True)
class ComputeModel:
    """The time of one step of one worker."""

    kind: Literal["constant", "lognormal", "exponential", "trace"] = "lognormal"
    step_s: float = 0.01  # the mean time of a step on an ordinary machine
    spread: float = 0.1  # of the logarithm, for lognormal
    trace_s: tuple[float, ...] = ()  # measured steps, for trace: each worker goes through them from a place of its own
    slow_workers: tuple[int, ...] = ()  # workers on slow machines
    slow_factor: float = 4.0  # how many times longer they take
    straggler_chance: float = 0.0  # of any one step to take longer
    straggler_factor: float = 10.0
    measure_s: float = 0.0  # that measuring the model takes the one worker which does it

    def __post_init__(self) -> None:
        if self.step_s < 0 or self.spread < 0:
            raise ValueError(f"step_s={self.step_s} spread={self.spread}: times cannot be below 0.")
        if self.measure_s < 0:
            raise ValueError(f"measure_s={self.measure_s}: choose 0, so that measuring takes no time, or more.")
        if self.kind == "trace" and not self.trace_s:
            raise ValueError("compute kind=trace needs measured steps: trace_s=[0.010, 0.012].")
        if not 0 <= self.straggler_chance <= 1:
            raise ValueError(f"straggler_chance={self.straggler_chance}: choose from 0 to 1.")

    @property
    def mean_s(self) -> float:
        """Of an ordinary machine."""
        mean = sum(self.trace_s) / len(self.trace_s) if self.kind == "trace" else self.step_s
        return mean * (1 + self.straggler_chance * (self.straggler_factor - 1))


class ComputePace:
    """The steps of one worker, one after the other. Random numbers depend on the seed and the worker only."""

    def __init__(self, model: ComputeModel, seed: int, worker: int) -> None:
        self.model = model
        self.is_usual = model.kind == "lognormal"
        self.random = Random(f"compute {seed} {worker}")
        self.factor = model.slow_factor if worker in model.slow_workers else 1.0
        self.place = self.random.randrange(len(model.trace_s)) if model.kind == "trace" else 0

    def next_s(self) -> float:
        """The time of the next step."""
        model = self.model
        ordinary_s = model.step_s * lognormal(self.random, model.spread) if self.is_usual else self._ordinary_s()
        time_s = self.factor * ordinary_s
        if model.straggler_chance and self.random.random() < model.straggler_chance:
            return time_s * model.straggler_factor
        return time_s

    def _ordinary_s(self) -> float:
        model = self.model
        match model.kind:
            case "constant":
                return model.step_s
            case "lognormal":
                return model.step_s * lognormal(self.random, model.spread)
            case "exponential":
                return model.step_s * exponential(self.random)
            case "trace":
                self.place = (self.place + 1) % len(model.trace_s)
                return model.trace_s[self.place]
