"""The trace of a simulated run: a hash that is equal for equal runs, and a table for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import msgspec
import xxhash

from rainband.protocol import messages
from rainband.protocol.data_plan import PushId
from rainband.protocol.messages import AnyMessage, Message

# The numbers that are hashed for a message, besides its kind: no names, so that neither a new field nor another word
# changes the hash of a run.
_push = attrgetter("block", "worker", "sequence", "push_id", "samples", "clock", "version", "at_version", "want")
SCHEDULE: dict[type[Message], Callable[[Any], object]] = {
    messages.Push: lambda m: (*_push(m), not m.skip),
    messages.Ack: attrgetter("block", "sequence", "result", "version"),
    messages.Pull: attrgetter("sequence", "clock", "at_version", "base", "part"),
    messages.Params: attrgetter("block", "sequence", "version", "at_version", "round_over", "clock"),
    messages.InitBlock: lambda m: (m.block, m.numel, len(m.part)),
    messages.Lease: attrgetter("portion", "lease", "groups"),
    messages.Return: attrgetter("portion", "lease", "reason"),
    messages.Revoke: attrgetter("portion", "lease"),
    messages.AcceptedBatches: attrgetter("portion", "lease", "masks"),
}


class NodeEvent(IntEnum):
    """Events of a node besides messages."""

    KILLED = 1
    CRASHED = 2
    STARTED = 3
    PAUSED = 4
    CLOCK_JUMPED = 5
    DISK_SLOWED = 6
    LINK_FAULT = 7
    DISCONNECTED = 8
    LOST_PEER = 9
    ROUND = 10


FILE = "trace.jsonl"
KINDS = {kind: (kind.__struct_config__.tag, SCHEDULE.get(kind)) for kind in get_args(AnyMessage)}
AT_ONCE = 1000  # lines that are hashed together, for speed
_encode = msgspec.msgpack.Encoder().encode


class Line(msgspec.Struct, frozen=True, array_like=True):
    """One line of the trace."""

    at_s: float
    source: str
    target: str  # the source, if the line is about one node
    what: str


class Trace:
    """Hashes every line, and stores the lines if `keep` is set."""

    def __init__(self, keep: bool = False) -> None:
        self.lines: list[Line] | None = [] if keep else None
        self.hasher = xxhash.xxh3_64()
        self.unhashed: list[tuple[object, ...]] = []

    def note(self, at_s: float, node: str, event: NodeEvent, what: str) -> None:
        """Note an event of a node; `what` describes it for people."""
        self.unhashed.append((at_s, node, event))
        if self.lines is not None:
            self.lines.append(Line(at_s, node, node, what))

    def message(self, at_s: float, source: str, target: str, message: Message) -> None:
        """Note that a message arrived. Its measurements (losses, staleness) are not hashed."""
        unhashed = self.unhashed
        tag, schedule = KINDS[type(message)]
        unhashed.append((at_s, source, target, tag, schedule(message) if schedule else 0))
        if len(unhashed) >= AT_ONCE:
            self._hash()
        if self.lines is not None:
            self.lines.append(Line(at_s, source, target, brief(message)))

    def _hash(self) -> None:
        self.hasher.update(_encode(self.unhashed))
        self.unhashed.clear()

    def values(self, data: bytes) -> None:
        """Hash values, too: the final parameters."""
        self._hash()
        self.hasher.update(data)

    def digest(self) -> str:
        self._hash()
        return self.hasher.hexdigest()


def name_of(name: PushId) -> str:
    """Return a push ID for people: 3:0-2 is batches 0 and 1 of portion 3; 3:0-2#4 under lease 4."""
    return "+".join(f"{r.portion}:{r.first}-{r.last}" + (f"#{r.lease}" if r.lease != 1 else "") for r in name)


def brief(message: Message) -> str:
    """Describe a message in a few words, without values of gradients."""
    match message:
        case messages.Push():
            skip = f" skip({message.skip})" if message.skip else ""
            at_version = f" round {message.at_version}" if message.at_version >= 0 else ""
            read = f" read v{message.version}"
            return f"push {message.sequence} block {message.block} {name_of(message.push_id)}{at_version}{read}{skip}"
        case messages.Ack():
            return f"{message.result.name.lower()} {message.sequence} block {message.block} v{message.version}"
        case messages.Pull():
            return f"pull {message.sequence}" + (f" round {message.at_version}" if message.at_version >= 0 else "")
        case messages.Params():
            late = " late" if message.round_over else ""
            return f"params {message.sequence} block {message.block} v{message.version}{late}"
        case messages.InitBlock():
            return f"load block {message.block}"
        case messages.Lease():
            groups = "|".join(",".join(map(str, group)) for group in message.groups)
            return f"lease {message.portion}#{message.lease} {groups}"
        case messages.Return():
            return f"return {message.portion}#{message.lease} {message.reason.name.lower()}"
        case messages.Revoke():
            return f"revoke {message.portion}#{message.lease}"
        case messages.AcceptedBatches():
            return f"accepted_batches {message.portion}#{message.lease} {' '.join(map(bin, message.masks))}"
    return type(message).__name__.lower()


def table(lines: Iterable[Line], hide: tuple[str, ...] = ("heartbeat", "reportrequest", "report")) -> str:
    """Return the lines as a table, without heartbeats and reports."""
    rows = [
        (f"{line.at_s:.6f}", line.source, "" if line.target == line.source else f"> {line.target}", line.what)
        for line in lines
        if line.what.split(" ")[0] not in hide
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return "\n".join(
        f"{at:>{widths[0]}}  {source:<{widths[1]}}  {target:<{widths[2]}}  {what}".rstrip()
        for at, source, target, what in rows
    )


def write_lines(directory: Path, lines: Iterable[Line]) -> None:
    (directory / FILE).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def read_lines(directory: Path) -> list[Line]:
    decoder = msgspec.json.Decoder(Line)
    return [decoder.decode(line) for line in (directory / FILE).read_bytes().splitlines()]
