"""The journal of a full-batch run, with which another coordinator can continue it: the nodes, and all results so far.

`coordinate` gives the same commands again if it receives the same results. So a restarted coordinator runs it from the
start with the results of the journal, until there are no more; then it sends the command that was in flight again,
under its own term. A server that has executed it answers the same as before; any other executes it now.
"""

from __future__ import annotations

import msgspec
import xxhash

from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import Address, Command, Join, Peer, Welcome


class JournalEntry(msgspec.Struct, frozen=True, array_like=True):
    """One command and its results."""

    command: int  # a digest: the same command must be given again
    results: tuple[float, ...]
    loss: float | None = None  # of an evaluation: the sum over the samples; none: not finite, or no evaluation
    samples: int = 0


class Journal(msgspec.Struct):
    """A few numbers for every command: some hundred bytes per iteration, for any size of model."""

    term: int = 1  # of the coordinator: one more each time it is started
    join: Join | None = None
    plan: DataPlan | None = None
    welcome: Welcome | None = None
    servers: tuple[tuple[Peer, Address], ...] = ()
    entries: list[JournalEntry] = []
    backups: int = 0  # copies of work items that were handed out

    @property
    def has_started(self) -> bool:
        return self.plan is not None

    def resumed(self) -> Journal:
        """Return the journal as the next coordinator reads it: only what can be serialized."""
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(self), type=Journal)
        read.term += 1
        return read


class CommandPosition(msgspec.Struct, frozen=True):
    """The last command that was executed when a checkpoint began."""

    number: int  # of the last command, which all servers have executed; if it is an evaluation, it begins again
    version: int  # of every block
    evaluates: bool  # it is an evaluation, which is not complete
    step: int  # batches of complete evaluations
    results: bytes  # of all commands that were complete


def samples_of_results(results: bytes) -> int:
    """Return the samples of the evaluations whose results a checkpoint has; ValueError if they are no results."""
    return sum(entry.samples for entry in decode_results(results))


def decode_results(results: bytes) -> list[JournalEntry]:
    try:
        return msgspec.msgpack.decode(results, type=list[JournalEntry])
    except msgspec.MsgspecError as error:
        raise ValueError(f"the results of its commands cannot be read ({error}).") from None


def digest(command: Command) -> int:
    """Return a hash of a command, without the sender's term."""
    return (
        xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((command.number, command.operations, command.work_items))) >> 1
    )
