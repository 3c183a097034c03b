"""How a team computes one model: which machine has which units, in how many microbatches, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

import msgspec

from rainband.model_parallel.placement.placement import Placement, is_interleaved
from rainband.model_parallel.placement.profile import Profile
from rainband.model_parallel.schedules.builders import gpipe, interleaved, one_f_one_b
from rainband.model_parallel.schedules.table import Action, need

Flushing = Literal["gpipe", "one_f_one_b", "interleaved"]


def workers_of(plan: Placement) -> tuple[int, ...]:
    """How many workers a copy of the model takes: for each stage its replicas, or one for all stages of a machine."""
    if is_interleaved(plan):
        return (1,) * len({stage.machines for stage in plan.stages})
    return tuple(workers for _, workers in _machines(plan))


def _machines(plan: Placement) -> list[tuple[int, int]]:
    """(stage, workers) of each machine; a stage that is split has several machines, of one worker each."""
    return [
        (number, workers)
        for number, stage in enumerate(plan.stages)
        for workers in ((1,) * len(stage.machines) if stage.split else (len(stage.machines),))
    ]


def machine_of(plan: Placement) -> dict[str, int]:
    """Unit -> its machine, where stages are split."""
    first = 0
    found: dict[str, int] = {}
    for stage in plan.stages:
        found |= {unit: first + stage.split.get(unit, 0) for unit in stage.units}
        first += len(stage.machines) if stage.split else 1
    return found


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and how a batch goes through it. Every worker of a run is told the same.

    A machine is one stage, with a worker for each of its replicas; or, interleaved, every P-th stage, on one worker.
    """

    plan: Placement
    microbatches: int = 1  # into so many parts each batch is cut
    schedule: Flushing = "one_f_one_b"
    example_size: int = 4  # samples with which the model is cut
    seed: int = 0  # of the first values, where each machine makes its own
    profile: Profile | None = None  # of a batch, as measured: how long shares take in virtual time
    microbatch_profile: Profile | None = None  # of a microbatch: small ones take longer than their part of a batch

    def __post_init__(self) -> None:
        need(
            self.schedule == "interleaved" or not is_interleaved(self.plan),
            f"the plan has several stages on a machine, which only interleaved knows, not {self.schedule}.",
        )
        if self.schedule == "interleaved":
            interleaved(
                len(self.workers), self.stages_per_worker, self.microbatches
            )  # refuses microbatches that cannot be dealt

    @property
    def workers(self) -> tuple[int, ...]:
        """Of each machine."""
        return workers_of(self.plan)

    @property
    def size(self) -> int:
        """Workers that compute one model together."""
        return sum(self.workers)

    @property
    def stages_per_worker(self) -> int:
        """Stages of each machine."""
        return len(self.plan.stages) // len(self.workers) if is_interleaved(self.plan) else 1

    def stage(self, machine: int) -> int:
        """The stage of a machine that has one."""
        return _machines(self.plan)[machine][0]

    def seat(self, place: int) -> tuple[int, int]:
        """The machine of a team's worker, and which of its replicas it is: those of a stage are neighbours."""
        for machine, replicas in enumerate(self.workers):
            if place < replicas:
                return machine, place
            place -= replicas
        raise AssertionError(f"there are only {self.size} places")

    def home(self, machine: int, number: int = 0) -> int:
        """The place of the worker that takes a batch of this number through a machine: replicas take turns."""
        return sum(self.workers[:machine]) + number % self.workers[machine]

    def row(self, machine: int, microbatches: int) -> tuple[Action, ...]:
        """What a machine does for one batch, in order."""
        if self.plan.kind == "partition":
            return tuple(
                Action(machine, kind, microbatch, 0) for microbatch in range(microbatches) for kind in ("F", "B")
            )
        if is_interleaved(self.plan):
            return _rows(self.schedule, len(self.workers), self.stages_per_worker, microbatches)[machine]
        return _rows(self.schedule, len(self.plan.stages), 1, microbatches)[self.stage(machine)]

    def check(self, units: Sequence[str]) -> None:
        """Refuse a plan for another model."""
        placed = self.plan.stage_of()
        unknown = [unit for unit in placed if unit not in units]
        missing = [unit for unit in units if unit not in placed]
        if unknown or missing:
            what = f"places {', '.join(unknown)}, which the model does not have" if unknown else ""
            lacks = f"does not place {', '.join(missing)}" if missing else ""
            raise ValueError(
                f"the plan {' and '.join(filter(None, (what, lacks)))}: make a new one with rainband placement, or "
                "leave "
                "out --placement."
            )


@cache
def _rows(
    schedule: Flushing, machines: int, stages_per_worker: int, microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Of each machine; there are no updates in it, as they are the strategy's."""
    match schedule:
        case "gpipe":
            table = gpipe(machines, microbatches)
        case "one_f_one_b":
            table = one_f_one_b(machines, microbatches)
        case "interleaved":  # a batch of few samples has no whole rounds: then some of the last one are left out
            table = interleaved(machines, stages_per_worker, -(-microbatches // machines) * machines)
    return tuple(
        tuple(action for action in row if action.kind != "U" and action.microbatch < microbatches) for row in table.rows
    )
