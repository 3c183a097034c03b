"""Decisions of a round, as functions of headers that all members read alike.

A `RoundView` is what all members know in common. `next_view` makes that of the next round from the headers of this
one, so members that hold the same view and read the same headers agree without a further message.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from rainband.protocol.accounting import NOT_FINITE
from rainband.rounds.cut import part_sizes
from rainband.rounds.exchange import RoundId

Kind = Literal["mean", "scalars", "skip", "defer", "end"]  # end: of an epoch

FIRST_CUTS, RECUT_ROUNDS = (5, 15), 50  # rounds with the same members after which parts are cut by measured speed
RECUT_CHANGE = 0.1  # and the least relative change of a share that is worth it
FIRST_CHANGE = 0.4  # the same for the first cuts: few rounds tell a slow machine from a fast one, but not noise
DRIFT_ROUNDS = 100  # between two comparisons of the parameters
NO_BACKWARD = "no backward pass"
K_BITS, BATCH_BITS = 16, 28


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A member: its rank, the number of its life (a new one after each exclusion), and since when it takes part."""

    rank: int
    life: int
    since: int = 0  # rounds before it came
    active: bool = True  # False: it has left the epoch that the others are in, and gets no samples


class RoundView(msgspec.Struct, frozen=True, array_like=True):
    """The knowledge that the members of a round have in common."""

    epoch: int
    batch: int
    members: tuple[Member, ...]  # by rank
    serial: int = 0  # rounds so far
    shares: tuple[float, ...] = ()  # of `members`; empty: equal ones
    carried: tuple[int, ...] = ()  # samples to be repeated in the next round
    deferred: tuple[tuple[int, tuple[int, ...]], ...] = ()  # by rank: samples whose gradient waits for a later exchange
    applied: int = 0  # samples, from here on
    carried_over: int = 0
    not_seen: int = 0
    skipped: tuple[tuple[str, int], ...] = ()  # by reason
    transfers: int = 0  # states that members have received
    drifted: int = 0  # of these, because parameters differed
    trial: int = 0  # rounds at the start of the run in which the longest-serving member computes whole batches
    compares: bool = False  # all compare their parameters in this round: the loop of one has changed its own
    batches: int = 0  # rounds that had samples
    giver: int = -1  # the member whose state others have received at the beginning of this round; -1: none
    receivers: tuple[int, ...] = ()  # their ranks

    @property
    def where(self) -> RoundId:
        return RoundId(self.epoch, self.batch)

    @property
    def first(self) -> int:
        """Return the rank of the member that has served longest: it does what one member does for all."""
        return min(self.members, key=lambda member: (member.since, member.rank)).rank

    @property
    def longest_serving(self) -> int:
        """Return the rank of the member that has served longest, of those in this epoch."""
        return min(self.members, key=lambda member: (not member.active, member.since, member.rank)).rank

    @property
    def may_recut(self) -> bool:
        """Return whether the parts of the next round may be cut by measured speed."""
        return self.rounds_together in FIRST_CUTS or self.is_regular_cut

    @property
    def is_regular_cut(self) -> bool:
        """Return whether speeds have been measured for long enough to follow small differences."""
        return self.rounds_together > 0 and self.rounds_together % RECUT_ROUNDS == 0

    @property
    def rounds_together(self) -> int:
        """Return the number of rounds since the members have changed."""
        return self.serial + 1 - max(self.trial, max([member.since for member in self.members]))

    def key(self) -> int:
        """Return a hash; members with different ones have decided differently."""
        return zlib.crc32(_encoder.encode(self))

    def sizes(self, total: int) -> tuple[int, ...]:
        """Return how many samples of a round are each member's."""
        if self.serial < self.trial:
            alone = self.longest_serving
            return tuple([total * (member.rank == alone) for member in self.members])
        shares = self.shares or (1.0,) * len(self.members)
        return part_sizes(total, tuple([share * m.active for share, m in zip(shares, self.members, strict=True)]))


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The words that a member publishes in an exchange, besides its tensors."""

    kind: Kind
    count: int  # exchanges and steps that it took part in; fewer than others: it has missed one
    view: int  # hash of its view
    since: int  # as in `Member`
    weight: float = 0.0
    excluded: tuple[int, ...] = ()  # ranks of members that it knows to be excluded
    joins: tuple[tuple[int, int], ...] = ()  # rank and life of workers that ask to join
    reason: str = ""  # of a skip
    samples: int = 0  # a digest of those of the round; 0: none, or given before
    left_out: int = 0  # samples of earlier rounds whose mean was not finite, and not stepped on
    speed: float = 0.0  # samples/s; 0: not known
    fingerprint: int = 0  # of the parameters; 0: not computed
    present: bytes = b""  # bit mask of tensors with a value
    numbers: tuple[float, ...] = ()
    scalars: tuple[float, ...] = ()
    sources: int = -1  # members whose tensors it reads, without its own; -1: all
    encoded: tuple[int, ...] = ()  # bytes of each tensor with a value, which follow each other; empty: all are as usual
    divisor: float = 0.0  # the tensors were multiplied by weight / divisor; 0: they are as they were


_encoder = msgspec.msgpack.Encoder()


def position(where: RoundId, exchanges: int) -> int:
    """Return a member's position as a number that only grows: the round, and how many of its exchanges are published.

    0 is before all rounds. With 0 exchanges, the member has begun the round.
    """
    return ((where.epoch + 1) << BATCH_BITS | where.batch) << K_BITS | exchanges


def leader_of(headers: Mapping[int, Header]) -> int:
    """Return the longest-serving member among those that have missed nothing."""
    return min(headers, key=lambda rank: (-headers[rank].count, headers[rank].kind == "end", headers[rank].since, rank))


def up_to_date(headers: Mapping[int, Header]) -> set[int]:
    """Return the members that have missed nothing: contributions of the others do not count."""
    if not headers:
        return set()
    one, *others = headers.values()
    if all((h.count, h.view, h.samples) == (one.count, one.view, one.samples) for h in others):
        return set(headers)
    best = headers[leader_of(headers)]
    return {rank for rank, h in headers.items() if has_missed_nothing(h, best) and not has_other_samples(h, best)}


def has_missed_nothing(header: Header, best: Header) -> bool:
    return (header.count, header.view) == (best.count, best.view)


def has_other_samples(header: Header, best: Header) -> bool:
    """Return True if a member has drawn another batch than the one with the best state, and has missed nothing.

    One that has missed a step does not know yet which samples were moved to this round.
    """
    differ = bool(header.samples and best.samples) and header.samples != best.samples
    return differ and has_missed_nothing(header, best)


def has_left(headers: Mapping[int, Header]) -> bool:
    """Return True if a member has ended the epoch while others compute gradients."""
    kinds = {header.kind for header in headers.values()}
    return "end" in kinds and "mean" in kinds


class RoundDecision(NamedTuple):
    """The consequences of a round's headers."""

    view: RoundView
    leader: int  # it gives the state
    receivers: frozenset[int]  # members that receive the state at the beginning of the next round
    joined: frozenset[int]  # of these, those that did not take part in this round


def accounted(
    first: Mapping[int, Header], averaged: Mapping[int, Header], closed: Mapping[int, Header], has_averaged: bool
) -> Mapping[int, Header]:
    """Return the headers that say what became of a round's samples, for a member that has, or lacks, the mean.

    They are those of the first exchange, of the first one with tensors, and of the last one if none had tensors.
    """
    if not averaged:  # numbers may have been exchanged before all said what they do with their parts
        return {rank: closed.get(rank, h) if h.kind == "scalars" else h for rank, h in first.items()}
    if not has_averaged:  # this member's state lacks the mean of the others
        missed = {rank for rank, header in averaged.items() if header.kind == "mean"}
        return {rank: header for rank, header in first.items() if rank not in missed}
    skipped = {rank: header for rank, header in first.items() if header.kind == "skip"}
    return {**skipped, **averaged} if skipped else averaged


def next_view(
    view: RoundView,
    first: Mapping[int, Header],
    accounted: Mapping[int, Header],
    samples: Sequence[int],
    equal_parts: bool = False,
) -> RoundDecision:
    """Return what follows from the headers of a round's first exchange.

    `samples` are those of the round, over all members; `accounted` are the headers that say what became of them.
    """
    usual = _usual(view, first, accounted, samples)
    if usual is not None:
        return usual
    gone = {rank for header in first.values() for rank in header.excluded}
    there = {rank: header for rank, header in first.items() if rank not in gone}
    leader = leader_of(there)
    joins = dict(first[leader].joins)
    stay = [m for m in view.members if m.rank in first and m.rank not in gone and m.rank not in joins]
    serial = view.serial + 1
    active = {rank for rank, header in first.items() if header.kind != "end"}
    epoch_ends = not active
    members = [Member(m.rank, m.life, m.since, epoch_ends or m.rank in active) for m in stay]
    members += [Member(rank, life, serial) for rank, life in joins.items()]
    members.sort(key=lambda member: member.rank)

    good, best = up_to_date(there), there[leader]
    drifted = {
        r for r in good if first[r].fingerprint and best.fingerprint and first[r].fingerprint != best.fingerprint
    }
    missed = {m.rank for m in stay if m.rank not in good and (epoch_ends or m.rank in active)}
    receivers = frozenset(missed | drifted | set(joins))

    counted = _Counted(view)
    if not samples:
        counted.carried = list(view.carried)
    counted.round(view, accounted, samples)
    counted.leave_out(best.left_out)
    counted.forget({m.rank for m in view.members} - {m.rank for m in stay})
    compared = [header.fingerprint for header in first.values() if header.kind != "end"]
    not_seen = view.not_seen
    if epoch_ends:
        not_seen += len(counted.carried)
        counted.carried_over -= len(counted.carried)
        counted.carried = []
    shares = _shares(view, members, first, equal_parts)
    after = RoundView(
        epoch=view.epoch + epoch_ends,
        batch=0 if epoch_ends else view.batch + 1,
        members=tuple(members),
        serial=serial,
        shares=shares,
        carried=tuple(counted.carried),
        deferred=tuple(sorted((r, tuple(s)) for r, s in counted.deferred.items() if s)),
        applied=counted.applied,
        carried_over=counted.carried_over,
        not_seen=not_seen,
        skipped=tuple(sorted(counted.skipped.items())),
        transfers=view.transfers + len(receivers),
        drifted=view.drifted + len(drifted),
        trial=view.trial,
        compares=any(compared) and not all(compared),
        batches=view.batches + bool(samples),
        giver=leader if receivers else -1,
        receivers=tuple(sorted(receivers)),
    )
    return RoundDecision(after, leader, receivers, frozenset(joins))


def _usual(
    view: RoundView, first: Mapping[int, Header], accounted: Mapping[int, Header], samples: Sequence[int]
) -> RoundDecision | None:
    """Return the decision of a round in which nothing happened, sooner; None if something did."""
    if first is not accounted or len(first) != len(view.members) or view.carried or view.deferred:
        return None
    if view.may_recut or not all(member.active for member in view.members):
        return None
    (best, *others) = first.values()
    for h in first.values():
        if h.kind != "mean" or h.excluded or h.joins or h.left_out:
            return None
    for h in others:
        if (h.count, h.view, h.samples, h.fingerprint) != (best.count, best.view, best.samples, best.fingerprint):
            return None
    after = RoundView(
        epoch=view.epoch,
        batch=view.batch + 1,
        members=view.members,
        serial=view.serial + 1,
        shares=view.shares,
        applied=view.applied + len(samples),
        carried_over=view.carried_over,
        not_seen=view.not_seen,
        skipped=view.skipped,
        transfers=view.transfers,
        drifted=view.drifted,
        trial=view.trial,
        batches=view.batches + bool(samples),
    )
    return RoundDecision(after, leader_of(first), frozenset(), frozenset())


class _Counted:
    """The account of samples, while a round is added to it."""

    def __init__(self, view: RoundView) -> None:
        self.applied = view.applied
        self.carried_over = view.carried_over
        self.skipped = dict(view.skipped)
        self.carried: list[int] = []
        self.deferred = {rank: list(samples) for rank, samples in view.deferred}

    def round(self, view: RoundView, headers: Mapping[int, Header], samples: Sequence[int]) -> None:
        """Count each part of a round."""
        good = up_to_date(headers)
        at = 0
        for member, size in zip(view.members, view.sizes(len(samples)), strict=True):
            part, at = samples[at : at + size], at + size
            header = headers.get(member.rank)
            if header is None or member.rank not in good or header.kind == "end":
                self._carry(part)
            elif header.kind == "mean":
                self.applied += len(part) + len(self.deferred.pop(member.rank, ()))
            elif header.kind == "defer":
                self.deferred.setdefault(member.rank, []).extend(part)
            elif part:
                reason = header.reason or NO_BACKWARD
                self.skipped[reason] = self.skipped.get(reason, 0) + len(part)

    def leave_out(self, samples: int) -> None:
        """Count samples of earlier rounds as skipped."""
        if samples := min(samples, self.applied):
            self.applied -= samples
            self.skipped[NOT_FINITE] = self.skipped.get(NOT_FINITE, 0) + samples

    def forget(self, ranks: set[int]) -> None:
        """Repeat what excluded members have computed and never contributed."""
        for rank in sorted(ranks):
            self._carry(self.deferred.pop(rank, []))

    def _carry(self, samples: Sequence[int]) -> None:
        self.carried.extend(samples)
        self.carried_over += len(samples)


def _shares(
    view: RoundView, members: Sequence[Member], headers: Mapping[int, Header], equal_parts: bool
) -> tuple[float, ...]:
    """Return the shares of the next round: as before, or by measured speed."""
    if equal_parts:
        return ()
    speeds = [headers[m.rank].speed if m.rank in headers else 0.0 for m in members]
    if all(speeds) and view.may_recut:
        before = view.shares or (1.0,) * len(members)
        if len(before) != len(members) or _differ(
            before, speeds, RECUT_CHANGE if view.is_regular_cut else FIRST_CHANGE
        ):
            return tuple(speeds)
    if [m.rank for m in members] == [m.rank for m in view.members] or not view.shares:
        return view.shares
    old = dict(zip([m.rank for m in view.members], view.shares, strict=True))
    usual = sorted(old.values())[len(old) // 2]  # of a new member nothing is known yet
    return tuple(old.get(m.rank, usual) for m in members)


def _differ(before: Sequence[float], now: Sequence[float], change: float) -> bool:
    scale = sum(before) / sum(now)
    return any(abs(speed * scale / share - 1.0) > change for share, speed in zip(before, now, strict=True))


def means(headers: Mapping[int, Header], given: Sequence[int]) -> tuple[float, ...]:
    """Return the weighted means of the scalars."""
    counted = [headers[q] for q in given if headers[q].weight] or [headers[q] for q in given]
    weights = [header.weight or 1.0 for header in counted]
    total, columns = sum(weights), zip(*[header.scalars for header in counted], strict=True)
    return tuple([sum([w * x for w, x in zip(weights, column, strict=True)]) / total for column in columns])
