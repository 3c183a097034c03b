"""A pipeline schedule as data: a row of actions for each machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One thing a machine does.

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
    """Who does what in which order. Versions count a stage's updates: version 0 is the start."""

    name: str
    rows: tuple[tuple[Action, ...], ...]  # one per machine
    homes: tuple[
        tuple[int, ...], ...
    ]  # stage -> its machines; several: replicas, microbatch m goes to m mod their number
    num_microbatches: int
    microbatches_per_update: tuple[int, ...]  # of each stage
    stash: bool = True  # False: an update overwrites parameters that microbatches on the way will go back through

    @property
    def num_stages(self) -> int:
        return len(self.homes)

    def home(self, stage: int, microbatch: int) -> int:
        """The machine that takes this microbatch through this stage."""
        return self.homes[stage][microbatch % len(self.homes[stage])]

    def microbatches_of(self, stage: int, update: int) -> range:
        """The microbatches whose gradients an update sums."""
        size = self.microbatches_per_update[stage]
        return range(update * size, min((update + 1) * size, self.num_microbatches))

    def num_updates(self, stage: int) -> int:
        return -(-self.num_microbatches // self.microbatches_per_update[stage])

    @cached_property
    def last_use(self) -> dict[tuple[int, int, int], int]:
        """(machine, stage, version) -> the place in the machine's row after which nobody needs that version."""
        return {
            (machine, action.stage, action.version): place
            for machine, row in enumerate(self.rows)
            for place, action in enumerate(row)
            if action.kind != "U"
        }

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)


def need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
