"""Errors between the nodes of a run, and hints in error messages."""

from __future__ import annotations

from collections.abc import Iterable

NOT_IN_BLOCK = (
    "the loop has not joined the run yet: put it inside a block, `with rainband.join(model, optimizer) as run:`."
)


class RainbandError(Exception):
    """An error of a run."""


class PeerLost(RainbandError):
    """The connection to another node was lost: `PeerLost("worker 3", "waiting for its gradient of round 7")`."""

    def __init__(self, who: str, doing: str) -> None:
        super().__init__(who, doing)
        self.who = who
        self.doing = doing

    def __str__(self) -> str:
        return f"lost {self.who} while {self.doing}"


class ServerLost(PeerLost):
    """A server was lost, and with it the blocks that it held."""


class CoordinatorLost(PeerLost):
    """The connection to the coordinator was lost, so the worker process ends."""


class Refused(RainbandError):
    """The other node refused a request; `reason` is its explanation."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotSaved(RainbandError):
    """The model could not be saved, for example because the disk is full."""


class BadCheckpoint(RainbandError):
    """A file of a checkpoint is missing, damaged, or not what its name says; nothing of it was used."""

    def __init__(self, file: str, why: str) -> None:
        super().__init__(file, why)
        self.file = file
        self.why = why

    def __str__(self) -> str:
        return f"{self.file}: {self.why.rstrip('.')}."


class LoaderProcessLost(RainbandError):
    """A process of a worker's data loader was killed: the worker is lost, and others go on with its batches."""


class NotListening(PeerLost):
    """A machine answers that no process listens at the address."""


class HandshakeFailed(RainbandError):
    """The two ends of a connection differ in protocol, run or secret."""


class NoAnswer(HandshakeFailed):
    """The other end of a connection did not answer in time."""


class Deadlock(RainbandError):
    """All nodes of a simulation wait, and no message is in transit; the text names each and the reason."""


class Stop(Exception):
    """Thrown into a strategy to end it early: the strategy may catch it, flush its buffers, and return.

    It is not a RainbandError, so that a retry after a lost peer does not catch it. It is an Exception, not a
    BaseException, so that an uncaught one is reported like any failure and does not end the process.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the most similar known name as a hint, " (did you mean ...)", or "" if none is similar."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


class StateLost(RainbandError):
    """All workers that had the trained parameters were lost."""
