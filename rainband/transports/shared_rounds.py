"""Rounds of split batches in memory that the workers of one machine share.

One sparse memory file has, for each worker, a few words on cache lines of their own, two headers, two areas for
tensors, and room for a state. Only the parts in use take memory. A worker that waits looks at the words for a moment,
and then sleeps until another one rings its bell (an eventfd).

On a machine that has joined the run of another one, the memory is a mirror: a worker writes words of its own, which
`runtimes/machines/rounds_relay.py` sends to the machine of the run, and reads those that come back. So all workers see
all changes in one order, that of the run's own machine.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch
from torch import Tensor

from rainband.rounds.board import Asking, Condition, RoundEntry
from rainband.rounds.view import Header
from rainband.transports.pytrees import incoming, outgoing
from rainband.transports.shared_memory import mapped

LINE_WORDS = 8  # of 8 bytes: a cache line
# The worker's own words in its first line; then those that the launcher writes, those of a state, those of its request.
POSITION, LIFE, PUBLISHED = 0, 1, 2  # the last one for each of two slots
EXCLUDED, FINAL = LINE_WORDS, LINE_WORDS + 1  # the last one for even and odd lives
STATE_POSITION, STRUCTURE_BYTES, TENSOR_BYTES, AREA_BYTES = range(2 * LINE_WORDS, 2 * LINE_WORDS + 4)
ASKING_LIFE, ASKING_STEPS, ASKING_SINCE, ELECTING = range(3 * LINE_WORDS, 3 * LINE_WORDS + 4)
ASLEEP = 4 * LINE_WORDS
IS_MIRROR = 0  # in the words of the relay
# Words of a worker that must have come back before it goes on.
SEQUENCED = (POSITION, LIFE, PUBLISHED, PUBLISHED + 1, ASKING_LIFE, ASKING_STEPS, ASKING_SINCE, ELECTING)
ADMISSION_BYTES = 5 * LINE_WORDS  # the length, then the text
ADMISSION_AT = 8 * (ADMISSION_BYTES + 1)
HEADERS_AT = 4096
HEADER_BYTES = 16 * 1024  # each begins with its length
WORKER_BYTES = HEADERS_AT + 2 * HEADER_BYTES
ROOM_BYTES = 1 << 36  # for the areas of a worker, and for its state
ROOM_SLACK_BYTES = 1 << 16  # of a state: numbers in it get longer
STAGGER_BYTES = 13 * 64  # between areas, which otherwise meet in the same sets of the caches

SPINS = 500  # looks at the words before a worker sleeps
SLEEP_MS = 2  # after which it looks again: a bell may have been missed

_header_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_admission_decoder = msgspec.msgpack.Decoder(RoundEntry)


_lock = threading.Lock()


def room_at(num_ranks: int, number: int) -> int:
    """Return the offset of the areas of worker `number`, or, from `num_ranks` on, of a state."""
    control = -(-_num_pieces(num_ranks) * WORKER_BYTES // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    return control + number * ROOM_BYTES


def _num_pieces(num_ranks: int) -> int:
    """Return the number of pieces with words: of each worker, of the relay, and, in a mirror, of each worker again."""
    return 2 * num_ranks + 1


class RoundsMemory:
    """The launcher's side: makes the memory, and excludes workers."""

    def __init__(self, num_ranks: int, is_mirror: bool = False) -> None:
        """`is_mirror`: this machine has joined the run of another one."""
        self.num_ranks = num_ranks
        self.changed: set[int] = set()  # workers that were excluded from here, for the relay
        self.fd = os.memfd_create("rainband rounds", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, room_at(num_ranks, 2 * num_ranks))
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(num_ranks + 1)]
        self.words = MemberWords(self.fd, self.bells)
        if is_mirror:
            self.words.relay[IS_MIRROR] = 1
            self.words.find_own()

    @property
    def fds(self) -> list[int]:
        """Return the files that a worker inherits."""
        return [self.fd, *self.bells]

    def exclude(self, rank: int) -> None:
        """Exclude a worker whose process has been reaped, or is stopped: its position is final."""
        self.words.exclude(rank)
        self.changed.add(rank)
        self.words.ring(rank)

    def is_excluded(self, rank: int) -> bool:
        """Return True if no member waits for this worker."""
        words = self.words.of[rank]
        return words[EXCLUDED] >= max(1, words[LIFE])

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class MemberWords:
    """The words of all workers: `of` and `bytes` are read, `own` and `own_bytes` written by the workers themselves."""

    def __init__(self, fd: int, bells: Sequence[int]) -> None:
        self.bells = bells  # of each worker, then that of the relay
        self.num_ranks = len(bells) - 1
        number = _num_pieces(self.num_ranks)
        self.mapping = mmap.mmap(fd, number * WORKER_BYTES, flags=mmap.MAP_SHARED)
        memory = memoryview(self.mapping)
        self._pieces = [memory[at * WORKER_BYTES : (at + 1) * WORKER_BYTES] for at in range(number)]
        words = [piece[:HEADERS_AT].cast("q") for piece in self._pieces]
        self.bytes, self.of = self._pieces[: self.num_ranks], words[: self.num_ranks]
        self.relay = words[self.num_ranks]
        self._words = words
        self.find_own()

    def find_own(self) -> None:
        """Find the words that workers write, which in a mirror are not those that they read."""
        self.is_mirror = bool(self.relay[IS_MIRROR])
        first = self.num_ranks + 1 if self.is_mirror else 0
        self.own = self._words[first : first + self.num_ranks]
        self.own_bytes = self._pieces[first : first + self.num_ranks]

    def fence(self) -> None:
        """Let other processors see what was written before anything else is read."""
        with _lock:  # taking a lock is a full barrier
            pass

    def exclude(self, rank: int, own: bool = False) -> None:
        words = self.own[rank] if own else self.of[rank]
        life = max(1, words[LIFE])
        if words[EXCLUDED] < life:
            words[FINAL + life % 2] = words[POSITION]
            words[EXCLUDED] = life

    def ring(self, rank: int) -> None:
        """Wake the workers that sleep, except this one, and the relay."""
        for other, words in enumerate(self.own):
            if words[ASLEEP] and other != rank:
                words[ASLEEP] = 0
                os.eventfd_write(self.bells[other], 1)
        if self.relay[ASLEEP]:
            self.relay[ASLEEP] = 0
            os.eventfd_write(self.bells[-1], 1)


class SharedBoard:
    """One worker's view of the shared memory; see `rainband.rounds.board.Board`."""

    def __init__(
        self, fds: Sequence[int], rank: int, like: Sequence[Tensor], idle: Callable[[], None] = lambda: None
    ) -> None:
        """`fds` are those of a RoundsMemory. `like` has the shapes and dtypes of the tensors.

        `idle` is called before each sleep while this worker waits for others: it may handle messages, and may raise.
        """
        self.idle = idle
        fd, *bells = fds
        self.fd = fd
        self.rank = rank
        self._all = MemberWords(fd, bells)
        self.num_ranks = self._all.num_ranks
        self._words = self._all.of
        self._own = self._all.own[rank]
        self._poll = select.poll()
        self._poll.register(bells[rank], select.POLLIN)
        self._like = list(like)
        self._room = torch.empty(0, dtype=torch.uint8)  # of this worker's state
        self._areas: dict[int, list[list[Tensor]]] = {}  # of the workers that this one has exchanged tensors with
        self._own[AREA_BYTES] = _area_bytes(like)

    def position(self, rank: int) -> int:
        return self._words[rank][POSITION]

    def set_position(self, value: int) -> None:
        self._own[POSITION] = value
        self._all.ring(self.rank)

    def life(self, rank: int) -> int:
        return self._words[rank][LIFE]

    def set_life(self, life: int) -> None:
        self._own[LIFE] = life
        self._all.ring(self.rank)

    def excluded(self, rank: int) -> int:
        return self._words[rank][EXCLUDED]

    def final(self, rank: int, life: int) -> int:
        return self._words[rank][FINAL + life % 2]

    def exclude(self) -> None:
        self._all.exclude(self.rank, own=True)
        self._all.ring(self.rank)
        if self._all.is_mirror:
            self.wait(lambda: self._words[self.rank][EXCLUDED] >= self._own[EXCLUDED])

    def _return_in_order(self) -> None:
        """In a mirror, wait until the run's machine has put this worker's words in order, or has excluded its life."""
        if self._all.is_mirror:
            own, seen = self._own, self._words[self.rank]
            self.wait(lambda: seen[EXCLUDED] >= own[LIFE] > 0 or all(seen[k] == own[k] for k in SEQUENCED))

    def asking(self, rank: int) -> Asking | None:
        words = self._words[rank]
        if not words[ASKING_LIFE]:
            return None
        return Asking(words[ASKING_LIFE], words[ASKING_STEPS], words[ASKING_SINCE], bool(words[ELECTING]))

    def ask(self, asking: Asking | None) -> None:
        own = self._own
        own[ASKING_LIFE] = 0
        if asking is not None:
            own[ASKING_STEPS], own[ASKING_SINCE], own[ELECTING] = asking.steps, asking.since, asking.electing
            own[ASKING_LIFE] = asking.life
        self._all.ring(self.rank)
        self._all.fence()
        self._return_in_order()

    def admission(self, rank: int) -> RoundEntry | None:
        length = self._words[rank][ADMISSION_BYTES]
        if not length:
            return None
        text = bytes(self._all.bytes[rank][ADMISSION_AT : ADMISSION_AT + length])
        if self._words[rank][ADMISSION_BYTES] != length:
            return None  # being replaced
        try:
            return _admission_decoder.decode(text)
        except msgspec.DecodeError:
            return None

    def admit(self, admission: RoundEntry) -> None:
        text = _header_encoder.encode(admission)
        if ADMISSION_AT + len(text) > HEADERS_AT:
            raise ValueError(f"{self.num_ranks} workers are too many to share batches on one machine: use fewer.")
        self._own[ADMISSION_BYTES] = 0
        self._all.own_bytes[self.rank][ADMISSION_AT : ADMISSION_AT + len(text)] = text
        self._own[ADMISSION_BYTES] = len(text)
        self._all.ring(self.rank)

    def published(self, rank: int, slot: int) -> int:
        return self._words[rank][PUBLISHED + slot]

    def header(self, rank: int, slot: int) -> Header:
        at = HEADERS_AT + slot * HEADER_BYTES
        memory = self._all.bytes[rank]
        length = int.from_bytes(memory[at : at + 4], "little")
        return _header_decoder.decode(memory[at + 4 : at + 4 + length])

    def tensors(self, rank: int, slot: int) -> Sequence[Tensor]:
        areas = self._areas.get(rank)
        if areas is None:
            areas = self._areas[rank] = _areas(self.fd, room_at(self.num_ranks, rank), self._like)
        return areas[slot]

    def area(self, rank: int, slot: int) -> Tensor:
        tensors = self.tensors(rank, slot)
        start, end = slot * _area_bytes(self._like), _places(self._like)[1] - STAGGER_BYTES
        return torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage(), start, (end,), (1,))

    def publish(self, slot: int, position: int, header: Header) -> None:
        text = _header_encoder.encode(header)
        if len(text) + 4 > HEADER_BYTES:
            raise ValueError(f"{len(header.numbers)} settings of optimizers are too many: use fewer parameter groups.")
        at = HEADERS_AT + slot * HEADER_BYTES
        memory = self._all.own_bytes[self.rank]
        memory[at : at + 4 + len(text)] = len(text).to_bytes(4, "little") + text
        self._own[PUBLISHED + slot] = position
        self.set_position(position)
        self._return_in_order()

    def withdraw(self, slot: int) -> None:
        self._own[PUBLISHED + slot] = 0

    def _room_for(self, num_bytes: int) -> Tensor:
        """Return the memory of this worker's state."""
        if len(self._room) < num_bytes:
            at = room_at(self.num_ranks, self.num_ranks + self.rank)
            _, self._room = mapped(self.fd, _checked(num_bytes + ROOM_SLACK_BYTES), at)
        return self._room

    def put_state(self, position: int, state: Any) -> None:
        own, out = self._own, outgoing(state)
        memory = self._room_for(out.num_bytes + len(out.structure))
        if not position:
            return
        own[STATE_POSITION] = 0
        own[STRUCTURE_BYTES], own[TENSOR_BYTES] = len(out.structure), out.num_bytes
        out.fill(memory)
        memory[out.num_bytes : out.num_bytes + len(out.structure)] = torch.frombuffer(
            bytearray(out.structure), dtype=torch.uint8
        )
        own[STATE_POSITION] = position

    def state(self, rank: int, position: int) -> Any | None:
        words = self._words[rank]
        if not position or words[STATE_POSITION] != position:
            return None
        structure_bytes, tensor_bytes = words[STRUCTURE_BYTES], words[TENSOR_BYTES]
        memory = self._state_of(rank, tensor_bytes + structure_bytes)
        structure = memory[tensor_bytes : tensor_bytes + structure_bytes].numpy().tobytes()
        state = incoming(structure, memory[:tensor_bytes])
        return state if words[STATE_POSITION] == position else None

    def _state_of(self, rank: int, num_bytes: int) -> Tensor:
        at = room_at(self.num_ranks, self.num_ranks + rank)
        mapping = mmap.mmap(self.fd, _checked(num_bytes), flags=mmap.MAP_SHARED, offset=at)
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def wait(self, until: Condition) -> None:
        for _ in range(SPINS):
            if until():
                return
        own = self._own
        while True:
            self.idle()
            own[ASLEEP] = 1
            self._all.fence()
            if until():
                own[ASLEEP] = 0
                return
            if self._poll.poll(SLEEP_MS):
                with suppress(BlockingIOError):  # a forked child has read it
                    os.eventfd_read(self._all.bells[self.rank])


def _checked(num_bytes: int) -> int:
    if num_bytes > ROOM_BYTES:
        raise ValueError(f"a training state of {num_bytes} bytes is larger than the {ROOM_BYTES} that can be sent.")
    return num_bytes


def _places(like: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the offsets of tensors in an area, and its length."""
    offsets, end = [], 0
    for tensor in like:
        offsets.append(end)
        end += -(-tensor.numel() * tensor.element_size() // 64) * 64
    return offsets, end + STAGGER_BYTES


def _area_bytes(like: Sequence[Tensor]) -> int:
    return _places(like)[1]


def _areas(fd: int, at: int, like: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors of a worker's two areas."""
    offsets, end = _places(like)
    _, memory = mapped(fd, 2 * end, at)
    return [
        [
            memory[slot * end + offset :][: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for offset, t in zip(offsets, like, strict=True)
        ]
        for slot in range(2)
    ]
