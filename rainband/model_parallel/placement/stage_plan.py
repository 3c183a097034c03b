"""The plan of a replica whose workers compute one model: units of each machine, microbatches and schedule."""

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
    """Return the workers of each machine of a replica; interleaved, a machine is one worker with several stages."""
    if is_interleaved(plan):
        return (1,) * len({stage.machines for stage in plan.stages})
    return tuple(workers for _, workers in _machines(plan))


def _machines(plan: Placement) -> list[tuple[int, int]]:
    """Return (stage, workers) of each machine; a split stage has several machines, each with its replicas."""
    return [(number, stage.replicas) for number, stage in enumerate(plan.stages) for _ in range(stage.ways)]


def machine_of(plan: Placement) -> dict[str, int]:
    """Return the machine of each unit, where stages are split."""
    first = 0
    found: dict[str, int] = {}
    for stage in plan.stages:
        found |= {unit: first + stage.split.get(unit, 0) for unit in stage.units}
        first += stage.ways
    return found


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A placement, and how a batch goes through it: the same on every worker of a run.

    A machine has one stage, and a worker for each replica of it; or, interleaved, every P-th stage on one worker.
    """

    plan: Placement
    microbatches: int = 1  # of each batch
    schedule: Flushing = "one_f_one_b"
    example_size: int = 4  # samples with which the model is traced
    seed: int = 0  # of the first values, where each machine makes its own (deferred)
    recompute: bool = False  # compute fragments again before their backward, instead of keeping their activations
    profile: Profile | None = None  # of a batch, as measured: gives fragments their times in a simulation
    microbatch_profile: Profile | None = None  # of a microbatch: a small one takes more than its fraction of a batch
    loss_is_sum: bool = False  # over the samples: losses of microbatches are added, not averaged
    loss_note: str = ""  # what users should know about the losses of microbatches

    def __post_init__(self) -> None:
        need(
            self.schedule == "interleaved" or not is_interleaved(self.plan),
            f"the placement has several stages on a machine, which requires the schedule interleaved, not "
            f"{self.schedule}.",
        )
        if self.schedule == "interleaved":
            interleaved(len(self.workers), self.stages_per_worker, self.microbatches)  # checks their numbers

    @property
    def workers(self) -> tuple[int, ...]:
        """Workers of each machine."""
        return workers_of(self.plan)

    @property
    def size(self) -> int:
        """Workers of a replica."""
        return sum(self.workers)

    @property
    def stages_per_worker(self) -> int:
        """Stages of each worker."""
        return len(self.plan.stages) // len(self.workers) if is_interleaved(self.plan) else 1

    def stage(self, machine: int) -> int:
        """Return the stage of a machine that has only one."""
        return _machines(self.plan)[machine][0]

    def machine_and_replica(self, rank: int) -> tuple[int, int]:
        """Return the machine of a worker of this rank, and which replica of it the worker is."""
        for machine, replicas in enumerate(self.workers):
            if rank < replicas:
                return machine, rank
            rank -= replicas
        raise AssertionError(f"there are only {self.size} workers")

    def rank_of(self, machine: int, number: int = 0) -> int:
        """Return the rank of the worker that computes (micro)batch `number` on a machine: replicas take turns."""
        return sum(self.workers[:machine]) + number % self.workers[machine]

    def ranks_of(self, machine: int) -> tuple[int, ...]:
        """Return the ranks of all replicas of a machine."""
        return tuple(self.rank_of(machine, number) for number in range(self.workers[machine]))

    @property
    def first_replicas(self) -> tuple[int, ...]:
        """The ranks of the first replica of each machine, which hold the parameters and compute answers."""
        return tuple(self.rank_of(machine) for machine in range(len(self.workers)))

    def row(self, rank: int, microbatches: int) -> tuple[Action, ...]:
        """Return a worker's actions for one batch, in order; updates are the strategy's."""
        machine, replica = self.machine_and_replica(rank)
        count = self.workers[machine]
        return tuple(a for a in self._row_of(machine, microbatches) if a.microbatch % count == replica)

    def _row_of(self, machine: int, microbatches: int) -> tuple[Action, ...]:
        """Return the actions of all replicas of a machine."""
        if self.plan.kind == "partition":
            return tuple(Action(machine, kind, m, 0) for m in range(microbatches) for kind in ("F", "B"))
        if is_interleaved(self.plan):
            return _rows(self.schedule, len(self.workers), self.stages_per_worker, microbatches)[machine]
        return _rows(self.schedule, len(self.plan.stages), 1, microbatches)[self.stage(machine)]

    def check(self, units: Sequence[str]) -> None:
        """Raise ValueError if the placement is for another model."""
        placed = self.plan.stage_of()
        unknown = [unit for unit in placed if unit not in units]
        missing = [unit for unit in units if unit not in placed]
        if unknown or missing:
            what = f"has {', '.join(unknown)}, which the model does not" if unknown else ""
            lacks = f"lacks {', '.join(missing)}" if missing else ""
            raise ValueError(
                f"the placement {' and '.join(filter(None, (what, lacks)))}: make a new one with rainband placement, "
                "or omit --placement."
            )


@cache
def _rows(
    schedule: Flushing, machines: int, stages_per_worker: int, microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the row of each machine, without updates."""
    match schedule:
        case "gpipe":
            table = gpipe(machines, microbatches)
        case "one_f_one_b":
            table = one_f_one_b(machines, microbatches)
        case "interleaved":  # a small batch has no whole rounds: the row omits the missing microbatches
            table = interleaved(machines, stages_per_worker, -(-microbatches // machines) * machines)
    return tuple(
        tuple(action for action in row if action.kind != "U" and action.microbatch < microbatches) for row in table.rows
    )
