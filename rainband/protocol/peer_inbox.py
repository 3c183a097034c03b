"""What came from other workers: kept until it is asked for, or handed to whoever waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from rainband.errors import PeerLost
from rainband.strategy import Tag


class Received:
    """A message that is asked for. Awaiting it waits; its result is the payload."""

    def __init__(self, source: int, tag: Tag) -> None:
        self.source = source
        self.tag = tag
        self.come = False
        self.payload: Any = None
        self.lost = ""  # why it will never come

    def ready(self) -> bool:
        return self.come or bool(self.lost)

    def __await__(self) -> Generator[Received, None, Any]:
        while not self.ready():
            yield self
        return self.result()

    def result(self) -> Any:
        """The payload of a message that has come."""
        assert self.ready(), f"{self.tag} of worker {self.source} has not come yet"
        if self.come:
            return self.payload
        name = " ".join(map(str, self.tag))
        raise PeerLost(f"worker {self.source}", f"waiting for its message '{name}' ({self.lost})")


class Inbox:
    """Messages by sender and tag; those of one tag in the order in which they came."""

    def __init__(self, on_lost: Callable[[int], None] | None = None) -> None:
        self.linked: set[int] = set()  # workers that can be talked to
        self.lost: dict[int, str] = {}  # those that could, and why no more
        self._on_lost = on_lost
        self._kept: dict[tuple[int, Tag], deque[Any]] = {}
        self._asked: dict[tuple[int, Tag], deque[Received]] = {}

    def opened(self, source: int) -> None:
        self.linked.add(source)
        self.lost.pop(source, None)

    def closed(self, source: int, why: str) -> None:
        """Nothing more will come: whoever waits for it is told; what has come stays."""
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
        received.come, received.payload = True, payload
        if not asked:
            del self._asked[source, tag]

    def ask(self, source: int, tag: Tag) -> Received:
        """One message of this tag is the asker's."""
        received = Received(source, tag)
        kept = self._kept.get((source, tag))
        if kept:
            received.come, received.payload = True, kept.popleft()
            if not kept:
                del self._kept[source, tag]
        elif source not in self.linked:
            received.lost = self.lost.get(source, "there was never a link to it")
        else:
            self._asked.setdefault((source, tag), deque()).append(received)
        return received
