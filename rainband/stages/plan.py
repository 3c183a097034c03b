"""How a team computes one model: which machine has which units, in how many microbatches, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from rainband.pipeline.plan import Plan
from rainband.pipeline.schedules import gpipe, one_f_one_b
from rainband.pipeline.table import Action

Flushing = Literal["gpipe", "one_f_one_b"]


class TeamPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and how a batch goes through it. Every worker of a run is told the same."""

    plan: Plan
    micros: int = 1  # into so many parts each batch is cut
    schedule: Flushing = "one_f_one_b"
    example_size: int = 4  # samples with which the model is cut
    seed: int = 0  # of the first values, where each machine makes its own
    forward_s: dict[str, float] = {}  # of each unit, as measured: how long its share takes in virtual time
    backward_s: dict[str, float] = {}

    @property
    def size(self) -> int:
        """Workers that compute one model together."""
        return sum(self.plan.replicas())

    def seat(self, place: int) -> tuple[int, int]:
        """The stage of a team's worker, and which of its replicas it is: those of a stage come one after the other."""
        for stage, replicas in enumerate(self.plan.replicas()):
            if place < replicas:
                return stage, place
            place -= replicas
        raise AssertionError(f"there are only {self.size} places")

    def home(self, stage: int, number: int = 0) -> int:
        """The place of the worker that takes a batch of this number through a stage: they take turns."""
        replicas = self.plan.replicas()
        return sum(replicas[:stage]) + number % replicas[stage]

    def row(self, machine: int, micros: int) -> tuple[Action, ...]:
        """What a machine does for one batch, in order."""
        if self.plan.kind == "partition":
            return tuple(Action(machine, kind, micro, 0) for micro in range(micros) for kind in ("F", "B"))
        make = gpipe if self.schedule == "gpipe" else one_f_one_b
        return tuple(action for action in make(len(self.plan.stages), micros).rows[machine] if action.kind != "U")

    def check(self, units: Sequence[str]) -> None:
        """Refuse a plan for another model."""
        placed = self.plan.stage_of()
        unknown = [unit for unit in placed if unit not in units]
        missing = [unit for unit in units if unit not in placed]
        if unknown or missing:
            what = f"places {', '.join(unknown)}, which the model does not have" if unknown else ""
            lacks = f"does not place {', '.join(missing)}" if missing else ""
            raise ValueError(
                f"the plan {' and '.join(filter(None, (what, lacks)))}: make a new one with rainband plan, or leave "
                "out --plan."
            )
