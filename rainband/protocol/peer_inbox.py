"""Messages between the workers of a replica: the contract of a link to peers, and the inbox that sorts by tag."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Protocol

from rainband.errors import PeerLost

Tag = tuple[int | str, ...]  # names a message between workers, such as ("forward", 3)


class Peers(Protocol):
    """The other workers of this replica, by their rank in it."""

    def send(self, to: int, tag: Tag, payload: Any) -> None:
        """Send a pytree of tensors and plain values; they may be overwritten when this returns."""

    def recv(self, source: int, tag: Tag) -> Arrival:
        """Return a handle for what that worker sends under this tag, whether it has arrived or not."""


class Arrival(Protocol):
    """A message that will arrive, or has. Awaiting it returns the payload; raises PeerLost if it cannot arrive."""

    def ready(self) -> bool: ...

    def __await__(self) -> Generator[Any, None, Any]: ...


class Received:
    """A message that was asked for. Awaiting it returns the payload."""

    def __init__(self, source: int, tag: Tag) -> None:
        self.source = source
        self.tag = tag
        self.arrived = False
        self.payload: Any = None
        self.lost = ""  # why it will never arrive

    def ready(self) -> bool:
        return self.arrived or bool(self.lost)

    def __await__(self) -> Generator[Received, None, Any]:
        while not self.ready():
            yield self
        return self.result()

    def result(self) -> Any:
        """Return the payload of a message that has arrived."""
        assert self.ready(), f"{self.tag} of worker {self.source} has not arrived yet"
        if self.arrived:
            return self.payload
        name = " ".join(map(str, self.tag))
        raise PeerLost(f"worker {self.source}", f"waiting for its message '{name}' ({self.lost})")


class Inbox:
    """Messages by sender and tag; those of one tag in the order in which they arrived."""

    def __init__(self, on_lost: Callable[[int], None] | None = None) -> None:
        self.linked: set[int] = set()  # connected workers
        self.lost: dict[int, str] = {}  # those that were connected -> why they no longer are
        self._on_lost = on_lost
        self._kept: dict[tuple[int, Tag], deque[Any]] = {}
        self._asked: dict[tuple[int, Tag], deque[Received]] = {}

    def opened(self, source: int) -> None:
        self.linked.add(source)
        self.lost.pop(source, None)

    def closed(self, source: int, why: str) -> None:
        """Fail everything that waits for a message of this worker; what has arrived stays."""
        if source not in self.linked:
            return
        self.linked.discard(source)
        self.lost[source] = why
        for asked in [key for key in self._asked if key[0] == source]:
            for received in self._asked.pop(asked):
                received.lost = why
        if self._on_lost is not None:
            self._on_lost(source)

    def arrived(self, source: int, tag: Tag, payload: Any) -> None:
        asked = self._asked.get((source, tag))
        if not asked:
            self._kept.setdefault((source, tag), deque()).append(payload)
            return
        received = asked.popleft()
        received.arrived, received.payload = True, payload
        if not asked:
            del self._asked[source, tag]

    def ask(self, source: int, tag: Tag) -> Received:
        """Return the next message of this tag, which no other call receives."""
        received = Received(source, tag)
        kept = self._kept.get((source, tag))
        if kept:
            received.arrived, received.payload = True, kept.popleft()
            if not kept:
                del self._kept[source, tag]
        elif source not in self.linked:
            received.lost = self.lost.get(source, "there was never a link to it")
        else:
            self._asked.setdefault((source, tag), deque()).append(received)
        return received
