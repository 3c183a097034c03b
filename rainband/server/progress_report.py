"""Progress of a server: which portions its blocks have accepted completely, and reports of it to the coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rainband.protocol.accounting import worst_limit
from rainband.protocol.data_plan import DataPlan, PushId
from rainband.protocol.messages import Report

if TYPE_CHECKING:
    from rainband.server.block import Block
    from rainband.server.commands import CommandExecutor

REPORTS = 50  # about the number of unrequested reports in a whole run


class ProgressReport:
    """Counts portions that are complete on all blocks, and decides when to report them."""

    def __init__(self, blocks: Mapping[int, Block]) -> None:
        self.blocks = blocks
        self.commands: CommandExecutor | None = None  # of a coordinated run, where portions are work items
        self.complete: Counter[int] = Counter()  # portion -> blocks that have accepted all of it
        self.num_complete = 0  # portions
        self.report_every = 1  # portions
        self.unreported = False  # a portion was completed since the last report
        self.first_open = 0  # every portion below was complete at the last report
        self.refused: Counter[str] = Counter()  # messages, by reason
        self.updates = 0
        self.staleness: dict[int, dict[int, int]] = {}  # worker -> updates missed -> gradients, of all blocks

    def follow(self, plan: DataPlan) -> None:
        """Report every portion in rounds, where other servers may wait for that; otherwise about 50 times per run."""
        self.report_every = 1 if plan.items_per_round else max(1, plan.num_portions // REPORTS)

    def accept(self, block: Block, push_id: PushId) -> None:
        """Note that a block has accepted these batches."""
        for portion in block.accounting.accepted_set.add(push_id):
            self.complete[portion] += 1
            if self.complete[portion] == len(self.blocks):
                self.num_complete += 1
                self.unreported = self.commands is None
                if self.commands is not None:
                    self.commands.complete += 1

    def restored(self) -> None:
        """Count the portions that the blocks have from a checkpoint, and their updates."""
        self.updates = sum(block.version for block in self.blocks.values())
        if self.commands is not None:
            return  # the evaluation begins again
        sets = [block.accounting.accepted_set for block in self.blocks.values()]
        lowest = min((accepted.first_open for accepted in sets), default=0)
        for accepted in sets:
            for portion in (*range(lowest, accepted.first_open), *accepted.open):
                self.complete[portion] += accepted.is_full(portion)
        self.num_complete = lowest + sum(count == len(sets) for count in self.complete.values())

    def accept_dropped(self, block: Block) -> None:
        """Note the batches that a rule has dropped, whether their gradients have arrived or not."""
        for push_id in block.accounting.take_dropped():
            self.accept(block, push_id)

    def is_due(self, block: Block) -> bool:
        """Return True, once, if progress is to be reported now."""
        all_done = block.accounting.accepted_set.first_open == block.plan.num_portions
        if not self.unreported or not (all_done or self.num_complete % self.report_every == 0):
            return False
        self.unreported = False
        return True

    def new_evaluation(self) -> None:
        """Count the same work items again: a command has changed the parameters of all blocks."""
        self.complete.clear()
        self.updates += len(self.blocks)

    def report(self, flushed: bool = False, measured: bool = True) -> Report:
        """Return the accounting of all blocks; `measured`: with measurements, which take longer."""
        blocks = list(self.blocks.values())
        first_open = min((block.accounting.accepted_set.first_open for block in blocks), default=0)
        if first_open != self.first_open:
            self.first_open = first_open
            for portion in [portion for portion in self.complete if portion < first_open]:
                del self.complete[portion]
        skipped: Counter[str] = Counter()
        for block in blocks:
            skipped |= block.accounting.num_skipped
        return Report(
            first_open=first_open,
            full=tuple(sorted([portion for portion, count in self.complete.items() if count == len(blocks)])),
            accepted=min((block.accounting.accepted_set.count for block in blocks), default=0),
            updates=self.updates,
            blocks=tuple(block.tally() for block in blocks),
            skipped=dict(skipped),
            refused=dict(self.refused),
            staleness={worker: dict(counts) for worker, counts in self.staleness.items()} if measured else {},
            flushed=flushed,
            measured=measured,
            missed=tuple(block.accounting.missed(block.index) for block in blocks) if measured else (),
            bound=next((block.rule.bound for block in blocks), None),
            gradients_per_update=next((block.rule.gradients_per_update for block in blocks), None),
            limit=worst_limit(block.rule.limit() for block in blocks) if measured else None,
        )
