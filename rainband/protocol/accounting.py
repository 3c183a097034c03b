"""Batch accounting: what became of every batch, counted in two ways, so that each checks the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import Report, SampleAccount, StalenessLimit

NO_WEIGHT = "without weight"  # why a batch whose samples have no weight, such as no labels, is skipped
NOT_FINITE = "not finite"  # why a batch whose gradient has infinities or NaN is skipped
TOO_FAR = "not finite, at a step that was too long"  # of a line search, which then takes a shorter one


MAX_REASONS, MAX_REASON_LENGTH = 16, 200  # of skipped batches, from one node
OTHER_REASONS = "other reasons"


REPORT_IT = "If the strategy is not yours, please report it, with the run's directory."
DROP_RULES = (
    "An update rule must apply each gradient once with block.apply, or skip its batches with block.drop; until then it "
    f"counts them in `buffered`. {REPORT_IT}"
)
FLUSH_RULES = f"An update rule must apply what it buffers when `flush` is called. {REPORT_IT}"


class SkipReasons:
    """The reasons that one node gives for skipped batches: the first few in full, one text for all others.

    Reasons may name files or samples. Reports list all reasons, so their number must not grow with the run.
    """

    def __init__(self) -> None:
        self.known: set[str] = set()

    def bounded(self, reason: str) -> str:
        """Return the reason to count under."""
        reason = reason[:MAX_REASON_LENGTH]
        if reason in self.known or len(self.known) < MAX_REASONS:
            self.known.add(reason)
            return reason
        return OTHER_REASONS


class Staleness(msgspec.Struct, frozen=True):
    """Staleness: the number of updates a gradient had missed when it was applied."""

    mean: float
    max: int
    histogram: dict[int, int]
    per_worker_mean: dict[int, float]
    per_block: dict[int, BlockStaleness] = {}
    bound: float | None = None  # the rule's bound, in its own unit; none: unbounded
    unit: str = ""
    largest: float = 0.0  # the largest staleness of a reader, in that unit
    exceeded: int = 0  # gradients whose readers exceeded the bound
    waited_for: dict[int, dict[int, float]] = {}  # worker -> the worker it waited for -> seconds

    @property
    def broken(self) -> str:
        """Return an error message if the bound was exceeded, otherwise ""."""
        if self.bound is None or not self.exceeded:
            return ""
        return (
            f"readers may miss {self.bound:g} {self.unit}, and {self.exceeded} gradients came from readers that "
            f"missed up to {self.largest:g}. Please report it, with the run's directory."
        )


class BlockStaleness(msgspec.Struct, frozen=True):
    """Staleness of the gradients of one block."""

    mean: float
    max: int


class BatchAccounting(msgspec.Struct, frozen=True):
    """Every batch ends as applied or as skipped with a reason, exactly once on every block."""

    batches: int  # in the plan
    applied: int  # on every block
    skipped: dict[str, int]  # reason -> batches
    lost: int  # accepted by a block, yet neither applied nor skipped there; the worst block
    applied_twice: int  # applied more often than accepted; the worst block
    not_processed: int  # when the run ended
    reassigned: int  # portions revoked and given to another worker
    refused: dict[str, int]  # pushes refused, by reason
    updates: int  # applied to blocks, all together
    untracked_pushes: int = (
        0  # pushes named by their sender, not by batches: a step without a new batch, a custom data loader
    )
    partially_applied: int = (
        0  # pushes without a name, or writes in place, that are only partly in: their sender ended in between
    )
    lock_free: bool = False  # steps were added to one memory without locks: if some overwrote others is not known
    in_pairs: bool = False  # steps were added to models in shared memory, each under its lock
    samples: SampleAccount | None = None  # where workers share each batch; then batches are not counted
    buffered: int = 0  # accepted by a block, and still kept there by its update rule; the worst block
    lost_residuals: tuple[float, ...] = ()  # of each lost worker, the norm of what its codec had not sent

    @property
    def balanced(self) -> bool:
        return not self.lost and not self.applied_twice

    @property
    def broken(self) -> str:
        """Return an error message if the accounting of a run that is over does not balance, otherwise "".

        In shared memory it need not balance: a worker may write an update while its lease is revoked.
        """
        if self.lock_free or self.in_pairs:
            return ""
        if self.lost:
            return f"{self.lost} of {self.batches} batches were accepted, but neither applied nor skipped. {DROP_RULES}"
        if self.applied_twice:
            return f"{self.applied_twice} of {self.batches} batches were applied more than once. {DROP_RULES}"
        if self.buffered and self.not_processed <= self.buffered:  # otherwise a round is not complete
            return f"{self.buffered} of {self.batches} batches are still buffered. {FLUSH_RULES}"
        return ""


def worst_limit(limits: Iterable[StalenessLimit | None]) -> StalenessLimit | None:
    """Combine limits: the largest staleness on any block, and how many gradients exceeded the bound."""
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    worst = max(known, key=lambda limit: (limit.largest - limit.bound, limit.largest))
    return StalenessLimit(worst.bound, worst.unit, worst.largest, sum(limit.exceeded for limit in known))


def merge(into: dict[int, dict[int, int]], counted: Mapping[int, Mapping[int, int]]) -> None:
    """Add histograms of staleness, by worker."""
    for worker, histogram in counted.items():
        known = into.get(worker)
        if known is None:
            into[worker] = dict(histogram)
            continue
        for missed, times in histogram.items():
            known[missed] = known.get(missed, 0) + times


def staleness_of(reports: Iterable[Report]) -> Staleness:
    reports = list(reports)
    per_worker: dict[int, dict[int, int]] = {}
    for report in reports:
        merge(per_worker, report.staleness)
    total: dict[int, int] = {}
    for counts in per_worker.values():
        for missed, times in counts.items():
            total[missed] = total.get(missed, 0) + times
    return Staleness(
        mean=_mean(total),
        max=max(total, default=0),
        histogram=dict(sorted(total.items())),
        per_worker_mean={worker: _mean(counts) for worker, counts in sorted(per_worker.items())},
        per_block=_per_block(reports),
        **_promise(worst_limit(report.limit for report in reports)),
    )


def staleness_so_far(reports: Iterable[Report]) -> Staleness:
    """Return the staleness without histograms, which take long with thousands of workers."""
    reports = list(reports)
    blocks = [missed for report in reports for missed in report.missed]
    pushes = sum(missed.pushes for missed in blocks)
    return Staleness(
        mean=sum(missed.total for missed in blocks) / pushes if pushes else 0.0,
        max=max((missed.most for missed in blocks), default=0),
        histogram={},
        per_worker_mean={},
        **_promise(worst_limit(report.limit for report in reports)),
    )


def _per_block(reports: Iterable[Report]) -> dict[int, BlockStaleness]:
    blocks = sorted((missed for report in reports for missed in report.missed), key=lambda missed: missed.block)
    return {m.block: BlockStaleness(m.total / m.pushes if m.pushes else 0.0, m.most) for m in blocks}


def _promise(limit: StalenessLimit | None) -> dict[str, Any]:
    return {} if limit is None else msgspec.structs.asdict(limit)


def _mean(counts: Mapping[int, int]) -> float:
    number = sum(counts.values())
    return sum([value * times for value, times in counts.items()]) / number if number else 0.0


def balance(plan: DataPlan, reports: Iterable[Report], reassigned: int) -> BatchAccounting:
    """Add up the reports of all servers."""
    reports = list(reports)
    blocks = [tally for report in reports for tally in report.blocks]
    unexplained = [tally.accepted - tally.applied - tally.skipped - tally.buffered for tally in blocks]
    refused: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for report in reports:
        refused.update(report.refused)
        skipped |= Counter(report.skipped)  # of each reason the maximum: every block skips the same batches
    applied = min((tally.applied for tally in blocks), default=0)
    lost = max(0, *unexplained, 0)
    untracked_pushes = [tally.untracked_pushes for tally in blocks] or [0]
    return BatchAccounting(
        batches=plan.num_batches,
        applied=applied,
        skipped=dict(skipped),
        lost=lost,
        applied_twice=max(0, *(-n for n in unexplained), 0),
        not_processed=max(0, plan.num_batches - applied - sum(skipped.values()) - lost),
        reassigned=reassigned,
        refused=dict(refused),
        updates=sum(r.updates for r in reports),
        untracked_pushes=min(untracked_pushes),
        partially_applied=max(untracked_pushes) - min(untracked_pushes) + sum(r.cut_short for r in reports),
        lock_free=any(r.lock_free for r in reports),
        in_pairs=any(r.in_pairs for r in reports),
        buffered=max((tally.buffered for tally in blocks), default=0),
    )


def balance_shared(account: SampleAccount) -> BatchAccounting:
    """Return the accounting of a loop whose workers share each batch."""
    return BatchAccounting(0, 0, {}, 0, 0, 0, 0, {}, 0, samples=account)


def balance_led(accounting: BatchAccounting, reports: Iterable[Report], batches: int) -> BatchAccounting:
    """Return the accounting of a full-batch run; `batches` is their number in all evaluations together."""
    tallies = [tally for report in reports for tally in report.blocks]
    skipped = min((tally.skipped for tally in tallies), default=0)
    return msgspec.structs.replace(
        accounting,
        batches=batches,
        skipped={TOO_FAR: skipped} if skipped else {},
        not_processed=max(0, batches - accounting.applied - skipped - accounting.lost),
    )
