"""The commands of the coordinator in a full-batch run, each executed once, and the sums of evaluations.

Commands are numbered by (the coordinator's term, n), and n continues from term to term. A repeated command gets the
same answer again, also from a restarted coordinator; a command out of order, or from a replaced coordinator, changes
nothing.
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
    """Executes commands on one server, and keeps the last answers and the losses of the current evaluation."""

    def __init__(self, room: int) -> None:
        self.room = room  # vectors that fit beside the parameters
        self.names = {PARAMS}
        self.last: Answer | None = None
        self.done: Command | None = None  # what it answers
        self.term = 0
        self.version = 0  # of every block: one for each command that changes the parameters or begins an evaluation
        self.work_items = 0  # of the evaluation at hand
        self.complete = 0  # of these, on every block
        self.losses: dict[int, tuple[float, int]] = {}  # work item -> loss and samples, counted at the first block

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
        """Repeat the answer to a command that was executed, under the term of the coordinator that asks."""
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
        """Keep the loss of a work item that the first block has accepted."""
        self.losses[push.push_id[0].portion] = math.nan if push.skip else push.loss, push.samples

    def evaluated(self) -> list[Message]:
        """Report the loss, summed in the order of work items, when every block has every work item."""
        if not self.work_items or self.complete < self.work_items:
            return []
        ordered = [self.losses[work_item] for work_item in sorted(self.losses)]
        finite = all(math.isfinite(loss) for loss, _ in ordered)
        loss = math.fsum(loss * samples for loss, samples in ordered) if finite else math.nan
        return [Evaluated(self.version, loss, sum(samples for _, samples in ordered))]
