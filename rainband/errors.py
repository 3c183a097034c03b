"""The named errors of the world: what can go wrong between machines, whoever is to blame."""

from __future__ import annotations

from collections.abc import Iterable


class RainbandError(Exception):
    """Something went wrong between the nodes of a run."""


class PeerLost(RainbandError):
    """A node we talked to is gone: `PeerLost("worker 3", "waiting for its half of round 7")`."""

    def __init__(self, who: str, doing: str) -> None:
        super().__init__(who, doing)
        self.who = who
        self.doing = doing

    def __str__(self) -> str:
        return f"lost {self.who} while {self.doing}"


class ServerLost(PeerLost):
    """A server is gone, and with it, until a backup or a snapshot takes over, its blocks."""


class CoordinatorLost(PeerLost):
    """The coordinator is gone: training goes on for as long as leases were given ahead."""


class Refused(RainbandError):
    """The other side understood what we asked and said no; `reason` is its word for why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class HandshakeFailed(RainbandError):
    """The two ends of a connection could not agree on the protocol, the run or its secret."""


class Deadlock(RainbandError):
    """Everyone waits and nothing is under way; the message names who waits for what."""


class Stop(Exception):
    """Thrown into a strategy to end it early: it may catch it, flush what it holds, and return.

    It is no RainbandError, so that a retry after a lost peer does not swallow it. It is an Exception, not a
    BaseException, so that one that escapes is reported like any failure and does not end the whole process.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for a name that was mistyped, " (did you mean downpour?)", or ""."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
