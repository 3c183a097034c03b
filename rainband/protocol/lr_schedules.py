"""Learning-rate schedules: pure functions of how far the run is, never of one worker's steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """The factor on the learning rate at a position from 0 (start) to 1 (end)."""

    shape: Shape = "constant"
    warmup_fraction: float = 0.0  # learning-rate warm-up from 0, as a fraction of the run

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_fraction < 1:
            raise ValueError(f"warmup_fraction={self.warmup_fraction}: give a fraction from 0 to below 1.")
        if self.shape not in ("constant", "linear", "cosine"):
            raise ValueError(f"no lr_schedule named {self.shape!r}: choose constant, linear or cosine.")

    @property
    def is_constant(self) -> bool:
        return self.shape == "constant" and not self.warmup_fraction

    def scale(self, position: float) -> float:
        if position < self.warmup_fraction:
            return position / self.warmup_fraction
        rest = (position - self.warmup_fraction) / (1 - self.warmup_fraction)
        match self.shape:
            case "constant":
                return 1.0
            case "linear":
                return 1 - rest
            case "cosine":
                return (1 + math.cos(math.pi * rest)) / 2
