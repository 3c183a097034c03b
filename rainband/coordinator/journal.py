"""What a coordinator that leads must not forget: who takes part, and what came of every command so far.

`lead` asks for the same commands again if it is given the same answers. So a coordinator that is started again runs it
from its beginning with the answers of the journal, until there are no more; then it asks the servers, under its own
term, what came of the command that was under way. They have done it once, or do it now.
"""

from __future__ import annotations

import msgspec
import xxhash

from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import Address, Command, Join, Welcome


class JournalEntry(msgspec.Struct, frozen=True, array_like=True):
    """One command and what came of it."""

    asked: int  # a digest of the command: the same must be asked for again
    results: tuple[float, ...]
    loss: float | None = None  # of an evaluation: the sum over the samples; none: it was not finite, or there was none
    samples: int = 0


class Journal(msgspec.Struct):
    """A few numbers for every command: some hundred bytes an iteration, whatever the model's size."""

    term: int = 1  # the coordinator's, one more each time it is started
    join: Join | None = None
    plan: DataPlan | None = None
    welcome: Welcome | None = None
    servers: tuple[Address, ...] = ()
    entries: list[JournalEntry] = []
    backups: int = 0  # copies of cells handed out

    @property
    def has_begun(self) -> bool:
        return self.plan is not None

    def taken_up(self) -> Journal:
        """The journal as it is found by the next coordinator: only what can be written down."""
        found = msgspec.msgpack.decode(msgspec.msgpack.encode(self), type=Journal)
        found.term += 1
        return found


def digest(command: Command) -> int:
    """Of what is asked for, whoever asks."""
    return (
        xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((command.number, command.operations, command.work_items))) >> 1
    )
