"""A group of ranks on one machine, which read each other's vectors in shared memory.

A rank that waits looks at the other's count for a moment, and then sleeps until that rank rings its bell (an eventfd)
or its process ends. So a dead rank is noticed at once, and a stopped one when the launcher excludes it, or after the
timeout.

Two staged rounds use different banks, so no rank waits until the others have read what it wrote in the round before.

An attempt of a round is void when a lost rank had not done its part of it: its last count, which does not change any
more, says so to everyone. Otherwise everyone finishes the attempt. With `on_lost="continue"`, a rank returns when all
counts show that all have done their parts.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from rainband.collectives.cost import LinkCosts, num_chunks
from rainband.collectives.group import Call, Group, MembersChanged, OnLost, elements_of, table_of, view_of
from rainband.collectives.program import PRIVATE, Mode, Op, Program, compile_table
from rainband.transports.collectives.memory import (
    BEAT,
    CALLS,
    COMMITTED,
    OP_BITS,
    PROCESS,
    VECTOR_ROOM,
    GroupWords,
    asleep_at,
    fence,
    first_count,
    ring,
)
from rainband.transports.connect import STARTING_LIMIT_S

SPINS = 200  # looks at a count before a rank sleeps
CHECK_S = 0.5  # how often a sleeping rank looks at the clock, and shows that it lives
NOT_STARTED_S = 0.02  # the same, while the other process is unknown
MAX_PLANS = 256  # of different vectors and sizes, that are kept

Work = tuple[Callable[..., object], tuple[Any, ...]]


class PlannedOp(NamedTuple):
    """An operation on the memory of one vector: (word, rank, count) to wait for, and the work."""

    waits: tuple[tuple[int, int, int], ...]
    work: Callable[..., object] | None
    arguments: tuple[Any, ...]


class Plan(NamedTuple):
    """A program for one vector, and the number of operations of each member's program."""

    steps: list[PlannedOp]
    lengths: dict[int, int]
    call: int  # hash of the operation, its size and its dtype, which must be the same on all ranks


# size: Group has the operations that a caller uses; the rest are rounds, waiting and plans
class SharedGroup(Group):
    """One rank of a group in shared memory."""

    def __init__(
        self,
        fds: Sequence[int],
        rank: int,
        on_lost: OnLost = "error",
        timeout_s: float = STARTING_LIMIT_S,
        costs: LinkCosts | None = None,
    ) -> None:
        """`fds` are those of a GroupMemory.

        A rank that others wait for counts as lost after `timeout_s` without a sign.
        """
        self.words = GroupWords(fds)
        super().__init__(rank, self.words.num_ranks, on_lost, costs)
        self.timeout_s = timeout_s
        self._asleep = [asleep_at(self.num_ranks, other) for other in range(self.num_ranks)]
        self._rooms: dict[tuple[int, int], Tensor] = {}
        self._processes: dict[int, int] = {}  # rank -> pidfd
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._round = 0
        self._attempt = 0
        self._members: tuple[int, ...] = ()
        self._ends: dict[int, int] = {}  # member -> its count at the end of this attempt
        self._last_ends: list[dict[int, int]] = [{}, {}]  # of the last two rounds
        self.words.words[8 * rank + PROCESS] = os.getpid()

    @property
    def lost(self) -> Sequence[int]:
        return self.words.lost()

    def vector(self, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a vector that lies in the shared memory, so that nothing is copied before and after an operation.

        There is one for each group: a second call returns the same memory. All members must use the same size.
        """
        num_bytes = num_elements * dtype.itemsize
        return self._room(self.rank, VECTOR_ROOM, num_bytes)[:num_bytes].view(dtype)

    def close(self) -> None:
        for process in self._processes.values():
            os.close(process)
        self._processes.clear()

    # ---- rounds -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._last_ends = [self._last_ends[1], self._ends]
        self._round += 1
        self._ends = {}

    def _play(self, call: Call, vector: Tensor, members: tuple[int, ...]) -> None:
        self._members, self._attempt = members, self.num_ranks - len(members)
        plan = self._plan(call, vector, members)
        base = first_count(self._round, self._attempt)
        self._ends = {rank: base + length for rank, length in plan.lengths.items()}
        for rank, count in self._last_ends[0].items():  # what this round overwrites
            if rank in self._ends and self.words.count(rank) < count:
                self._wait(rank, count)
        words, mine, count = self.words.words, 8 * self.rank, base
        words[mine + CALLS + self._round % 2] = plan.call
        words[mine] = base
        asleep, mapping = self._asleep[self.rank], self.words.mapping
        end = asleep + self.num_ranks
        for waits, work, arguments in plan.steps:
            for word, rank, needed in waits:
                if words[word] < base + needed:
                    self._wait(rank, base + needed)
            if work is not None:
                work(*arguments)
            count += 1
            words[mine] = count
            fence()
            while (at := mapping.find(b"\1", asleep, end)) >= 0:
                mapping[at] = 0
                ring(self.words.bells[at - asleep])
        for rank in members:
            self._check_call(rank)

    def _commit(self) -> None:
        serial = first_count(self._round, self._attempt) >> OP_BITS
        for rank, end in self._ends.items():
            while not self._has_done(rank, end, serial):
                self._wait(rank, end)
        self.words.words[8 * self.rank + COMMITTED] = serial

    def _has_done(self, rank: int, end: int, serial: int) -> bool:
        """Return True if a member has done its part of this attempt."""
        count = self.words.count(rank)
        self._check_members()
        if self.words.num_lost > self._attempt and rank in self.words.lost():
            return True
        if count < end:
            return False
        if count >> OP_BITS == serial:
            return True
        return self.words.words[8 * rank + COMMITTED] == serial  # it is in the next round

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def _wait(self, rank: int, count: int) -> None:
        """Wait until a rank has this count; raise MembersChanged if the attempt is void."""
        words, word = self.words.words, 8 * rank
        for _ in range(SPINS):
            if words[word] >= count:
                return
        deadline, seen = time.monotonic() + self.timeout_s, (-1, -1)
        flag = self._asleep[rank] + self.rank
        bell = self.words.bells[self.rank]
        try:
            while True:
                self.words.mapping[flag] = 1
                fence()
                if words[word] >= count:
                    return
                self._check_members()
                self._check_call(rank)
                words[8 * self.rank + BEAT] += 1
                if (words[word], words[word + BEAT]) != seen:
                    seen, deadline = (words[word], words[word + BEAT]), time.monotonic() + self.timeout_s
                elif time.monotonic() > deadline:
                    self._lose(rank, count)
                if self._sleep(bell, rank):
                    self._lose(rank, count)
        finally:
            self.words.mapping[flag] = 0

    def _check_call(self, rank: int) -> None:
        """Raise ValueError if a rank performs another operation in this round."""
        words, at = self.words.words, CALLS + self._round % 2
        serial = first_count(self._round, self._attempt) >> OP_BITS
        if self.words.count(rank) >> OP_BITS == serial and words[8 * rank + at] != words[8 * self.rank + at]:
            raise ValueError(
                f"rank {rank} and rank {self.rank} perform different operations at the same time: all ranks must make "
                "the same calls, with vectors of the same size and dtype."
            )

    def _check_members(self) -> None:
        if self.words.num_lost > self._attempt:
            self._check_self()
            if any(self.words.final(rank) < self._ends[rank] for rank in self.words.lost() if rank in self._ends):
                raise MembersChanged

    def _lose(self, rank: int, count: int) -> None:
        """List a rank as lost, unless it had done what this rank waits for."""
        if self.words.count(rank) < count:
            self.words.lose(rank)

    def _sleep(self, bell: int, rank: int) -> bool:
        """Sleep until the bell rings; return True if the process of the rank has ended."""
        process = self._process(rank)
        if process == 0:
            return True
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        if process is not None:
            poll.register(process, select.POLLIN)
        sleep_s = min(NOT_STARTED_S if process is None else CHECK_S, self.timeout_s / 4)
        ready = [fd for fd, _ in poll.poll(sleep_s * 1000)]
        if bell in ready:
            with suppress(BlockingIOError):  # a forked child has read it
                os.eventfd_read(bell)
        return process in ready

    def _process(self, rank: int) -> int | None:
        """Return a file that becomes readable when the process of a rank ends; None: not started; 0: it has ended."""
        if rank not in self._processes:
            number = self.words.words[8 * rank + PROCESS]
            if number == 0:
                return None
            try:
                self._processes[rank] = os.pidfd_open(number)
            except ProcessLookupError:
                return 0
        return self._processes[rank]

    # ---- plans ------------------------------------------------------------------------------------------------------

    def _plan(self, call: Call, vector: Tensor, members: tuple[int, ...]) -> Plan:
        offset = self._offset_in_segment(vector)
        half = self._round % 2 if offset is None else -1
        key = (call, members, vector.data_ptr(), vector.numel(), vector.dtype, half)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(call, vector, members, offset)
        return plan

    def _make_plan(self, call: Call, vector: Tensor, members: tuple[int, ...], offset: int | None) -> Plan:
        table = table_of(len(members), call)
        chunks = num_chunks(vector.nbytes, table.num_parts)
        programs = _compiled(len(members), call, chunks, "staged" if offset is None else "segment")
        views = _Views(self, vector, offset)

        def elements(op: Op) -> range:
            return elements_of(vector.numel(), table.num_parts, chunks, op.first, op.last, op.chunk)

        steps = []
        for op in programs[members.index(self.rank)]:
            waits = tuple((8 * members[wait.rank], members[wait.rank], wait.number) for wait in op.waits)
            if op.out is None:
                steps.append(PlannedOp(waits, None, ()))
                continue
            work, arguments = views.work(op, members[op.source], elements(op))
            steps.append(PlannedOp(waits, work, arguments))
        lengths = {rank: len(program) for rank, program in zip(members, programs, strict=True)}
        return Plan(steps, lengths, crc32(f"{call!r} {vector.numel()} {vector.dtype}".encode()))

    def _offset_in_segment(self, vector: Tensor) -> int | None:
        """Return the offset, in bytes, of a tensor in this rank's shared vector; None: it is private."""
        room = self._rooms.get((self.rank, VECTOR_ROOM))
        if room is None:
            return None
        offset = vector.data_ptr() - room.data_ptr()
        return offset if offset >= 0 and offset + vector.nbytes <= room.numel() else None

    def _room(self, rank: int, room: int, num_bytes: int) -> Tensor:
        """Return a room that has at least this size."""
        known = self._rooms.get((rank, room))
        if known is None or known.numel() < num_bytes:
            known = self._rooms[rank, room] = self.words.room(rank, room, num_bytes)
        return known

    def bank(self, rank: int, bank: int, offset: int | None, vector: Tensor) -> Tensor:
        """Return the memory for a vector in a bank of a rank."""
        if offset is None:
            room, offset = 2 * (self._round % 2) + bank, 0
        else:
            room = VECTOR_ROOM + bank
        return self._room(rank, room, offset + vector.nbytes)[offset : offset + vector.nbytes].view(vector.dtype)


@lru_cache(maxsize=64)
def _compiled(num_ranks: int, call: Call, chunks: int, mode: Mode) -> tuple[Program, ...]:
    return compile_table(table_of(num_ranks, call), chunks, mode)


class _Views:
    """Slices of one vector and of its banks, as arguments of numpy's or torch's functions.

    numpy has no bfloat16, and is slow with float16; otherwise its functions take half of the time for small slices.
    """

    def __init__(self, group: SharedGroup, vector: Tensor, offset: int | None) -> None:
        self.group, self.vector, self.offset = group, vector.view(-1), offset
        self.in_numpy = vector.dtype not in (torch.float16, torch.bfloat16)
        self.banks: dict[tuple[int, int], Any] = {}

    def work(self, op: Op, source: int, elements: range) -> Work:
        rank = self.group.rank
        assert op.out is not None
        out = self._slice(rank, op.out, elements)
        if op.theirs is None:
            assert op.own is not None
            return self._copy(out, self._slice(rank, op.own, elements))
        theirs = self._slice(source, op.theirs, elements)
        if op.own is None:
            return self._copy(out, theirs)
        own = self._slice(rank, op.own, elements)
        return (np.add, (own, theirs, out)) if self.in_numpy else (_torch_add, (own, theirs, out))

    def _copy(self, out: Any, values: Any) -> Work:
        return (np.copyto, (out, values)) if self.in_numpy else (torch.Tensor.copy_, (out, values))

    def _slice(self, rank: int, bank: int, elements: range) -> Any:
        if (rank, bank) not in self.banks:
            if bank == PRIVATE:
                memory = view_of(self.vector)  # a plan must not keep the vector alive
            else:
                memory = self.group.bank(rank, bank, self.offset, self.vector)
            self.banks[rank, bank] = memory.numpy() if self.in_numpy else memory
        return self.banks[rank, bank][elements.start : elements.stop]


def _torch_add(own: Tensor, theirs: Tensor, out: Tensor) -> None:
    torch.add(own, theirs, out=out)
