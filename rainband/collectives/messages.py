"""PartMessage programs: what each rank sends and receives, in which order, to play a table over connections.

Messages of one connection keep their order. A message that was received waits in memory of its own until the slices
that it changes may change: when this rank has sent their old value, and has applied what comes before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rainband.collectives.program import Wait, runs, time_slots
from rainband.collectives.table import Move, MoveTable

Clock: TypeAlias = NDArray[np.int32]


class PartMessage(NamedTuple):
    """Parts first to last - 1, of one chunk, to be added or stored.

    A sender sends it when it has applied `number` messages of each `after_received`. A receiver applies it then, too,
    and when it has sent `number` messages to each `after_sent`.
    """

    first: int
    last: int
    chunk: int
    add: bool
    after_received: tuple[Wait, ...] = ()
    after_sent: tuple[Wait, ...] = ()


class MessageProgram(NamedTuple):
    """One rank's messages, by the other rank."""

    sends: Mapping[int, tuple[PartMessage, ...]]
    receives: Mapping[int, tuple[PartMessage, ...]]


def compile_messages(table: MoveTable, chunks: int = 1) -> tuple[MessageProgram, ...]:
    """Return the message programs of all ranks."""
    return _MessageCompiler(table).compile(chunks)


class MessageClocks:
    """Vector clocks of sent and applied messages: what is certain to have happened before each of them.

    A message is applied after it was sent, and messages of one connection are sent and applied in order.
    """

    def __init__(self, table: MoveTable) -> None:
        links = sorted({(move.source, move.target) for move in table.moves})
        self.sent_at = {link: 2 * number for number, link in enumerate(links)}  # its place in a clock
        self.applied_at = {link: 2 * number + 1 for number, link in enumerate(links)}
        self.history: list[list[Clock]] = [[np.zeros(2 * len(links), np.int32)] for _ in range(2 * len(links))]

    def before_send(self, link: tuple[int, int]) -> Clock:
        return self.history[self.sent_at[link]][-1].copy()

    def before_apply(self, link: tuple[int, int]) -> Clock:
        number = len(self.history[self.applied_at[link]])
        return np.maximum(self.history[self.applied_at[link]][-1], self.history[self.sent_at[link]][number])

    def add(self, at: int, clock: Clock) -> int:
        """Add an event with the clock before it; return its number."""
        clock[at] += 1
        self.history[at].append(clock)
        return int(clock[at])


class _MessageCompiler:
    """Finds what each message must wait for, and leaves out what follows from other waits."""

    def __init__(self, table: MoveTable) -> None:
        self.table = table
        self.clocks = MessageClocks(table)
        self.sends: list[dict[int, list[PartMessage]]] = [defaultdict(list) for _ in range(table.num_ranks)]
        self.receives: list[dict[int, list[PartMessage]]] = [defaultdict(list) for _ in range(table.num_ranks)]
        # Of (rank, part, chunk): the message that changed it last, and the messages that have sent it since.
        self.writer: dict[tuple[int, int, int], Wait] = {}
        self.readers: dict[tuple[int, int, int], list[Wait]] = defaultdict(list)

    def compile(self, chunks: int) -> tuple[MessageProgram, ...]:
        for chunk, moves in time_slots(self.table, chunks):
            pieces = [(move, run) for move in moves for run in runs(move, chunks)]
            for move, parts in pieces:  # all of a step's messages are sent before any is applied
                self._send(move, parts, chunk)
            for move, parts in pieces:
                self._apply(move, parts, chunk)
        return tuple(
            MessageProgram({to: tuple(m) for to, m in out.items()}, {source: tuple(m) for source, m in into.items()})
            for out, into in zip(self.sends, self.receives, strict=True)
        )

    def _send(self, move: Move, parts: Sequence[int], chunk: int) -> None:
        link = (move.source, move.target)
        keys = [(move.source, part, chunk) for part in parts]
        clock = self.clocks.before_send(link)
        after = self._waits(move.source, clock, [self.writer[key] for key in keys if key in self.writer], [])[0]
        number = self.clocks.add(self.clocks.sent_at[link], clock)
        self.sends[move.source][move.target].append(PartMessage(parts[0], parts[-1] + 1, chunk, move.add, after))
        for key in keys:
            self.readers[key].append(Wait(move.target, number))

    def _apply(self, move: Move, parts: Sequence[int], chunk: int) -> None:
        link, rank = (move.source, move.target), move.target
        keys = [(rank, part, chunk) for part in parts]
        clock = self.clocks.before_apply(link)
        applied = [self.writer[key] for key in keys if key in self.writer]
        sent = [wait for key in keys for wait in self.readers.pop(key, ())]
        after_received, after_sent = self._waits(rank, clock, applied, sent)
        number = self.clocks.add(self.clocks.applied_at[link], clock)
        message = PartMessage(parts[0], parts[-1] + 1, chunk, move.add, after_received, after_sent)
        self.receives[rank][move.source].append(message)
        for key in keys:
            self.writer[key] = Wait(move.source, number)

    def _waits(
        self, rank: int, clock: Clock, applied: Iterable[Wait], sent: Iterable[Wait]
    ) -> tuple[tuple[Wait, ...], tuple[Wait, ...]]:
        """Return those of the waits that do not follow from the clock or from each other; add them to the clock."""
        needed = [(self.clocks.applied_at[wait.rank, rank], True, wait) for wait in applied]
        needed += [(self.clocks.sent_at[rank, wait.rank], False, wait) for wait in sent]
        # The events that imply the most come first.
        needed.sort(key=lambda need: -int(self.clocks.history[need[0]][need[2].number].sum()))
        kept: tuple[list[Wait], list[Wait]] = ([], [])
        for at, is_applied, wait in needed:
            if clock[at] < wait.number:
                np.maximum(clock, self.clocks.history[at][wait.number], out=clock)
                kept[0 if is_applied else 1].append(wait)
        return tuple(kept[0]), tuple(kept[1])
