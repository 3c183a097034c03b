"""One round, as far as a member has come: its part of the samples, and what the exchanges have shown."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rainband.rounds.cut import MIN_SAMPLES, by_member, cut_each, digest_of, each_twice, part_sizes
from rainband.rounds.exchange import Part
from rainband.rounds.membership import Headers
from rainband.rounds.view import Kind, RoundDecision, RoundView, accounted, next_view, up_to_date


class CurrentRound:
    """The open round of one member."""

    def __init__(self, rank: int, whole_batches: bool) -> None:
        self.rank = rank
        self.whole_batches = whole_batches
        self.num_exchanges = 0
        self.is_cut = False
        self.digest = 0  # of the samples
        self.samples: Sequence[int] = ()  # of the round, over all members
        self.part = Part(())
        self.parts: dict[int, Sequence[int]] = {}  # by rank, with whole batches: positions of samples in the round
        self.missing: tuple[int, ...] = ()  # positions that the last exchange lacks, and the next one averages
        self.first: Headers = {}  # of the round's first exchange
        self.averaged: Headers = {}  # of the first one with tensors
        self.closed: Headers = {}  # of the last one, in a round without tensors
        self.last: Headers = {}  # of the last exchange
        self.has_published = self.has_averaged = False  # tensors
        self.kind: Kind = "skip"  # of a round without an exchange
        self.reason = ""
        self.began_at = 0.0
        self.num_before = 0  # exchanges of statistics before the first one of gradients

    # ---- parts -----------------------------------------------------------------------------------------------------

    def cut(self, view: RoundView, batch: Sequence[int] | None, lengths: Sequence[int] = (), digest: int = 0) -> Part:
        """Return this member's part of the round's samples."""
        carried = () if self.whole_batches else view.carried
        if batch is None and not carried:
            return Part((), is_over=True)
        self.samples = [*carried, *(batch or ())] if carried else batch or ()
        self.is_cut = True
        self.digest = digest_of(self.samples, digest)
        ranks = [member.rank for member in view.members]
        sizes = view.sizes(len(self.samples))
        mine = ranks.index(self.rank)
        rows = cut_each([lengths[0] + len(carried), *lengths[1:]], sizes) if lengths else []
        self.samples = by_member(self.samples, rows) if rows else self.samples
        first, size, total = sum(sizes[:mine]), sizes[mine], len(self.samples)
        part = self.samples[first : first + size] if size else self.samples[:MIN_SAMPLES]
        part_of_all = Part(part, first, size, total, batch_sizes=tuple(row[mine] for row in rows))
        self.part = self._on_trial(view, part_of_all, lengths)
        self.divide(view)
        return self.part

    def divide(self, view: RoundView) -> None:
        """Note whose part each sample of the round is, if none may be left out."""
        if self.whole_batches:
            self.parts, first = {}, 0
            for member, size in zip(view.members, view.sizes(len(self.samples)), strict=True):
                self.parts[member.rank] = range(first, first + size)
                first += size
        self.missing = ()

    def divide_missing(self, headers: Headers) -> None:
        """Divide what an exchange lacks among the members that took part in it, for the next one.

        Without whole batches, or if no member contributed, nothing is missing.
        """
        if not self.whole_batches:
            return
        good = up_to_date(headers)
        given = {rank for rank in good if headers[rank].kind == "mean"}
        lacking = [at for rank, part in self.parts.items() if rank not in given for at in part] if given else []
        self.missing = tuple(sorted(lacking))
        self.parts, first = {}, 0
        ranks = sorted(given)
        for rank, size in zip(ranks, part_sizes(len(lacking), (1.0,) * len(ranks)), strict=True):
            self.parts[rank] = self.missing[first : first + size]
            first += size

    def own_missing(self) -> Sequence[int]:
        """Return the positions, among the missing ones, that this member is to compute."""
        return self.parts.get(self.rank, ())

    def _on_trial(self, view: RoundView, part: Part, lengths: Sequence[int]) -> Part:
        """Return the part of one of the first rounds, which show how one process would train."""
        if view.serial == view.trial > 0:
            return part._replace(trial="verdict")
        if view.serial >= view.trial or len(view.members) == 1:
            return part
        if self.rank == view.longest_serving:
            return part._replace(trial="whole")
        second = next(m.rank for m in view.members if m.rank != view.longest_serving)
        if view.serial == 0 and self.rank == second:
            twice = each_twice(self.samples, lengths)
            return part._replace(samples=twice, trial="doubled", batch_sizes=tuple(2 * n for n in lengths))
        return part._replace(trial="idle")

    # ---- exchanges -------------------------------------------------------------------------------------------------

    def waited_for_statistics(self, seconds: float) -> None:
        """Note an exchange of statistics: its time is not that of this member's computing."""
        self.began_at += seconds
        self.num_before = self.num_exchanges

    def note(self, headers: Headers) -> None:
        """Note what the members have published in an exchange."""
        if self.num_exchanges == 1:
            self.first = headers
        if not self.averaged and any(header.kind == "mean" for header in headers.values()):
            self.averaged = headers

    def decide(self, view: RoundView, equal_parts: bool) -> RoundDecision:
        """Return what follows from the exchanges: the next view, and the members that receive the state."""
        samples: Sequence[int] = () if self.whole_batches else self.samples  # the loop counts whole batches itself
        counted = accounted(self.first, self.averaged, self.closed, self.has_averaged)
        return next_view(view, self.first, counted, samples, equal_parts)

    def view_after(self, view: RoundView, equal_parts: bool) -> RoundView:
        """Return the view after this round, as far as this member knows."""
        if self.first:
            return self.decide(view, equal_parts).view
        if not self.num_exchanges and not self.is_cut:
            return view
        again = () if self.whole_batches else (*(self.samples or view.carried),)
        return msgspec.structs.replace(view, batch=view.batch + 1, carried=again)  # its positions are used up
