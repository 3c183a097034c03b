"""A pipeline schedule as data: a row of actions for each machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One step of a machine.

    F, B   forward or backward of a microbatch through a stage, at the parameters of a version
    U      update number `microbatch` of a stage: makes `version` from the one before it and its microbatches' gradients
    """

    stage: int
    kind: Literal["F", "B", "U"]
    microbatch: int
    version: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Table:
    """The order of actions on each machine. Versions count a stage's updates: version 0 is the start."""

    name: str
    rows: tuple[tuple[Action, ...], ...]  # one per machine
    machines: tuple[tuple[int, ...], ...]  # of each stage; several are replicas, which take microbatches in turn
    num_microbatches: int
    microbatches_per_update: tuple[int, ...]  # of each stage
    stash: bool = True  # False: an update overwrites parameters that started microbatches will go back through

    @property
    def num_stages(self) -> int:
        return len(self.machines)

    def machine_of(self, stage: int, microbatch: int) -> int:
        """Return the machine that takes this microbatch through this stage."""
        return self.machines[stage][microbatch % len(self.machines[stage])]

    def microbatches_of(self, stage: int, update: int) -> range:
        """Return the microbatches whose gradients an update sums."""
        size = self.microbatches_per_update[stage]
        return range(update * size, min((update + 1) * size, self.num_microbatches))

    def num_updates(self, stage: int) -> int:
        return -(-self.num_microbatches // self.microbatches_per_update[stage])

    def later_versions(self, machine: int, done: int) -> set[int]:
        """Return the versions that later forwards use, of the stage of action number `done` of a machine's row."""
        row = self.rows[machine]
        return {a.version for a in row[done + 1 :] if a.kind == "F" and a.stage == row[done].stage}

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)


def need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
