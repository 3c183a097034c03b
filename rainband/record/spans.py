"""The spans of a run: what each node did from when to when. `rainband timeline` draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rainband.observer import Activity, Observer
from rainband.worker.pulls import PullHandle
from rainband.worker.pushes import PushHandle

if TYPE_CHECKING:
    from rainband.protocol.messages import Message

FILES = "spans*.jsonl"  # in a run's directory; real workers write one each


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stretch of a node's time."""

    node: str  # "worker 0"
    what: str  # compute, wait: its own thread; push, pull: under way; apply: a server's thread
    from_s: float
    to_s: float
    label: str = ""  # with stages: F3 and B3, forward and backward of microbatch 3


Emit = Callable[[Span], None]


class SpanRecorder(Observer):
    """Records the spans of one node: what it computes and waits for, and how long pushes and pulls are under way."""

    def __init__(self, node: str, now: Callable[[], float], emit: Emit) -> None:
        self.node = node
        self.now = now
        self.emit = emit
        self.last_pull: PullHandle | None = None
        self.under_way: list[tuple[float, PushHandle | PullHandle]] = []

    def spent(self, activity: Activity, from_s: float, to_s: float, label: str = "") -> None:
        self.emit(Span(self.node, activity, from_s, to_s, label))

    def pushed(self, handle: PushHandle) -> None:
        self._began(handle)

    def pulled(self, handle: PullHandle) -> None:
        if handle is not self.last_pull:  # it may be requested twice
            self.last_pull = handle
            self._began(handle)

    def received(self, message: Message) -> None:
        """Emit a span for each push and pull that is complete. (Asking a pull for `ready()` would copy its blocks.)"""
        for began_s, handle in [way for way in self.under_way if _is_complete(way[1])]:
            self.spent("push" if isinstance(handle, PushHandle) else "pull", began_s, self.now())
            self.under_way.remove((began_s, handle))

    def _began(self, handle: PushHandle | PullHandle) -> None:
        if not _is_complete(handle):
            self.under_way.append((self.now(), handle))


def _is_complete(handle: PushHandle | PullHandle) -> bool:
    if isinstance(handle, PushHandle):
        return handle.left == 0
    return handle.late or handle.has_every()


class SpanFile:
    """Writes spans as lines of JSON; unbuffered, because a process may be killed at any moment."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb", buffering=0)
        self.encoder = msgspec.json.Encoder()

    def write(self, span: Span) -> None:
        self.file.write(self.encoder.encode(span) + b"\n")


def write_spans(directory: Path, spans: Iterable[Span]) -> None:
    encode = msgspec.json.Encoder().encode
    (directory / "spans.jsonl").write_bytes(b"".join(encode(span) + b"\n" for span in spans))


def read_spans(directory: Path) -> list[Span]:
    """Read all spans of a run, in seconds since the first one; ignores an incomplete last line of a killed process."""
    decoder = msgspec.json.Decoder(Span)
    spans: list[Span] = []
    for path in sorted(directory.glob(FILES)):
        for line in path.read_bytes().splitlines():
            try:
                spans.append(decoder.decode(line))
            except msgspec.MsgspecError:
                continue
    first = min((span.from_s for span in spans), default=0.0)
    return [Span(s.node, s.what, s.from_s - first, s.to_s - first, s.label) for s in spans]
