"""A strategy that promises a bound and does not keep it: what becomes of such a run is looked at in every runtime."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from rainband.rules import StalenessBound
from rainband.strategies.stale_sync import StaleSync
from rainband.strategy import ServerPart


class AdmitsAnyone(StalenessBound):
    """Says that nobody reads further ahead than the bound, and asks nobody how far it is."""

    def _may_read(self, clock: int, reader: int) -> bool:
        return True


@dataclass(frozen=True)
class Boundless(StaleSync):
    """Lock-step, as it says."""

    bound: int = 0

    def server(self, num_replicas: int) -> ServerPart:
        return replace(super().server(num_replicas), rule=partial(AdmitsAnyone, self.bound))


def stand_still(run: Any, pipe: str) -> None:
    """In a custom training loop: worker 1 goes on after its first step when worker 0 has done five."""
    if run.rank == 0:
        os.write(opened(pipe), b".")
    elif run.rank == 1:
        five_steps(pipe)


@cache
def five_steps(pipe: str) -> None:
    """Wait for them; once."""
    for _ in range(5):
        os.read(opened(pipe), 1)


@cache
def opened(pipe: str) -> int:
    """For both ends, so that opening waits for nobody; and it stays open, or what is in it would be lost."""
    return os.open(pipe, os.O_RDWR)
