"""Programs: what each rank does, in which order, and what it waits for, to play a table in shared memory.

A slice is a part of the vector, or a chunk of a part. Chunk k of step s is due at time k + s, so that chunks follow
each other through the steps. Each rank performs its operations in order and counts them: this one counter per rank is
all the synchronization there is. An operation adds or copies slices, straight out of another rank's memory.

Where a slice is read and written in the same step, the sum goes into a second bank of memory, so that the reader finds
the old value. When no rank reads a slice any more, it is copied to its own bank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby
from typing import Literal, NamedTuple

from rainband.collectives.table import Move, MoveTable

# Memory of a rank. In "segment" mode the vector itself lies in bank 0 of shared memory, and its home is bank 0. In
# "staged" mode the vector is private, and what others read lies in banks 0 and 1.
Mode = Literal["segment", "staged"]
PRIVATE = -1


class Wait(NamedTuple):
    """Something that another rank must have done: a number of operations of its program."""

    rank: int
    number: int  # of operations or messages


class Op(NamedTuple):
    """out = own + theirs; or out = theirs, if `own` is None; or out = own, if `theirs` is None.

    `out` and `own` are banks of the rank itself, `theirs` is one of `source`. With `out` None, the operation only
    waits, and is counted: a rank has entered, or leaves.
    """

    waits: tuple[Wait, ...]
    out: int | None
    own: int | None
    source: int
    theirs: int | None
    first: int  # parts first to last - 1
    last: int
    chunk: int


Program = tuple[Op, ...]


def home_of(mode: Mode) -> int:
    """Return the bank in which vectors lie before and after."""
    return 0 if mode == "segment" else PRIVATE


def time_slots(table: MoveTable, chunks: int) -> Iterable[tuple[int, list[Move]]]:
    """Return (chunk, moves) in the order in which they are due."""
    by_step = {moves[0].step: moves for moves in table.steps()}
    order = sorted((chunk + number, step, chunk) for number, step in enumerate(by_step) for chunk in range(chunks))
    return [(chunk, by_step[step]) for _, step, chunk in order]


def runs(move: Move, chunks: int) -> list[range]:
    """Return the parts of a move that lie side by side; chunks of neighboring parts do not."""
    if chunks == 1:
        return [range(move.first, move.last)]
    return [range(part, part + 1) for part in range(move.first, move.last)]


def compile_table(table: MoveTable, chunks: int = 1, mode: Mode = "staged") -> tuple[Program, ...]:
    """Return the programs of all ranks."""
    return _Compiler(table, chunks, mode).compile()


class _Compiler:
    """Follows where each slice lies, which ranks wrote and read it, and what each rank knows about the others."""

    def __init__(self, table: MoveTable, chunks: int, mode: Mode) -> None:
        self.table, self.chunks, self.mode = table, chunks, mode
        self.home = home_of(mode)
        self.programs: list[list[Op]] = [[] for _ in range(table.num_ranks)]
        self.bank: dict[tuple[int, int, int], int] = defaultdict(lambda: self.home)  # of (rank, part, chunk)
        self.writer: dict[tuple[int, int, int, int], int] = defaultdict(int)  # of (rank, bank, part, chunk): operation
        self.readers: dict[tuple[int, int, int, int], list[Wait]] = defaultdict(list)
        # What a rank knows to be done after each of its operations, for every rank: it need not wait for that again.
        self.known: list[list[list[int]]] = [[[0] * table.num_ranks] for _ in range(table.num_ranks)]
        self.last_read: dict[tuple[int, int], int] = {}  # (rank, part) -> step
        self.last_write: dict[tuple[int, int], int] = {}
        for move in sorted(table.moves):
            for part in range(move.first, move.last):
                self.last_read[move.source, part] = move.step
                self.last_write[move.target, part] = move.step

    def compile(self) -> tuple[Program, ...]:
        if self.mode == "segment":
            for rank in range(self.table.num_ranks):
                self._emit(rank, None, None, rank, None, (), 0)  # others may read the vector from now on
        for chunk, moves in time_slots(self.table, self.chunks):
            self._play(chunk, moves)
        if self.mode == "segment":
            self._leave()
        return tuple(map(tuple, self.programs))

    def _play(self, chunk: int, moves: list[Move]) -> None:
        read = dict.fromkeys((move.source, part) for move in moves for part in range(move.first, move.last))
        if self.mode == "staged":
            for rank, part in read:
                if self.bank[rank, part, chunk] == PRIVATE:
                    self._emit(rank, 0, PRIVATE, rank, None, (part,), chunk)
                    self.bank[rank, part, chunk] = 0
        before = {(rank, part): self.bank[rank, part, chunk] for rank, part in read}
        for move in moves:
            self._play_move(move, chunk, before)
        for rank, part in dict.fromkeys((move.target, part) for move in moves for part in range(move.first, move.last)):
            bank = self.bank[rank, part, chunk]
            if self.last_write[rank, part] == moves[0].step and bank != self.home:  # while it is in the cache
                self._emit(rank, self.home, bank, rank, None, (part,), chunk)
                if self.mode == "segment":
                    self.bank[rank, part, chunk] = self.home

    def _play_move(self, move: Move, chunk: int, before: dict[tuple[int, int], int]) -> None:
        rank = move.target

        def banks(part: int) -> tuple[int, int, int]:
            own = out = self.bank[rank, part, chunk]
            if before.get((rank, part)) == own:
                out = 1 - own  # it is read in this step
            if self.mode == "staged":
                if self.last_read.get((rank, part), -1) <= move.step:
                    out = PRIVATE
                elif own == PRIVATE:
                    out = 0
            return before[move.source, part], own, out

        for run in runs(move, self.chunks):
            for (theirs, own, out), group in groupby(run, key=banks):
                same = tuple(group)
                self._emit(rank, out, own if move.add else None, move.source, theirs, same, chunk)
                for part in same:
                    self.bank[rank, part, chunk] = out

    def _emit(
        self,
        rank: int,
        out: int | None,
        own: int | None,
        source: int,
        theirs: int | None,
        parts: tuple[int, ...],
        chunk: int,
    ) -> None:
        number = len(self.programs[rank]) + 1
        needed: list[Wait] = []
        if theirs is not None:
            needed = [Wait(source, self.writer[source, theirs, part, chunk]) for part in parts]
            if self.mode == "segment":
                needed.append(Wait(source, 1))  # it has entered
        if out is not None:
            needed += [wait for part in parts for wait in self.readers.pop((rank, out, part, chunk), ())]
        self._append(
            rank, needed, Op((), out, own, source, theirs, min(parts, default=0), max(parts, default=-1) + 1, chunk)
        )
        for part in parts:
            if out is not None:
                self.writer[rank, out, part, chunk] = number
            if theirs is not None:
                self.readers[source, theirs, part, chunk].append(Wait(rank, number))

    def _append(self, rank: int, needed: Iterable[Wait], op: Op) -> None:
        """Add an operation with those of the needed waits that others do not imply."""
        known, waits = list(self.known[rank][-1]), []
        for wait in sorted(needed, key=lambda wait: -wait.number):
            if wait.rank != rank and known[wait.rank] < wait.number:
                waits.append(wait)
                known = list(map(max, known, self.known[wait.rank][wait.number]))
        self.programs[rank].append(op._replace(waits=tuple(waits)))
        known[rank] = len(self.programs[rank])
        self.known[rank].append(known)

    def _leave(self) -> None:
        """Let each rank wait for those that read its memory."""
        waits: dict[int, list[Wait]] = defaultdict(list)
        for (source, *_), readers in self.readers.items():
            waits[source] += readers
        for rank in range(self.table.num_ranks):
            self._append(rank, waits[rank], Op((), None, None, rank, None, 0, 0, 0))
