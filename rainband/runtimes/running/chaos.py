"""Faults for a run on this machine: which process is killed or paused next, drawn from a seed."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Literal

from rainband.runtimes.config import RunConfig
from rainband.runtimes.running.processes import NodeProcess

PAUSES = (0.2, 0.5, 1.5)  # in failure timeouts: the last ones count as losses


@dataclass(frozen=True)
class ChaosFault:
    """One fault."""

    what: Literal["kill", "pause"]
    node: str
    pid: int
    for_s: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.for_s:.1f} s" if self.for_s else ""
        return f"{self.what} {self.node} (process {self.pid}){lasting}"


@dataclass(frozen=True)
class Endurance:
    """The faults that a run survives, as its configuration says."""

    failure_timeout_s: float
    restarts: bool  # lost workers are started again
    needs_all: bool  # each worker has the only copy of a part of the model

    def why_fatal(self, node: str, left: Collection[str]) -> str:
        """Return why killing a node certainly ends the run; "": it does not. `left`: all live nodes."""
        if node.startswith("server"):
            return f"{node} has the only copy of its parameters"
        if self.needs_all:
            return f"{node} has the only copy of its stage"
        workers = [other for other in left if other.startswith("worker")]
        return f"{node} is the last worker" if len(workers) < 2 and not self.restarts else ""


def endurance_of(config: RunConfig) -> Endurance:
    """Return what a run of this configuration survives."""
    in_stages = config.stage_plan is not None
    return Endurance(
        failure_timeout_s=config.failure_timeout_s,
        restarts=in_stages and config.num_servers > 0,
        needs_all=in_stages and not config.num_servers,
    )


def draw(
    random: Random,
    processes: Mapping[str, NodeProcess],
    lost: Collection[str],
    endurance: Endurance,
    fatal: bool = False,
) -> ChaosFault | str:
    """Draw a fault, or return why there is none. `fatal`: also faults that certainly end the run."""
    there = {node: process for node, process in processes.items() if node not in lost and not process.is_stopped}
    if not there:
        return "no worker or server of the run is on this machine"
    may_die = [node for node in there if fatal or not endurance.why_fatal(node, there)]
    what: Literal["kill", "pause"] = random.choice(("kill", "pause")) if may_die else "pause"
    node = random.choice(sorted(may_die if what == "kill" else there))
    for_s = endurance.failure_timeout_s * random.choice(PAUSES) if what == "pause" else 0.0
    return ChaosFault(what, node, there[node].pid, for_s)


def strike(fault: ChaosFault) -> None:
    """Do it; a process that has just ended needs nothing."""
    with suppress(ProcessLookupError):
        os.kill(fault.pid, signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)


def resume(fault: ChaosFault) -> None:
    """End a pause."""
    with suppress(ProcessLookupError):
        os.kill(fault.pid, signal.SIGCONT)
