"""A command in flight: the answers so far, its results, and the handle that a strategy awaits."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

from rainband.coordinator.journal import JournalEntry, digest
from rainband.coordinator.work_queue import WorkQueue
from rainband.coordinator_api import Evaluation
from rainband.errors import RainbandError
from rainband.protocol.messages import Answer, Command, Evaluated, Peer
from rainband.protocol.vectors import ANSWERED


class CommandRefused(RainbandError):
    """A server has refused a command of the strategy."""


class PendingCommand:
    """A command in flight, and the evaluation that begins with it, if any."""

    def __init__(
        self, command: Command, servers: Sequence[Peer], first: Peer, work_items: tuple[int, ...] = ()
    ) -> None:
        self.command = command
        self.servers = servers
        self.first = first
        self.work_items = work_items
        self.answers: dict[Peer, Answer] = {}
        self.evaluated: dict[Peer, Evaluated] = {}
        self.queue: WorkQueue | None = None
        self.known: JournalEntry | None = None  # its results, from the journal

    @property
    def at_version(self) -> int:
        """The version of every block, once all servers have answered."""
        return next(iter(self.answers.values())).version

    def refused(self) -> str:
        return next((answer.refused for answer in self.answers.values() if answer.refused), "")

    def ready(self) -> bool:
        if self.known is not None:
            return True
        answered = len(self.answers) == len(self.servers)
        return bool(self.refused()) or (answered and (not self.work_items or len(self.evaluated) == len(self.servers)))

    def wait(self) -> Generator[PendingCommand, None, None]:
        while not self.ready():
            yield self
        if refused := self.refused():
            raise CommandRefused(f"a server refused a command: {refused}.")

    def entry(self) -> JournalEntry:
        """Return its results, for the journal."""
        counted = self.evaluated.get(self.first) if self.work_items else None
        if counted is None:
            return JournalEntry(digest(self.command), self.results())
        loss = counted.loss if math.isfinite(counted.loss) else None
        return JournalEntry(digest(self.command), self.results(), loss, counted.samples)

    def results(self) -> tuple[float, ...]:
        """Return the results, summed over the servers in a fixed order: the same sum each time."""
        if self.known is not None:
            return self.known.results
        answers = [self.answers[server].results for server in self.servers]
        answered = [operation.kind for operation in self.command.operations if operation.kind in ANSWERED]
        sums = [sum(results[at] for results in answers) for at in range(len(answered))]
        return tuple(math.sqrt(s) if kind == "norm" else s for kind, s in zip(answered, sums, strict=True))


class Computed:
    """Awaits the results of a command."""

    def __init__(self, pending: PendingCommand) -> None:
        self.pending = pending

    def __await__(self) -> Generator[PendingCommand, None, tuple[float, ...]]:
        yield from self.pending.wait()
        return self.pending.results()


class Evaluating:
    """Awaits the loss of an evaluation."""

    def __init__(self, pending: PendingCommand) -> None:
        self.pending = pending

    def __await__(self) -> Generator[PendingCommand, None, Evaluation]:
        yield from self.pending.wait()
        found = self.pending.known or self.pending.entry()
        loss = math.nan if found.loss is None else found.loss
        return Evaluation(loss / max(1, found.samples), found.samples)
