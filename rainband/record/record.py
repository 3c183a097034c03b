"""Record the order of pushes and pulls in an asynchronous run, so that `rainband replay` can repeat it bit for bit.

A server writes the order in which it applied pushes, and between them the messages that changed its update rules. A
worker writes its leases and the version of each block that it read, a few bytes for each push and pull. Everything else
follows from the data plan. Each note has a checksum: damaged notes could repeat another run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import msgspec
import torch

from rainband.observer import Observer
from rainband.protocol.messages import Assign, Lease, Message, Params, Peer, Push, PushResult, RuleChange, Welcome

if TYPE_CHECKING:
    from rainband.worker.client import Client

LENGTH_BYTES, CHECKSUM_BYTES = 2, 4
LONG = (1 << 8 * LENGTH_BYTES) - 1  # the length of a longer note follows in eight bytes


class Note(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The base class of notes."""


class Began(Note, frozen=True, tag=0):
    """The conditions on which the bits of gradients depend besides the data."""

    torch: str
    cpu_capability: str
    threads: int


class Read(Note, frozen=True, tag=1):
    """A worker received a block's parameters for one of its pulls."""

    sequence: int
    block: int
    version: int


class Applied(Note, frozen=True, tag=2):
    """A block accepted a push; the order of these notes is the order of the updates."""

    block: int
    worker: int
    sequence: int


class RefusedPush(Note, frozen=True, tag=3):
    """A server did not accept a push."""

    worker: int
    result: str


class Leased(Note, frozen=True, tag=4):
    """A worker received a lease."""

    portion: int
    lease: int
    groups: tuple[tuple[int, ...], ...]


class Assigned(Note, frozen=True, tag=5):
    """A server received its blocks."""

    assign: Assign


class Welcomed(Note, frozen=True, tag=6):
    """A worker received the data plan."""

    welcome: Welcome


class RuleChanged(Note, frozen=True, tag=7):
    """A server changed the update rules of all its blocks: the last update, the divergence guard, a lost worker."""

    message: RuleChange


AnyNote = Began | Read | Applied | RefusedPush | Leased | Assigned | Welcomed | RuleChanged


def here() -> Began:
    """Return the conditions in this process."""
    return Began(str(torch.__version__), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())


class Recorder(Observer):
    """Writes the notes of one process."""

    def __init__(self, directory: str, peer: Peer) -> None:
        # Unbuffered: a process may be killed at any moment, and its notes should outlive it.
        self.file = open(Path(directory, f"record-{peer.role}-{peer.index}.bin"), "wb", buffering=0)  # noqa: SIM115
        self.encoder = msgspec.msgpack.Encoder()
        self.write(here())

    def write(self, note: AnyNote) -> None:
        data = self.encoder.encode(note)
        length = min(len(data), LONG).to_bytes(LENGTH_BYTES, "little")
        longer = len(data).to_bytes(8, "little") if len(data) >= LONG else b""
        self.file.write(length + longer + crc32(data).to_bytes(CHECKSUM_BYTES, "little") + data)

    def close(self) -> None:
        self.file.close()

    def joined(self, client: Client, welcome: Welcome) -> None:
        self.write(Welcomed(welcome))

    def received(self, message: Message) -> None:
        match message:
            case Lease():
                self.write(Leased(message.portion, message.lease, message.groups))
            case Params() if not message.round_over:
                self.write(Read(message.sequence, message.block, message.version))
            case Assign():
                self.write(Assigned(message))

    def answered(self, push: Push, result: PushResult) -> None:
        self.write(
            Applied(push.block, push.worker, push.sequence)
            if result == PushResult.ACCEPTED
            else RefusedPush(push.worker, result.name.lower())
        )

    def rules_changed(self, message: RuleChange) -> None:
        self.write(RuleChanged(message))


def read_notes(path: Path) -> Iterator[AnyNote]:
    """Read the notes of one process; ignores an incomplete one at the end, and raises ValueError if one is damaged."""
    decoder = msgspec.msgpack.Decoder(AnyNote)
    data, at = memoryview(path.read_bytes()), 0
    while at + LENGTH_BYTES <= len(data):
        length = int.from_bytes(data[at : at + LENGTH_BYTES], "little")
        at += LENGTH_BYTES
        if length == LONG:
            length = int.from_bytes(data[at : at + 8], "little")
            at += 8
        checksum = int.from_bytes(data[at : at + CHECKSUM_BYTES], "little")
        at += CHECKSUM_BYTES
        if at + length > len(data):
            return
        note = data[at : at + length]
        if crc32(note) != checksum:
            raise ValueError(f"{path} is damaged at byte {at}, so the run cannot be repeated.")
        yield decoder.decode(note)
        at += length


@dataclass
class Record:
    """The notes of all processes of a run."""

    began: Began
    welcome: Welcome
    servers: list[Assigned]
    leases: dict[int, list[Leased]]  # worker -> in order
    reads: dict[tuple[int, int, int], int]  # (worker, pull, block) -> version
    order: dict[int, deque[Applied | RuleChanged]]  # block -> what it applied and followed, in order


def read_record(directory: Path) -> Record:
    """Read the notes of all processes of a run."""
    workers = {int(path.stem.split("-")[2]): list(read_notes(path)) for path in directory.glob("record-worker-*.bin")}
    servers = {int(path.stem.split("-")[2]): list(read_notes(path)) for path in directory.glob("record-server-*.bin")}
    if not workers or not servers:
        raise ValueError(f"{directory.name} was not recorded, so it cannot be repeated: start it with --record.")
    every = [note for notes in (*workers.values(), *servers.values()) for note in notes]
    if refused := Counter(note.result for note in every if isinstance(note, RefusedPush)):
        listed = ", ".join(f"{times} {result}" for result, times in refused.items())
        raise ValueError(f"{directory.name} cannot be repeated: pushes were refused in it ({listed}).")
    began = next((note for note in every if isinstance(note, Began)), None)
    welcome = next((note.welcome for note in every if isinstance(note, Welcomed)), None)
    if began is None or welcome is None:
        raise ValueError(f"{directory.name} cannot be repeated: its record has no data plan.")
    order: dict[int, deque[Applied | RuleChanged]] = {}
    for notes in servers.values():
        blocks: list[int] = []
        for note in notes:
            match note:
                case Assigned():
                    blocks = [spec.index for spec in note.assign.blocks]
                case Applied():
                    order.setdefault(note.block, deque()).append(note)
                case RuleChanged():
                    for block in blocks:
                        order.setdefault(block, deque()).append(note)
    return Record(
        began=began,
        welcome=welcome,
        servers=[note for i in sorted(servers) for note in servers[i] if isinstance(note, Assigned)],
        leases={w: [note for note in notes if isinstance(note, Leased)] for w, notes in sorted(workers.items())},
        reads={
            (w, note.sequence, note.block): note.version
            for w, notes in sorted(workers.items())
            for note in notes
            if isinstance(note, Read)
        },
        order=order,
    )
