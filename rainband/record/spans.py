"""Who did what from when to when: recorded in real and in virtual time, read by `rainband timeline`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rainband.worker.client import Client, PullHandle, PushHandle

if TYPE_CHECKING:
    from rainband.model.gradient import Gradient
    from rainband.worker.worker import ModuleWorker, ServerSide

FILES = "spans*.jsonl"  # in a run's directory; real workers write one each


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stretch of a node's time."""

    node: str  # "worker 0"
    what: str  # compute, wait: its own thread; push, pull: on their way; apply: a server's thread
    from_s: float
    to_s: float
    label: str = ""  # of a model in stages: F3 and B3, forward and backward of microbatch 3


Emit = Callable[[Span], None]


class SpanRecorder:
    """Notes how long a worker's pushes and pulls are on their way."""

    def __init__(self, node: str, now: Callable[[], float], emit: Emit) -> None:
        self.node = node
        self.now = now
        self.emit = emit
        self.client: Client | None = None
        self.last_pull: PullHandle | None = None
        self.under_way: list[tuple[float, PushHandle | PullHandle]] = []

    def follow(self, worker: ModuleWorker) -> None:
        self.client = worker.client
        worker.servers = WatchedServers(worker.servers, self)  # type: ignore[assignment]

    def span(self, what: str, from_s: float, label: str = "") -> None:
        """It has done something since then."""
        self.emit(Span(self.node, what, from_s, self.now(), label))

    def looking(self, wait: Callable[..., object]) -> Callable[..., object]:
        """The same waiting, with a look at what has come."""

        def wait_and_look(*timeout_s: float) -> object:
            result = wait(*timeout_s)
            self.look()
            return result

        return wait_and_look

    def began(self, handle: PushHandle | PullHandle) -> None:
        if handle is self.last_pull:
            return
        if isinstance(handle, PullHandle):
            self.last_pull = handle
        if not self._is_there(handle):
            self.under_way.append((self.now(), handle))

    def look(self) -> None:
        """Something has happened: what is complete now? (To ask a pull whether it is ready would take it over.)"""
        if self.client is not None and self.client.pulling is not None:
            self.began(self.client.pulling)  # a client asks for a round by itself
        for began, handle in [way for way in self.under_way if self._is_there(way[1])]:
            what = "push" if isinstance(handle, PushHandle) else "pull"
            self.emit(Span(self.node, what, began, self.now()))
            self.under_way.remove((began, handle))

    def _is_there(self, handle: PushHandle | PullHandle) -> bool:
        if isinstance(handle, PushHandle):
            return handle.left == 0
        return handle.late or handle.has_every()


class WatchedServers:
    """The servers, as a strategy sees them; every push and pull is noted."""

    def __init__(self, side: ServerSide, watch: SpanRecorder) -> None:
        self.side = side
        self.watch = watch

    def push(self, gradient: Gradient) -> PushHandle:
        handle = self.side.push(gradient)
        self.watch.began(handle)
        return handle

    def exchange(self, gradient: Gradient) -> PullHandle:
        handle = self.side.exchange(gradient)
        self.watch.began(handle)
        return handle

    def pull(self, round: int | None = None, ahead: int = 0) -> PullHandle:
        handle = self.side.pull(round, ahead)
        self.watch.began(handle)
        return handle


class SpanFile:
    """Writes spans as lines of JSON; each is there at once, as a process may be killed at any moment."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb", buffering=0)
        self.encoder = msgspec.json.Encoder()

    def write(self, span: Span) -> None:
        self.file.write(self.encoder.encode(span) + b"\n")


def write_spans(directory: Path, spans: Iterable[Span]) -> None:
    encode = msgspec.json.Encoder().encode
    (directory / "spans.jsonl").write_bytes(b"".join(encode(span) + b"\n" for span in spans))


def read_spans(directory: Path) -> list[Span]:
    """All spans of a run, from its first moment on; the last line of a process that was killed may be torn."""
    decoder = msgspec.json.Decoder(Span)
    spans: list[Span] = []
    for path in sorted(directory.glob(FILES)):
        for line in path.read_bytes().splitlines():
            try:
                spans.append(decoder.decode(line))
            except msgspec.MsgspecError:
                continue
    return from_zero(spans)


def from_zero(spans: Sequence[Span]) -> list[Span]:
    """Times as seconds since the first span."""
    first = min((span.from_s for span in spans), default=0.0)
    return [Span(s.node, s.what, s.from_s - first, s.to_s - first, s.label) for s in spans]
