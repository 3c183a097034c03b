"""Commands of the coordinator on one server: each is executed once. Also the loss of the current evaluation.

A command has a term and a number; numbers continue from term to term. A repeated command gets the same answer again,
also from a restarted coordinator. One out of order, or from a coordinator that was replaced, changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from rainband.protocol.messages import Answer, Command, Evaluated, Message, Push
from rainband.protocol.vectors import ANSWERED, GRADIENT, PARAMS, Operation, fill, validate_operations

if TYPE_CHECKING:
    from rainband.protocol.saved_state import SavedCommands
    from rainband.server.block import Block


class CommandExecutor:
    """Executes commands in order, and sums the loss of the current evaluation."""

    def __init__(self, room: int) -> None:
        self.room = room  # vectors that commands may make beside the parameters
        self.names = {PARAMS}
        self.last: Answer | None = None
        self.done: Command | None = None  # the command that `last` answers
        self.term = 0
        self.version = 0  # of every block: one for each command that changes the parameters or begins an evaluation
        self.work_items = 0  # of the current evaluation
        self.complete = 0  # work items that every block has accepted
        self.losses: dict[int, tuple[float, int]] = {}  # work item -> loss and samples, from pushes to the first block

    def command(self, command: Command, blocks: Sequence[Block]) -> list[Message]:
        """Execute a command unless that was done; return the messages for the coordinator."""
        if command.term < self.term:
            return [self._refused(command, f"term {command.term} is over, this is term {self.term}")]
        number = 0 if self.last is None else self.last.number
        if command.number == number:
            return self._again(command, blocks)
        if command.number < number and command.term == self.term:
            return []  # the coordinator has its answer: it has sent a newer command
        if command.number != number + 1:
            return [self._refused(command, f"command {command.number} came when {number + 1} was expected")]
        operations = (*command.operations, *((fill(GRADIENT, 0.0),) if command.work_items else ()))
        if wrong := validate_operations(operations, self.names, self.room):
            return [self._refused(command, wrong)]
        self.term = command.term
        results = self._do(operations, bool(command.work_items), blocks)
        if command.work_items:
            self._begin(command.work_items, blocks)
        self.last, self.done = Answer(command.term, command.number, results, self.version), command
        return [self.last, *(self.evaluated() if command.work_items else ())]

    def _again(self, command: Command, blocks: Sequence[Block]) -> list[Message]:
        """Repeat the answer to a command that was executed, under the term of the coordinator that asks."""
        assert self.last is not None
        if self.done is None:
            return self._begin_again(command, blocks)
        if (command.operations, command.work_items) != (self.done.operations, self.done.work_items):
            return [self._refused(command, f"another command {command.number} was done")]
        self.term = command.term
        self.last = msgspec.structs.replace(self.last, term=command.term)
        return [self.last, *(self.evaluated() if command.work_items else ())]

    def _begin_again(self, command: Command, blocks: Sequence[Block]) -> list[Message]:
        """Answer the last command of a checkpoint, which its blocks have executed, and begin its evaluation."""
        for block in blocks:
            block.compute((fill(GRADIENT, 0.0),), new_version=False)
        self._begin(command.work_items, blocks)
        self.names.add(GRADIENT)
        self.term = command.term
        results = tuple(math.nan for operation in command.operations if operation.kind in ANSWERED)  # never read
        self.last, self.done = Answer(command.term, command.number, results, self.version), command
        return [self.last, *self.evaluated()]

    def restore(self, commands: SavedCommands, blocks: Sequence[Block]) -> None:
        """Continue after the last command of a checkpoint. If it began an evaluation, it begins it again."""
        self.last, self.version = Answer(0, commands.number, (), commands.version), commands.version
        for block in blocks:
            if commands.evaluates:
                block.accounting.forget_evaluation()
            else:
                block.accounting.count_evaluations()
            self.names |= block.parameters.vectors.named.keys()

    def _refused(self, command: Command, why: str) -> Answer:
        return Answer(command.term, command.number, (), self.version, why)

    def _do(self, operations: Sequence[Operation], begins: bool, blocks: Sequence[Block]) -> tuple[float, ...]:
        """Run the operations on all blocks; sum their numbers in block order, so that results are repeatable."""
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

    def _begin(self, work_items: int, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.begin_evaluation()
        self.work_items, self.losses = work_items, {}
        self.complete = 0 if blocks else work_items

    def took(self, push: Push) -> None:
        """Note the loss of a work item that the first block has accepted."""
        self.losses[push.push_id[0].portion] = math.nan if push.skip else push.loss, push.samples

    def evaluated(self) -> list[Message]:
        """Return the loss, summed in the order of the work items, once every block has accepted all of them."""
        if not self.work_items or self.complete < self.work_items:
            return []
        ordered = [self.losses[work_item] for work_item in sorted(self.losses)]
        finite = all(math.isfinite(loss) for loss, _ in ordered)
        loss = math.fsum(loss * samples for loss, samples in ordered) if finite else math.nan
        return [Evaluated(self.version, loss, sum(samples for _, samples in ordered))]
