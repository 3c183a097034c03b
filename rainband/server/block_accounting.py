"""Batch accounting of one block: accepted, applied and skipped batches, and the staleness of its gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rainband.protocol.accepted_set import AcceptedSet
from rainband.protocol.data_plan import DataPlan, PushId, num_batches
from rainband.protocol.messages import Missed, Tally

if TYPE_CHECKING:
    from rainband.protocol.messages import Peer, Push
    from rainband.protocol.saved_state import SavedBlock


class BlockAccounting:
    """Counts of one block. Accepted and applied batches are counted apart, so that one can check the other."""

    def __init__(self, plan: DataPlan, staleness: dict[int, dict[int, int]] | None = None) -> None:
        """`staleness`: worker -> updates missed -> gradients; the blocks of a server count in one."""
        self.accepted_set = AcceptedSet(plan)
        self.last_untracked: dict[tuple[int, int], int] = {}  # (worker, incarnation) -> sequence of its last push
        self.applied = 0  # batches whose gradients reached the optimizer
        self.applied_untracked = 0  # pushes without batch IDs that reached the optimizer
        self.skipped: dict[tuple[int, str], int] = {}  # (portion, reason) -> mask of batches
        self.num_skipped: Counter[str] = Counter()  # reason -> batches in `skipped`
        self.dropped: list[PushId] = []  # by the rule, not yet accepted: see `take_dropped`
        self.staleness = {} if staleness is None else staleness
        self.num_pushes = self.total_missed = self.max_missed = 0  # of all workers
        self.accepted_before = self.skipped_before = 0  # batches of earlier evaluations

    def has_accepted(self, sender: Peer, push: Push) -> bool:
        if push.push_id:
            return self.accepted_set.has_all(push.push_id)
        return push.sequence <= self.last_untracked.get((sender.index, sender.incarnation), -1)

    def count(self, pushes: Sequence[Push], version: int) -> None:
        """Count pushes whose gradients are applied to this version of the block."""
        for push in pushes:
            if not push.skip:
                self.applied += len(push.push_id[0]) if len(push.push_id) == 1 else num_batches(push.push_id)
                self.applied_untracked += not push.push_id
                missed = version - push.version if version > push.version else 0
                of_worker = self.staleness.setdefault(push.worker, {})
                of_worker[missed] = of_worker.get(missed, 0) + 1
                self.num_pushes += 1
                self.total_missed += missed
                if missed > self.max_missed:
                    self.max_missed = missed

    def skip(self, push_id: PushId, reason: str) -> None:
        for r in push_id:
            self._set(r.portion, reason, self.skipped.get((r.portion, reason), 0) | r.mask)

    def _set(self, portion: int, reason: str, mask: int) -> None:
        before = self.skipped.get((portion, reason), 0)
        self.skipped[portion, reason] = mask
        self.num_skipped[reason] += mask.bit_count() - before.bit_count()

    def drop(self, push_ids: Sequence[PushId], reason: str) -> None:
        """Skip batches that the rule discards; this reason replaces another one, so that all blocks agree."""
        for push_id in push_ids:
            for r in push_id:
                for other in self.num_skipped:  # not all entries of `skipped`: they grow with the run
                    if mask := self.skipped.get((r.portion, other), 0):
                        self._set(r.portion, other, mask & ~r.mask)
            self.skip(push_id, reason)
        self.dropped += push_ids

    def take_dropped(self) -> list[PushId]:
        """Return what the rule has dropped since the last call."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def begin_evaluation(self, plan: DataPlan) -> None:
        """Start to accept the same batches again, for the next evaluation."""
        self.accepted_before += self.accepted_set.count
        self.skipped_before += self.num_skipped.total()
        self.accepted_set, self.skipped, self.num_skipped = AcceptedSet(plan), {}, Counter()

    def tally(self, buffered: int) -> Tally:
        skipped = self.skipped_before + self.num_skipped.total()
        accepted = self.accepted_before + self.accepted_set.count
        return Tally(accepted, self.applied, skipped, buffered, self.applied_untracked)

    def restore(self, saved: SavedBlock) -> None:
        """Continue from a checkpoint: these batches are in the parameters."""
        self.accepted_set = saved.accepted_set(self.accepted_set.plan)
        self.applied, self.applied_untracked = saved.applied, saved.applied_untracked
        for portion, reason, mask in saved.skipped:
            self._set(portion, reason, mask)

    def replan(self, plan: DataPlan) -> None:
        """Continue with a plan of the same portions."""
        accepted = self.accepted_set
        self.accepted_set = AcceptedSet.of_portions(plan, accepted.first_open, accepted.open)

    def forget_evaluation(self) -> None:
        """Begin an evaluation of a checkpoint again: what it had accepted does not count."""
        self.applied -= self.accepted_set.count - self.num_skipped.total()
        self.accepted_before = self.applied
        self.accepted_set, self.skipped, self.num_skipped = AcceptedSet(self.accepted_set.plan), {}, Counter()

    def count_evaluations(self) -> None:
        """Continue after a complete evaluation of a checkpoint."""
        self.accepted_before = self.applied + self.num_skipped.total() - self.accepted_set.count

    def missed(self, block: int) -> Missed:
        return Missed(block, self.num_pushes, self.total_missed, self.max_missed)
