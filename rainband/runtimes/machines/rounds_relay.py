"""Rounds of split batches across machines: the memory of each machine follows that of the run's own machine.

Each worker's words are sent whole whenever they have changed; what changed in between is left out, as a worker that
looks at shared memory now and then misses it, too. Tensors travel before the words that announce them. The machine of
the run puts the changes of all workers in one order: it writes them into its memory, and then sends them to the other
machines, also to the one where they were made. A worker of another machine goes on when its words have come back.
It passes tensors on as they arrive, so the links are used in both directions at once.

An exclusion is decided in the memory of the run's machine. Words of an excluded life that arrive later are dropped, so
all survivors count the same contributions.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from rainband.protocol.messages import Message, Peer, RoundAudience, RoundData, RoundWords
from rainband.rounds.view import Header
from rainband.transports.shared_rounds import (
    ADMISSION_AT,
    ADMISSION_BYTES,
    AREA_BYTES,
    ASKING_LIFE,
    ASKING_SINCE,
    ASKING_STEPS,
    ASLEEP,
    ELECTING,
    EXCLUDED,
    FINAL,
    HEADER_BYTES,
    HEADERS_AT,
    LIFE,
    POSITION,
    PUBLISHED,
    ROOM_BYTES,
    STATE_POSITION,
    STRUCTURE_BYTES,
    TENSOR_BYTES,
    RoundsMemory,
    room_at,
)

CHUNK_BYTES = 1 << 19  # of tensors in one message, so that heartbeats need not wait for large ones
AHEAD_BYTES = 1 << 26  # of tensors that are passed on before the words that announce them have come
BACKLOG_BYTES = 1 << 20  # with more bytes that have not left for a machine, its workers' next changes wait
STATE = 2  # the kind of data after those of the two slots

Send = Callable[[Peer, Message, bytes | None], None]
_header_decoder = msgspec.msgpack.Decoder(Header)


class Snapshot(NamedTuple):
    """The words and the headers of one worker at one instant."""

    control: bytes
    headers: tuple[bytes, bytes]

    @property
    def words(self) -> memoryview:
        return memoryview(self.control).cast("q")

    def message(self, rank: int) -> RoundWords:
        return RoundWords(rank, self.control[: _length(self.words)], self.headers)


def received(message: RoundWords) -> Snapshot:
    """Return what a message contains; raise ValueError if it cannot be one worker's words."""
    control = message.control.ljust(HEADERS_AT, b"\0")
    if len(control) != HEADERS_AT or any(len(header) > HEADER_BYTES - 4 for header in message.headers):
        raise ValueError("words of a round have another length in this version of rainband")
    return Snapshot(control, message.headers)


def _length(words: memoryview) -> int:
    return int(ADMISSION_AT + words[ADMISSION_BYTES])


def taken(memory: memoryview) -> Snapshot:
    """Return the words of a worker as they were at one instant, while it may write them."""
    before = _copied(memory)
    while (now := _copied(memory)) != before:
        before = now
    return now


def _copied(memory: memoryview) -> Snapshot:
    control = bytearray(memory[:HEADERS_AT])
    memoryview(control).cast("q")[ASLEEP] = 0
    headers = []
    for slot in range(2):
        at = HEADERS_AT + slot * HEADER_BYTES
        length = int.from_bytes(memory[at : at + 4], "little")
        headers.append(bytes(memory[at + 4 : at + 4 + length]))
    return Snapshot(bytes(control), (headers[0], headers[1]))


def put(memory: memoryview, new: Snapshot) -> None:
    """Write words in an order in which others may read them at any instant: what they announce comes first."""
    words, their = memory[:HEADERS_AT].cast("q"), new.words
    if (
        memory[ADMISSION_AT:HEADERS_AT] != new.control[ADMISSION_AT:]
        or words[ADMISSION_BYTES] != their[ADMISSION_BYTES]
    ):
        words[ADMISSION_BYTES] = 0
        memory[ADMISSION_AT:HEADERS_AT] = new.control[ADMISSION_AT:]
        words[ADMISSION_BYTES] = their[ADMISSION_BYTES]
    words[AREA_BYTES] = their[AREA_BYTES]
    if words[STATE_POSITION] != their[STATE_POSITION]:
        words[STATE_POSITION] = 0
        words[STRUCTURE_BYTES], words[TENSOR_BYTES] = their[STRUCTURE_BYTES], their[TENSOR_BYTES]
        words[STATE_POSITION] = their[STATE_POSITION]
    if words[LIFE] != their[LIFE]:
        _put_exclusion(words, their)
        words[POSITION], words[LIFE] = 0, their[LIFE]
    for slot, header in enumerate(new.headers):
        if words[PUBLISHED + slot] != their[PUBLISHED + slot]:
            at = HEADERS_AT + slot * HEADER_BYTES
            memory[at : at + 4 + len(header)] = len(header).to_bytes(4, "little") + header
            words[PUBLISHED + slot] = their[PUBLISHED + slot]
    words[ASKING_LIFE] = 0
    for word in (ASKING_STEPS, ASKING_SINCE, ELECTING, ASKING_LIFE):
        words[word] = their[word]
    words[POSITION] = their[POSITION]
    _put_exclusion(words, their)


def _put_exclusion(words: memoryview, their: memoryview) -> None:
    for word in (FINAL, FINAL + 1, EXCLUDED):
        words[word] = their[word]


def merged(now: memoryview, new: Snapshot) -> Snapshot | None:
    """Return a worker's new words with the exclusions that were decided before; None if its life is excluded."""
    their, control = new.words, bytearray(new.control)
    words = memoryview(control).cast("q")
    words[FINAL], words[FINAL + 1], words[EXCLUDED] = now[FINAL], now[FINAL + 1], now[EXCLUDED]
    itself = their[EXCLUDED]  # the last of its lives that it has excluded itself
    if itself > now[EXCLUDED]:
        words[FINAL + itself % 2], words[EXCLUDED] = their[FINAL + itself % 2], itself
    if their[LIFE] <= now[EXCLUDED]:
        return None
    return Snapshot(bytes(control), new.headers)


class Rooms:
    """The tensors and states of all workers, as bytes."""

    def __init__(self, memory: RoundsMemory) -> None:
        self.memory = memory
        self.mapped: dict[tuple[int, bool], memoryview] = {}

    def data(self, rank: int, kind: int, num_bytes: int) -> memoryview:
        """Return the area of a slot, or, with STATE, the state of a worker."""
        if not 0 <= num_bytes <= ROOM_BYTES // 2:
            raise ValueError(f"{num_bytes} bytes are more than a worker can have in a round")
        number = self.memory.num_ranks
        if kind == STATE:
            return self._room(rank, True, room_at(number, number + rank), num_bytes)[:num_bytes]
        whole = self._room(rank, False, room_at(number, rank), 2 * num_bytes)
        return whole[kind * num_bytes : (kind + 1) * num_bytes]

    def _room(self, rank: int, is_state: bool, at: int, num_bytes: int) -> memoryview:
        room = self.mapped.get((rank, is_state))
        if room is None or len(room) < num_bytes:
            mapping = mmap.mmap(self.memory.fd, max(1, num_bytes), flags=mmap.MAP_SHARED, offset=at)
            room = self.mapped[rank, is_state] = memoryview(mapping)
        return room


class MachineView:
    """The knowledge that another machine has of each worker: its words, and so its tensors and states."""

    def __init__(self, hosted: Iterable[int]) -> None:
        self.hosted = frozenset(hosted)  # workers whose tensors it has anyway
        self.sent: dict[int, Snapshot] = {}
        self.changed: set[int] = set()
        self.audience = True  # whether it was told that others read the tensors of its workers
        self.ahead: dict[tuple[int, int], tuple[int, int]] = {}  # rank, slot -> the life, and the bytes sent already

    def may_pass(self, part: RoundData, length: int, has_room: bool) -> bool:
        """Return True if a part of tensors may be sent before the words that announce it, in the order of parts.

        A slot may be written, here and elsewhere, since all members have read what was in it. A state may not: a
        worker that waits for it checks its words only.
        """
        if part.kind == STATE or part.rank in self.hosted:
            return False
        key = part.rank, part.kind
        sent = self.ahead.get(key, (0, 0)) if part.offset else (part.life, 0)
        goes = has_room and sent == (part.life, part.offset)
        self.ahead[key] = part.life, sent[1] + length if goes else sent[1]
        return goes

    def messages(
        self, rank: int, now: Snapshot, rooms: Rooms, with_data: bool = True
    ) -> list[tuple[Message, bytes | None]]:
        """Return what brings its knowledge of a worker up to date."""
        before = self.sent.get(rank)
        if now == before:
            return []
        self.sent[rank] = now
        out: list[tuple[Message, bytes | None]] = []
        if with_data and rank not in self.hosted:
            for kind in _new_data(before, now):
                life, first = self.ahead.pop((rank, kind), (0, 0))
                out += _in_chunks(rank, kind, now, rooms, first if life == now.words[LIFE] else 0)
        return [*out, (now.message(rank), None)]


def _new_data(before: Snapshot | None, now: Snapshot) -> list[int]:
    """Return the kinds of data that were announced since."""
    words = now.words
    then: Mapping[int, int] | memoryview = before.words if before is not None else {}
    earlier = [0] * 3 if before is None else [then[PUBLISHED], then[PUBLISHED + 1], then[STATE_POSITION]]
    kinds = [slot for slot in range(2) if words[PUBLISHED + slot] != earlier[slot] and _has_tensors(now, slot)]
    if words[STATE_POSITION] and words[STATE_POSITION] != earlier[2]:
        kinds.append(STATE)
    return kinds


def _has_tensors(now: Snapshot, slot: int) -> bool:
    if not now.words[PUBLISHED + slot] or not now.headers[slot]:
        return False
    return _header_decoder.decode(now.headers[slot]).kind == "mean"


def _num_bytes(words: memoryview, kind: int) -> int:
    return int(words[STRUCTURE_BYTES] + words[TENSOR_BYTES] if kind == STATE else words[AREA_BYTES])


def _in_chunks(rank: int, kind: int, now: Snapshot, rooms: Rooms, first: int = 0) -> list[tuple[Message, bytes | None]]:
    num_bytes, life = _num_bytes(now.words, kind), int(now.words[LIFE])
    data = rooms.data(rank, kind, num_bytes)
    end = _end_of_data(now, kind, num_bytes)
    return [  # copies: the worker may write the next ones before these have left
        (RoundData(rank, life, kind, at, num_bytes), bytes(data[at : min(end, at + CHUNK_BYTES)]))
        for at in range(first, end, CHUNK_BYTES)
    ]


def _end_of_data(now: Snapshot, kind: int, num_bytes: int) -> int:
    """Return how many bytes of an area are in use: fewer, if a codec has encoded the tensors."""
    if kind == STATE:
        return num_bytes
    return min(num_bytes, sum(_header_decoder.decode(now.headers[kind]).encoded)) or num_bytes


class RoundsRelay:
    """One side: finds changes of this machine's workers, and writes those of others into its memory."""

    def __init__(self, memory: RoundsMemory, ranks: Iterable[int], send: Send) -> None:
        """`ranks`: the workers of this machine."""
        self.memory = memory
        self.words = memory.words
        self.ranks = set(ranks)
        self.rooms = Rooms(memory)
        self.send = send
        self.bell: int = memory.bells[-1]

    def rang(self) -> None:
        """Take note that a worker of this machine has written something."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.bell)

    def sleep(self) -> None:
        """Ask to be woken by the next change. Call `look` after it, and then wait for the bell."""
        self.words.relay[ASLEEP] = 1
        self.words.fence()

    def put_data(self, message: RoundData, body: memoryview | None) -> None:
        """Write a part of tensors or of a state."""
        if body is None or not 0 <= message.rank < self.memory.num_ranks or message.kind not in (0, 1, STATE):
            raise ValueError("a part of a round has no place")
        end = message.offset + len(body)
        if not 0 <= message.offset <= end <= message.num_bytes:
            raise ValueError(f"bytes {message.offset} to {end} of {message.num_bytes} are no part of a round")
        if message.kind == STATE:
            self.words.of[message.rank][STATE_POSITION] = 0  # not to be read until it is whole
        self.rooms.data(message.rank, message.kind, message.num_bytes)[message.offset : end] = body


class RunRelay(RoundsRelay):
    """The relay of the run's own machine, which puts all changes in one order."""

    def __init__(self, memory: RoundsMemory, ranks: Iterable[int], send: Send, backlog: Callable[[Peer], int]) -> None:
        """`backlog` returns how many bytes for a machine have not left."""
        super().__init__(memory, ranks, send)
        self.backlog = backlog
        self.machines: dict[Peer, MachineView] = {}
        self.is_spread = bool(self.ranks)  # whether there has ever been more than one machine with workers
        self.last: dict[int, Snapshot] = {}  # of the workers of this machine

    def joined(self, machine: Peer, ranks: Iterable[int]) -> None:
        """Tell a machine all there is, also if it has only lost its connection for a while.

        A machine on which one of these workers was before is left out from now on, with all its workers: their
        processes may still run there, and their memory is not what the others see.
        """
        follower = MachineView(ranks)
        for other, view in list(self.machines.items()):
            if other != machine and view.hosted & follower.hosted:
                self.left(other)
                for rank in view.hosted - follower.hosted:
                    self.memory.exclude(rank)
        self.machines[machine] = follower
        self.is_spread = self.is_spread or len(self.machines) > 1
        follower.changed.update(range(self.memory.num_ranks))

    def left(self, machine: Peer) -> None:
        self.machines.pop(machine, None)

    def _tell_audience(self) -> None:
        """Tell the machines whether others need tensors: one that has had all workers so far keeps them to itself.

        A worker elsewhere reads nothing of what was written before it asked to join, and this arrives before that.
        """
        for machine, view in self.machines.items():
            if view.audience != self.is_spread:
                view.audience = self.is_spread
                self.send(machine, RoundAudience(self.is_spread), None)

    def receive(self, machine: Peer, message: RoundData | RoundWords, body: memoryview | None) -> None:
        """Take a change of a worker of another machine."""
        follower = self.machines.get(machine)
        if follower is None or message.rank not in follower.hosted:
            return
        rank, words = message.rank, self.words.of[message.rank]
        if isinstance(message, RoundData):
            if message.life > words[EXCLUDED]:
                self.put_data(message, body)
                self._pass_on(machine, message, body)
            return
        self.look()  # what workers of this machine have written before comes before this change
        now = merged(words, received(message))
        if now is None:
            return
        put(self.words.bytes[rank], now)
        self._mark([rank])
        self.words.ring(-1)
        self.pump()

    def _pass_on(self, source: Peer, part: RoundData, body: memoryview | None) -> None:
        """Send tensors to the other machines at once, while the rest of them is still on its way here."""
        content = bytes(body or b"")
        for machine, follower in self.machines.items():
            if machine == source:
                continue
            if follower.may_pass(part, len(content), has_room=self.backlog(machine) < AHEAD_BYTES):
                self.send(machine, part, content)

    def look(self) -> None:
        """Find the changes of this machine's workers, and the exclusions."""
        if not self.machines:
            return
        changed, self.memory.changed = self.memory.changed, set()
        for rank in self.ranks:
            now = taken(self.words.bytes[rank])
            if now != self.last.get(rank):
                self.last[rank] = now
                changed.add(rank)
        self._mark(changed)
        self.pump()

    def _mark(self, ranks: Iterable[int]) -> None:
        for follower in self.machines.values():
            follower.changed.update(ranks)

    def pump(self) -> None:
        """Send to each machine what it does not know yet, unless much has not left for it."""
        self._tell_audience()
        for machine, follower in self.machines.items():
            while follower.changed and self.backlog(machine) < BACKLOG_BYTES:
                rank = follower.changed.pop()
                for message, body in follower.messages(rank, taken(self.words.bytes[rank]), self.rooms):
                    self.send(machine, message, body)


class MachineRelay(RoundsRelay):
    """The relay of a machine that has joined a run: its memory is a mirror."""

    def __init__(self, memory: RoundsMemory, ranks: Iterable[int], send: Send, to: Peer) -> None:
        super().__init__(memory, ranks, send)
        self.to = to
        self.run = MachineView(())
        self.audience = True  # whether workers elsewhere read the tensors of these

    def connected(self) -> None:
        """Tell the run all there is, after a connection was made."""
        self.run, self.audience = MachineView(()), True
        self.look()

    def look(self) -> None:
        """Send the changes of this machine's workers."""
        for rank in sorted(self.ranks):
            now = taken(self.words.own_bytes[rank])
            for message, body in self.run.messages(rank, now, self.rooms, with_data=self.audience):
                self.send(self.to, message, body)

    def receive(self, message: RoundData | RoundWords | RoundAudience, body: memoryview | None) -> None:
        """Take a change that the run's machine has put in order."""
        if isinstance(message, RoundAudience):
            if message.is_there and not self.audience:
                self.run = MachineView(())  # what was kept here is sent now
            self.audience = message.is_there
            return
        if isinstance(message, RoundData):
            if message.rank not in self.ranks:
                self.put_data(message, body)
            return
        if 0 <= message.rank < self.memory.num_ranks:
            put(self.words.bytes[message.rank], received(message))
            self.words.ring(-1)
