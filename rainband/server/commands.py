"""A server's half of a run that the coordinator leads: commands done once, and the sum of an evaluation.

Commands are numbered by (the coordinator's term, n), and n goes on from term to term. One that comes again is answered
the same again, also to a coordinator that was started anew; one that comes out of order, or from a coordinator that was
replaced, changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from rainband.protocol.messages import Answer, Command, Evaluated, Message, Push
from rainband.protocol.vectors import ANSWERED, GRADIENT, PARAMS, Operation, fill, validate_push_id

if TYPE_CHECKING:
    from rainband.server.block import Block


class CommandExecutor:
    """What one server remembers of its commands and of the evaluation at hand."""

    def __init__(self, room: int) -> None:
        self.room = room  # for so many vectors beside the parameters
        self.names = {PARAMS}
        self.last: Answer | None = None
        self.done: Command | None = None  # what it answers
        self.term = 0
        self.version = 0  # of every block: one for each command that changes the parameters or begins an evaluation
        self.work_items = 0  # of the evaluation at hand
        self.complete = 0  # of these, on every block
        self.losses: dict[int, tuple[float, int]] = {}  # cell -> loss and samples, counted with the first block

    # ---- commands --------------------------------------------------------------------------------------------------

    def command(self, command: Command, blocks: Sequence[Block]) -> list[Message]:
        """Do a command, unless it was done; returns what to tell the coordinator."""
        if command.term < self.term:
            return [self._refused(command, f"term {command.term} is over, this is term {self.term}")]
        number = 0 if self.last is None else self.last.number
        if command.number == number:
            return self._again(command)
        if command.number < number and command.term == self.term:
            return []  # it was answered, and the answer has come: there is a newer one
        if command.number != number + 1:
            return [self._refused(command, f"command {command.number} came when {number + 1} was expected")]
        operations = (*command.operations, *((fill(GRADIENT, 0.0),) if command.work_items else ()))
        if wrong := validate_push_id(operations, self.names, self.room):
            return [self._refused(command, wrong)]
        self.term = command.term
        results = self._do(operations, bool(command.work_items), blocks)
        if command.work_items:
            self._begin(command.work_items, blocks)
        self.last, self.done = Answer(command.term, command.number, results, self.version), command
        return [self.last, *(self.evaluated() if command.work_items else ())]

    def _again(self, command: Command) -> list[Message]:
        """What was done is answered the same; to a new coordinator, which does not know the answer, under its term."""
        assert self.last is not None and self.done is not None
        if (command.operations, command.work_items) != (self.done.operations, self.done.work_items):
            return [self._refused(command, f"another command {command.number} was done")]
        self.term = command.term
        self.last = msgspec.structs.replace(self.last, term=command.term)
        return [self.last, *(self.evaluated() if command.work_items else ())]

    def _refused(self, command: Command, why: str) -> Answer:
        return Answer(command.term, command.number, (), self.version, why)

    def _do(self, operations: Sequence[Operation], begins: bool, blocks: Sequence[Block]) -> tuple[float, ...]:
        """The numbers of every block are added up in the order of the blocks, so that they are the same each time."""
        totals = [0.0 for operation in operations if operation.kind in ANSWERED]
        renewed = begins or any(operation.writes_params for operation in operations)
        for block in blocks:
            for at, number in enumerate(block.compute(operations, renewed)):
                totals[at] += number
        self.version += renewed
        for operation in operations:
            if operation.kind == "drop":
                self.names.discard(operation.target)
            else:
                self.names.add(operation.target)
        return tuple(totals)

    # ---- evaluations -----------------------------------------------------------------------------------------------

    def _begin(self, work_items: int, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.begin_evaluation()
        self.work_items, self.losses = work_items, {}
        self.complete = 0 if blocks else work_items

    def took(self, push: Push) -> None:
        """The first block has taken a cell: with it comes the loss."""
        self.losses[push.push_id[0].portion] = math.nan if push.skip else push.loss, push.samples

    def evaluated(self) -> list[Message]:
        """If every block has every cell: the loss, summed in the order of the cells."""
        if not self.work_items or self.complete < self.work_items:
            return []
        ordered = [self.losses[work_item] for work_item in sorted(self.losses)]
        finite = all(math.isfinite(loss) for loss, _ in ordered)
        loss = math.fsum(loss * samples for loss, samples in ordered) if finite else math.nan
        return [Evaluated(self.version, loss, sum(samples for _, samples in ordered))]
