"""Recording of spans: what each node did from when to when. `rainband timeline` draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rainband.observer import Activity, Observer
from rainband.views.spans import Span
from rainband.worker.pulls import PullHandle
from rainband.worker.pushes import PushHandle

if TYPE_CHECKING:
    from rainband.protocol.messages import Message

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
