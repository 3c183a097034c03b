"""Check a table and its programs: sums, races, deadlock, and what it costs.

A slice's value is represented by the set of the ranks whose vectors it contains, as a bit mask. Adding two sets that
share a rank is an error: that vector would count twice. Programs are played one operation at a time; vector clocks
tell which operations of other ranks are certain to have happened before each one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from rainband.collectives.algorithm import Textbook
from rainband.collectives.messages import Clock, MessageClocks, MessageProgram, PartMessage, compile_messages
from rainband.collectives.program import PRIVATE, Mode, Op, Program, compile_table, home_of
from rainband.collectives.table import MoveTable

UNDEFINED = -1  # the value of a slice that holds nothing yet


class TableError(ValueError):
    """A table, or a program made from it, is wrong; the text names the move or the operation."""


def check(table: MoveTable, chunks: int = 2) -> Textbook:
    """Return what the table costs; raise TableError if it, or one of its programs, is wrong."""
    facts = check_table(table)
    modes: tuple[Mode, ...] = ("segment", "staged")
    for mode in modes:
        check_programs(table, compile_table(table, chunks, mode), chunks, mode)
    check_messages(table, compile_messages(table, chunks), chunks)
    return facts


def check_table(table: MoveTable) -> Textbook:
    """Return steps, fan-in and bytes of a table whose sums are right."""
    values = {
        (rank, part): _start(table, rank, part) for rank in range(table.num_ranks) for part in range(table.num_parts)
    }
    sent, fan_in = [0] * table.num_ranks, 0
    for moves in table.steps():
        before = dict(values)
        sources = defaultdict(set)
        for move in moves:
            _need(0 <= move.first < move.last <= table.num_parts, f"{move}: there are {table.num_parts} parts")
            sent[move.source] += move.last - move.first
            sources[move.target].add(move.source)
            for part in range(move.first, move.last):
                own = values[move.target, part] if move.add else 0
                values[move.target, part] = _sum(before[move.source, part], own, str(move))
        fan_in = max(fan_in, *map(len, sources.values()))
    for (rank, part), value in values.items():
        _need_complete(table, rank, part, value)
    return Textbook(table.num_steps, fan_in, max(sent) / table.num_parts, sum(sent) / table.num_parts)


def check_programs(table: MoveTable, programs: Sequence[Program], chunks: int, mode: Mode) -> None:
    """Play the programs; raise TableError for a race, a deadlock or a wrong sum."""
    player = _Player(table, chunks, mode)
    _play([len(program) for program in programs], lambda rank, number: player.try_op(rank, programs[rank][number]))
    if mode == "segment":
        player.check_left()
    home = home_of(mode)
    for rank in range(table.num_ranks):
        for part in range(table.num_parts):
            for chunk in range(chunks):
                _need_complete(table, rank, part, player.values.get((rank, home, part, chunk), UNDEFINED))


def _start(table: MoveTable, rank: int, part: int) -> int:
    if table.operation in ("all_gather", "broadcast"):
        return _everyone(table) if table.owners[part] == rank else UNDEFINED
    return 1 << rank


def _everyone(table: MoveTable) -> int:
    return (1 << table.num_ranks) - 1


def _need_complete(table: MoveTable, rank: int, part: int, value: int) -> None:
    if table.operation in ("reduce_scatter", "reduce") and table.owners[part] != rank:
        return
    missing = [other for other in range(table.num_ranks) if value == UNDEFINED or not value >> other & 1]
    _need(not missing, f"at the end, part {part} of rank {rank} lacks the vectors of ranks {missing}")


def _sum(theirs: int, own: int, what: str) -> int:
    _need(theirs != UNDEFINED and own != UNDEFINED, f"{what}: it reads a slice that holds nothing yet")
    _need(not theirs & own, f"{what}: a vector counts twice")
    return theirs | own


def _need(condition: object, what: str) -> None:
    if not condition:
        raise TableError(what + ".")


def _play(lengths: list[int], try_one: Callable[[int, int], bool]) -> None:
    """Let each rank perform its operations in order, as far as it can; raise TableError if all are stuck."""
    done = [0] * len(lengths)
    moved = True
    while moved:
        moved = False
        for rank, length in enumerate(lengths):
            while done[rank] < length and try_one(rank, done[rank]):
                done[rank] += 1
                moved = True
    stuck = [f"rank {rank} at operation {number}" for rank, number in enumerate(done) if number < lengths[rank]]
    _need(not stuck, f"deadlock: {', '.join(stuck)} wait for each other")


class _Player:
    """Plays programs with vector clocks."""

    def __init__(self, table: MoveTable, chunks: int, mode: Mode) -> None:
        ranks = range(table.num_ranks)
        self.must_enter = mode == "segment"
        self.values: dict[tuple[int, int, int, int], int] = {}
        for rank in ranks:
            for part in range(table.num_parts):
                if (value := _start(table, rank, part)) != UNDEFINED:
                    for chunk in range(chunks):
                        self.values[rank, home_of(mode), part, chunk] = value
        self.done = [0 for _ in ranks]
        self.clocks = [[[0] * table.num_ranks] for _ in ranks]  # of each rank, after each of its operations
        self.writers: dict[tuple[int, int, int, int], int] = {}
        self.readers: dict[tuple[int, int, int, int], list[tuple[int, int]]] = defaultdict(list)

    def try_op(self, rank: int, op: Op) -> bool:
        if any(self.done[wait.rank] < wait.number for wait in op.waits):
            return False
        clock = list(self.clocks[rank][-1])
        for wait in op.waits:
            clock = list(map(max, clock, self.clocks[wait.rank][wait.number]))
        self.done[rank] += 1
        clock[rank] = self.done[rank]
        self.clocks[rank].append(clock)
        for part in range(op.first, op.last):
            self._perform(rank, op, part, clock)
        return True

    def _perform(self, rank: int, op: Op, part: int, clock: list[int]) -> None:
        what = f"operation {self.done[rank]} of rank {rank}"
        assert op.out is not None
        source, bank = (rank, op.own) if op.theirs is None else (op.source, op.theirs)
        assert bank is not None
        read, written = (source, bank, part, op.chunk), (rank, op.out, part, op.chunk)
        _need(source == rank or bank != PRIVATE, f"{what} reads private memory of rank {source}")
        _need(clock[source] >= self.writers.get(read, 0), f"{what} reads before rank {source} has written")
        _need(not self.must_enter or clock[source] > 0, f"{what} reads before rank {source} has entered")
        for reader, number in self.readers.pop(written, ()):
            _need(clock[reader] >= number, f"{what} overwrites a slice that rank {reader} may not have read")
        own = 0
        if op.theirs is not None and op.own is not None:
            own = self.values.get((rank, op.own, part, op.chunk), UNDEFINED)
        self.values[written] = _sum(self.values.get(read, UNDEFINED), own, what)
        self.writers[written] = self.done[rank]
        if source != rank:
            self.readers[read].append((rank, self.done[rank]))

    def check_left(self) -> None:
        """Check that each rank's last operation comes after all others have read its memory."""
        for (source, *_), readers in self.readers.items():
            for reader, number in readers:
                left = self.clocks[source][-1][reader] >= number
                _need(left, f"rank {source} leaves before rank {reader} has read its memory")


def check_messages(table: MoveTable, programs: Sequence[MessageProgram], chunks: int) -> None:
    """Play message programs; raise TableError for a race, a deadlock or a wrong sum."""
    courier = _Courier(table, programs, chunks)
    links = [(rank, to) for rank, program in enumerate(programs) for to in program.sends]
    while sum(map(courier.try_send, links)) + sum(map(courier.try_apply, links)):
        pass
    stuck = [f"{source} to {target}" for source, target in links if courier.left(source, target)]
    _need(not stuck, f"deadlock: messages from rank {', '.join(stuck)} wait for each other")
    for (rank, part, _), value in courier.values.items():
        _need_complete(table, rank, part, value)


class _Courier:
    """Plays message programs, without any buffer between ranks except for one message from each source.

    That is less than any network has: what does not deadlock here deadlocks nowhere. Vector clocks tell whether what a
    message reads or changes is certain to be read and changed in this order.
    """

    def __init__(self, table: MoveTable, programs: Sequence[MessageProgram], chunks: int) -> None:
        self.programs = programs
        self.values = {
            (rank, part, chunk): _start(table, rank, part)
            for rank in range(table.num_ranks)
            for part in range(table.num_parts)
            for chunk in range(chunks)
        }
        self.clocks = MessageClocks(table)
        self.waiting: dict[tuple[int, int], dict[int, int]] = {}  # (from, to) -> part -> value
        # Of (rank, part, chunk): places in clocks, and numbers, of the message that changed it last and of its readers.
        self.writers: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.readers: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)

    def try_send(self, link: tuple[int, int]) -> bool:
        source, target = link
        number, messages = self._sent(source, target), self.programs[source].sends.get(target, ())
        if number == len(messages) or link in self.waiting:
            return False
        message, clock = messages[number], self.clocks.before_send(link)
        if not self._may(source, message, clock):
            return False
        at = self.clocks.sent_at[link]
        self.waiting[link] = {}
        for part in range(message.first, message.last):
            key = (source, part, message.chunk)
            self._need_order(clock, self.writers.get(key), f"message {number} from rank {source} to rank {target}")
            self.readers[key].append((at, number + 1))
            self.waiting[link][part] = self.values[key]
        self.clocks.add(at, clock)
        return True

    def try_apply(self, link: tuple[int, int]) -> bool:
        source, target = link
        if link not in self.waiting:
            return False
        number = self._applied(source, target)
        message, clock = self.programs[target].receives[source][number], self.clocks.before_apply(link)
        if not self._may(target, message, clock):
            return False
        what = f"message {number} from rank {source}, applied at rank {target},"
        at = self.clocks.applied_at[link]
        for part, theirs in self.waiting.pop(link).items():
            key = (target, part, message.chunk)
            self._need_order(clock, self.writers.get(key), what)
            for reader in self.readers.pop(key, ()):
                self._need_order(clock, reader, what)
            self.values[key] = _sum(theirs, self.values[key] if message.add else 0, what)
            self.writers[key] = (at, number + 1)
        self.clocks.add(at, clock)
        return True

    def left(self, source: int, target: int) -> int:
        """Return the number of messages that have not been applied."""
        return len(self.programs[target].receives.get(source, ())) - self._applied(source, target)

    def _sent(self, source: int, target: int) -> int:
        return len(self.clocks.history[self.clocks.sent_at[source, target]]) - 1

    def _applied(self, source: int, target: int) -> int:
        return len(self.clocks.history[self.clocks.applied_at[source, target]]) - 1

    def _may(self, rank: int, message: PartMessage, clock: Clock) -> bool:
        """Return True if the waits of a message are over; add what they imply to the clock."""
        if any(self._applied(wait.rank, rank) < wait.number for wait in message.after_received):
            return False
        if any(self._sent(rank, wait.rank) < wait.number for wait in message.after_sent):
            return False
        places = [(self.clocks.applied_at[wait.rank, rank], wait.number) for wait in message.after_received]
        places += [(self.clocks.sent_at[rank, wait.rank], wait.number) for wait in message.after_sent]
        for at, count in places:
            np.maximum(clock, self.clocks.history[at][count], out=clock)
        return True

    def _need_order(self, clock: Clock, event: tuple[int, int] | None, what: str) -> None:
        _need(event is None or clock[event[0]] >= event[1], f"{what} may come before another that uses the same slice")
