"""What happened in a simulated run: a hash that is equal when the runs are, and a table that people can read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import xxhash

from rainband.messages import Ack, Lease, Load, Message, Params, Pull, Push, Return, Revoke, Sets
from rainband.portions import Name

DATA = frozenset((Push, Ack, Pull, Params, Load, Lease, Return, Revoke, Sets))
FILE = "trace.jsonl"
AT_ONCE = 1000  # lines are hashed together: that is faster
_encode = msgspec.msgpack.Encoder().encode


class Line(msgspec.Struct, frozen=True, array_like=True):
    """One thing that happened."""

    at_s: float
    source: str
    target: str  # the same as the source where it is about one node
    what: str


class Trace:
    """Hashes every line; keeps them only when asked to."""

    def __init__(self, keep: bool = False) -> None:
        self.lines: list[Line] | None = [] if keep else None
        self.hasher = xxhash.xxh3_64()
        self.unhashed: list[tuple[object, ...]] = []

    def note(self, at_s: float, node: str, what: str) -> None:
        """Something happened to a node."""
        self.unhashed.append((at_s, node, what))
        if self.lines is not None:
            self.lines.append(Line(at_s, node, node, what))

    def message(self, at_s: float, source: str, target: str, message: Message) -> None:
        """A message arrived. What it measures (losses, staleness) does not count: a schedule has no values."""
        kind = type(message)
        unhashed = self.unhashed
        unhashed.append((at_s, source, target, message if kind in DATA else kind.__name__))
        if len(unhashed) >= AT_ONCE:
            self._hash()
        if self.lines is not None:
            self.lines.append(Line(at_s, source, target, brief(message)))

    def _hash(self) -> None:
        self.hasher.update(_encode(self.unhashed))
        self.unhashed.clear()

    def values(self, data: bytes) -> None:
        """Let numbers count as well: the final parameters."""
        self._hash()
        self.hasher.update(data)

    def digest(self) -> str:
        self._hash()
        return self.hasher.hexdigest()


def name_of(name: Name) -> str:
    """A push's name for people: 3:0-2 is batches 0 and 1 of portion 3, 3:0-2#4 under lease 4."""
    return "+".join(f"{r.portion}:{r.first}-{r.last}" + (f"#{r.lease}" if r.lease != 1 else "") for r in name)


def brief(message: Message) -> str:
    """A message in a few words. Nothing here depends on the values of gradients."""
    match message:
        case Push():
            skip = f" skip({message.skip})" if message.skip else ""
            point = f" round {message.point}" if message.point >= 0 else ""
            read = f" read v{message.version}"
            return f"push {message.sequence} block {message.block} {name_of(message.name)}{point}{read}{skip}"
        case Ack():
            return f"{message.result} {message.sequence} block {message.block} v{message.version}"
        case Pull():
            return f"pull {message.sequence}" + (f" round {message.point}" if message.point >= 0 else "")
        case Params():
            late = " late" if message.late else ""
            return f"params {message.sequence} block {message.block} v{message.version}{late}"
        case Load():
            return f"load block {message.block}"
        case Lease():
            return f"lease {message.portion}#{message.lease} {_groups(message.groups)}"
        case Return():
            return f"return {message.portion}#{message.lease} {message.reason}"
        case Revoke():
            return f"revoke {message.portion}#{message.lease}"
        case Sets():
            return f"sets {message.portion}#{message.lease} {' '.join(map(bin, message.masks))}"
    return type(message).__name__.lower()


def _groups(groups: Iterable[Iterable[int]]) -> str:
    return "|".join(",".join(map(str, group)) for group in groups)


def table(lines: Iterable[Line], hide: tuple[str, ...] = ("beat", "ask", "report")) -> str:
    """The lines as a table; what only keeps time is left out."""
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
