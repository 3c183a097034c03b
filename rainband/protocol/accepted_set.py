"""Accepted sets: which batches a block has accepted, so that none is applied twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

from rainband.protocol.data_plan import DataPlan, PushId, bits


class AcceptedSet:
    """The set of batches a block has accepted: compacted, never forgotten.

    Every portion below `first_open` is complete; each open one has a mask, so the size is that of the open portions.
    """

    def __init__(self, plan: DataPlan) -> None:
        self.plan = plan
        self.first_open = 0
        self.open: dict[int, int] = {}
        self.count = 0
        self._compact()

    @classmethod
    def of_portions(cls, plan: DataPlan, first_open: int, masks: Mapping[int, int]) -> AcceptedSet:
        """Return the set with all portions below `first_open`, and these batches of later ones."""
        accepted = cls(plan)
        accepted.open = {portion: mask & plan.full(portion) for portion, mask in masks.items() if mask}
        accepted.first_open = min(first_open, plan.num_portions)
        accepted.count = plan.batches_below(accepted.first_open)
        accepted.count += sum(mask.bit_count() for mask in accepted.open.values())
        accepted._compact()
        return accepted

    def of(self, portion: int) -> int:
        """Return the mask of one portion."""
        return self.plan.full(portion) if portion < self.first_open else self.open.get(portion, 0)

    def has_all(self, name: PushId) -> bool:
        for r in name:
            accepted = self.open.get(r.portion, 0) if r.portion >= self.first_open else -1
            if ((1 << r.last) - (1 << r.first)) & ~accepted:
                return False
        return True

    def has_some(self, name: PushId) -> bool:
        for r in name:
            accepted = self.open.get(r.portion, 0) if r.portion >= self.first_open else -1
            if ((1 << r.last) - (1 << r.first)) & accepted:
                return True
        return False

    def is_full(self, portion: int) -> bool:
        return self.of(portion) == self.plan.full(portion)

    def add(self, name: PushId) -> list[int]:
        """Add these batches; return the portions that are complete because of it."""
        completed = []
        for r in name:
            portion = r.portion
            if portion < self.first_open:
                continue
            accepted = self.open.get(portion, 0)
            now = accepted | (1 << r.last) - (1 << r.first)
            if now == accepted:
                continue
            self.count += now.bit_count() - accepted.bit_count()
            self.open[portion] = now
            if now == self.plan.full(portion):
                completed.append(portion)
        if completed:
            self._compact()
        return completed

    def remove(self, name: PushId) -> None:
        """Remove batches that were accepted: they are to be computed again."""
        for r in name:
            for portion in range(r.portion, self.first_open):  # these were complete until now
                self.open[portion] = self.plan.full(portion)
            self.first_open = min(self.first_open, r.portion)
            before = self.open.get(r.portion, 0)
            self.open[r.portion] = before & ~r.mask
            self.count -= (before & r.mask).bit_count()
        self.open = {portion: mask for portion, mask in self.open.items() if mask}
        self._compact()

    def _compact(self) -> None:
        while self.first_open < self.plan.num_portions and self.open.get(self.first_open, 0) == self.plan.full(
            self.first_open
        ):
            self.open.pop(self.first_open, None)
            self.first_open += 1


def groups(full: int, masks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Group the batches that some block lacks by which blocks have them.

    A push never mixes two groups, so each block has either all of it or none.
    """
    patterns: dict[tuple[int, ...], list[int]] = {}
    distinct = sorted(set(masks))  # blocks with equal masks are one case
    for k in bits(full):
        pattern = tuple(mask >> k & 1 for mask in distinct)
        if not all(pattern):
            patterns.setdefault(pattern, []).append(k)
    return tuple(tuple(batches) for batches in sorted(patterns.values()))


def partly(missing: Sequence[Sequence[int]], masks: Sequence[int]) -> tuple[int, ...]:
    """Return the missing batches that some block has accepted."""
    accepted = reduce(or_, masks, 0)
    return tuple(k for batches in missing for k in batches if accepted >> k & 1)
