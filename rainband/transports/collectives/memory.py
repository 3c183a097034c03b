"""The memory that the ranks of one machine share for collective operations.

A launcher makes it, and its workers inherit the files. Each rank has a cache line of words, and rooms for vectors: two
banks for each of two alternating rounds, a vector that stays, and its second bank. Only the parts in use take memory.

A rank counts its operations in one word. The number of its round and of its attempt are in the same word, so that
counts only grow. Lost ranks are listed in the order in which they were noticed, with their last count; the length of
that list numbers the attempts.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from torch import Tensor

from rainband.transports.shared_memory import mapped

LINE_BYTES = 64
# Words of a rank's line. LOST: entry number `rank` of the list of lost ranks. CALLS: of even and of odd rounds.
COUNT, COMMITTED, PROCESS, FINAL, LOST, BEAT, CALLS = range(7)
NOT_READ = -1  # the final count of a rank that is being listed
ATTEMPT_BITS, OP_BITS = 8, 24
MAX_RANKS = (1 << ATTEMPT_BITS) - 1
ROOM_BYTES = 1 << 34
ROOMS = 6  # of a rank: banks 0 and 1 of even and of odd rounds, the vector, its second bank
VECTOR_ROOM = 4
STAGGER_BYTES = 13 * 64  # between rooms, which otherwise meet in the same sets of the caches


_lock = threading.Lock()


def fence() -> None:
    """Let other processors see what was written before anything else is read."""
    with _lock:  # taking a lock is a full barrier
        pass


def ring(bell: int) -> None:
    """Wake the rank that sleeps on this eventfd."""
    with suppress(BlockingIOError):  # it was rung 2^64 times
        os.eventfd_write(bell, 1)


def first_count(round_number: int, attempt: int) -> int:
    """Return the count of a rank that has begun an attempt of a round."""
    return ((round_number << ATTEMPT_BITS) | attempt) << OP_BITS


class GroupMemory:
    """The launcher's side: makes the memory; excludes ranks that are stopped, though their processes live."""

    def __init__(self, num_ranks: int) -> None:
        if not 1 <= num_ranks <= MAX_RANKS:
            raise ValueError(f"a group of {num_ranks} ranks: it has 1 to {MAX_RANKS}.")
        self.num_ranks = num_ranks
        self.fd = os.memfd_create("rainband collectives", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, _room_at(num_ranks, num_ranks, 0))
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(num_ranks)]

    @property
    def fds(self) -> list[int]:
        """Return the files that a worker inherits."""
        return [self.fd, *self.bells]

    def exclude(self, rank: int) -> None:
        """Exclude a rank that is dead or stopped: the others go on, or fail, without it."""
        GroupWords(self.fds).lose(rank)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def _room_at(num_ranks: int, rank: int, room: int) -> int:
    return _control_bytes(num_ranks) + (rank * ROOMS + room) * ROOM_BYTES


def asleep_at(num_ranks: int, rank: int) -> int:
    """Return where the flags are of the ranks that sleep until `rank` counts on."""
    return LINE_BYTES * (num_ranks + 1) + rank * -(-num_ranks // LINE_BYTES) * LINE_BYTES


def _control_bytes(num_ranks: int) -> int:
    return -(-asleep_at(num_ranks, num_ranks) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class GroupWords:
    """The words of all ranks."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fd, *self.bells = fds
        self.num_ranks = len(self.bells)
        self.mapping = mmap.mmap(self.fd, _control_bytes(self.num_ranks), flags=mmap.MAP_SHARED)
        self.words = memoryview(self.mapping)[: LINE_BYTES * (self.num_ranks + 1)].cast("q")

    def count(self, rank: int) -> int:
        return self.words[8 * rank]

    @property
    def num_lost(self) -> int:
        return self.words[8 * self.num_ranks]

    def lost(self) -> list[int]:
        """Return the lost ranks, in the order in which they were noticed."""
        return [self.words[8 * number + LOST] for number in range(self.num_lost)]

    def final(self, rank: int) -> int:
        """Return the last count of a lost rank."""
        at = 8 * rank + FINAL
        if self.words[at] == NOT_READ:
            with self._locked():
                if self.words[at] == NOT_READ:  # the process that has listed it is dead
                    self.words[at] = self.count(rank)
        return self.words[at]

    def lose(self, rank: int) -> None:
        """Add a rank to the list of lost ranks, once, and wake all ranks."""
        with self._locked():
            if rank not in self.lost():
                # Its last count is read after it is listed: a rank that sees it unlisted has seen no later count.
                self.words[8 * rank + FINAL] = NOT_READ
                self.words[8 * self.num_lost + LOST] = rank
                self.words[8 * self.num_ranks] += 1
                fence()
                self.words[8 * rank + FINAL] = self.count(rank)
        for bell in self.bells:
            ring(bell)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self.fd, fcntl.LOCK_EX, 1)  # the kernel unlocks it if this process dies
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1)

    def room(self, rank: int, room: int, num_bytes: int) -> Tensor:
        """Map a room."""
        if num_bytes + STAGGER_BYTES * ROOMS * self.num_ranks > ROOM_BYTES:
            raise ValueError(f"a vector of {num_bytes} bytes is larger than the {ROOM_BYTES} that can be shared.")
        stagger = STAGGER_BYTES * (rank * ROOMS + room)
        _, memory = mapped(self.fd, max(1, num_bytes) + stagger, _room_at(self.num_ranks, rank, room))
        return memory[stagger:]
