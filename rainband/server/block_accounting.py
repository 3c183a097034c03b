"""Batch accounting of one block: accepted, applied and skipped batches, and the staleness of its gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rainband.protocol.accepted_set import AcceptedSet
from rainband.protocol.data_plan import DataPlan, PushId, num_batches
from rainband.protocol.messages import Missed, Tally

if TYPE_CHECKING:
    from rainband.protocol.messages import Peer, Push


class BlockAccounting:
    """Counts of one block. Accepted and applied batches are counted apart, so that one can check the other."""

    def __init__(self, plan: DataPlan) -> None:
        self.accepted_set = AcceptedSet(plan)
        self.last_untracked: dict[tuple[int, int], int] = {}  # (worker, incarnation) -> sequence of its last push
        self.applied = 0  # batches whose gradients reached the optimizer
        self.applied_untracked = 0  # pushes without batch IDs that reached the optimizer
        self.skipped: dict[tuple[int, str], int] = {}  # (portion, reason) -> mask of batches
        self.dropped: list[PushId] = []  # by the rule, not yet accepted: see `take_dropped`
        self.staleness: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))  # worker -> missed -> times
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
                self.staleness[push.worker][missed] += 1
                self.num_pushes += 1
                self.total_missed += missed
                if missed > self.max_missed:
                    self.max_missed = missed

    def skip(self, push_id: PushId, reason: str) -> None:
        for r in push_id:
            key = r.portion, reason
            self.skipped[key] = self.skipped.get(key, 0) | r.mask

    def drop(self, push_ids: Sequence[PushId], reason: str) -> None:
        """Skip batches that the rule discards; this reason replaces another one, so that all blocks agree."""
        for push_id in push_ids:
            for r in push_id:
                for key in [key for key in self.skipped if key[0] == r.portion]:
                    self.skipped[key] &= ~r.mask
            self.skip(push_id, reason)
        self.dropped += push_ids

    def take_dropped(self) -> list[PushId]:
        """Return what the rule has dropped since the last call."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def begin_evaluation(self, plan: DataPlan) -> None:
        """Start to accept the same batches again, for the next evaluation."""
        self.accepted_before += self.accepted_set.count
        self.skipped_before += sum(mask.bit_count() for mask in self.skipped.values())
        self.accepted_set, self.skipped = AcceptedSet(plan), {}

    def tally(self, buffered: int) -> Tally:
        skipped = self.skipped_before + sum(mask.bit_count() for mask in self.skipped.values())
        accepted = self.accepted_before + self.accepted_set.count
        return Tally(accepted, self.applied, skipped, buffered, self.applied_untracked)

    def missed(self, block: int) -> Missed:
        return Missed(block, self.num_pushes, self.total_missed, self.max_missed)
