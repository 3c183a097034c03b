"""Workers on threads that share each batch: one runs at a time, until it waits for the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rainband.rounds.exchange import Outcome, Part, RoundId, StateHolder
from rainband.runtimes.training_loop.split.loop import SplitLoop
from rainband.runtimes.training_loop.split.state import LoopState
from rainband.transports.pytrees import as_tensor, incoming, outgoing

LIMIT_S = 60.0  # a deadlock fails the test after this time
Script = Callable[[Callable[..., Any]], nn.Module]


class Killed(BaseException):
    """Ends the thread of a worker that a test kills."""


class Group:
    """The members and what they have contributed."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.members: list[GroupMember] = []  # the one that has served longest first
        self.coming: list[GroupMember] = []
        self.number = 0  # of the open round
        self.where = RoundId(0, -1)
        self.contributions: dict[tuple[int, int], dict[int, tuple[list[Tensor | None], float, Any, Any]]] = {}
        self.carried: list[int] = []
        self.failed: BaseException | None = None
        self.transfers = 0
        self.given: tuple[bytes, memoryview | None, int] = (b"", None, 0)  # the state, as it travels
        self.exchanged: list[int] = []  # tensors that were not None, of each exchange of one member

    def wait(self, until: Callable[[], bool]) -> None:
        self.changed.notify_all()
        while not until():
            if self.failed is not None:
                raise Killed
            if not self.changed.wait(LIMIT_S):
                self.failed = AssertionError("the workers wait for each other")

    def drop(self, member: GroupMember) -> None:
        self.members = [other for other in self.members if other is not member]
        self.coming = [other for other in self.coming if other is not member]
        self.changed.notify_all()


class GroupMember:
    """One member's side of the exchange."""

    def __init__(self, group: Group, rank: int, state: StateHolder, examples: list[Tensor]) -> None:
        self.group = group
        self.rank = rank
        self.state = state
        self.examples = examples
        self.number = 0  # of the round that it has begun
        self.wanted = 0  # the epoch it asks for
        self.k = 0  # exchanges in this round
        self.done = False  # with this round
        self.was_cut = True
        self.steps = 0
        self.behind = False
        self.part = Part((), 0, 0, 0)
        if group.number:
            self.behind = True
            group.coming.append(self)
        else:
            group.members.append(self)

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted(member.rank for member in self.group.members))

    @property
    def is_first(self) -> bool:
        return self.group.members[0] is self

    def begin(self, epoch: int) -> RoundId:
        group = self.group
        self.wanted = epoch
        if self.was_cut:
            if self not in group.members and self not in group.coming:
                self.behind = True
                group.coming.append(self)
            self.number, self.was_cut, self.done = max(self.number, group.number) + 1, False, True
            group.wait(self.ready)
            self._open(self.number)
        if self.behind:
            structure, contents, self.steps = group.given
            self.state.apply(incoming(structure, as_tensor(contents)))
            self.behind = False
            group.transfers += 1
        return group.where

    def ready(self) -> bool:
        return self.group.number >= self.number or all(m.number >= self.number for m in self.group.members)

    def _open(self, number: int) -> None:
        group = self.group
        if group.number >= number:
            self.number = group.number
            return
        group.members += group.coming
        for member in group.coming:
            member.number = number
        group.coming = []
        group.number = number
        epoch = max(m.wanted for m in group.members)
        if epoch > group.where.epoch:
            group.carried = []
        group.where = RoundId(epoch, group.where.batch + 1 if epoch == group.where.epoch else 0)
        most = max(m.steps for m in group.members)
        for member in group.members:
            member.k, member.done = 0, False
            member.behind |= member.steps < most
        group.members.sort(key=lambda m: m.behind)
        if any(member.behind for member in group.members):
            giver = group.members[0]
            ready = outgoing(giver.state.collect())
            group.given = ready.structure, ready.copied(), giver.steps

    def cut(self, batch: Sequence[int] | None) -> Part:
        self.was_cut = True
        samples = list(batch or ())
        if not samples:
            return Part((), is_over=True)
        ranks = self.members
        count = max(1, min(len(ranks), len(samples) // 2))
        position = ranks.index(self.rank)
        weight = 1 if position < count else 0
        position %= count
        first = sum(len(samples[k::count]) for k in range(position))
        size = len(samples[position::count])
        self.part = Part(samples[first : first + size], first, size * weight, len(samples))
        return self.part

    def mean(
        self,
        tensors: list[Tensor | None],
        weight: float | None = None,
        numbers: Sequence[float] = (),
        scalars: Sequence[float] = (),
    ) -> Outcome:
        group = self.group
        if tensors:
            group.exchanged.append(sum(tensor is not None for tensor in tensors))
        key = (self.number, self.k)
        self.k += 1
        weight = float(self.part.weight) if weight is None else weight
        copies = [None if tensor is None else tensor.clone() for tensor in tensors]
        given = group.contributions.setdefault(key, {})
        given[self.rank] = (copies, weight, tuple(numbers), tuple(scalars))
        group.wait(lambda: all(m.rank in given or m.number > key[0] or m.done for m in group.members))
        total = sum(one[1] for one in given.values())
        if not total:
            return Outcome(True)
        order = sorted(given)
        for i in range(len(tensors)):
            parts = [(given[rank][0][i], given[rank][1]) for rank in order]
            if len(parts) == 1 or all(tensor is None for tensor, _ in parts):
                continue
            summed = sum((tensor * w for tensor, w in parts if tensor is not None and w), torch.zeros(()))
            mean = summed / total
            own = tensors[i]
            if own is None:
                tensors[i] = mean.expand(self.examples[i].shape).clone()
            else:
                own.copy_(mean)
        first = next(m.rank for m in group.members if m.rank in given)
        means = tuple(sum(given[rank][3][i] * given[rank][1] for rank in order) / total for i in range(len(scalars)))
        return Outcome(True, total, given[first][2], means)

    def mean_scalars(self, scalars: Sequence[float], weight: float | None = None) -> Outcome:
        return self.mean([], weight, (), scalars)

    def skip(self, reason: str) -> None:
        self.done = True
        self.group.changed.notify_all()

    def defer(self) -> None: ...

    def stepped(self) -> None:
        self.steps += 1

    def pause(self) -> None:
        self.was_cut = True
        self.group.drop(self)

    def leave(self) -> None:
        self.group.drop(self)


def run_group(
    script: Script, workers: int, group: Group | None = None, joins: Sequence[threading.Event] = ()
) -> list[nn.Module]:
    """Run a script on several workers, and return their models; an error of one of them is raised."""
    group = group or Group()
    models: dict[int, nn.Module] = {}
    joined = 0

    def join(model: Any, optimizer: Any, rank: int) -> SplitLoop:
        nonlocal joined
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]

        def make(state: LoopState, examples: list[Tensor]) -> GroupMember:
            return GroupMember(group, rank, state, examples)

        loop = SplitLoop(model, optimizers, make, workers)
        joined += 1
        if rank < workers:
            group.wait(lambda: joined >= workers)
        return loop

    def work(rank: int) -> None:
        if rank >= workers:
            joins[rank - workers].wait(LIMIT_S)
        with group.changed:
            try:
                models[rank] = script(lambda model, optimizer: join(model, optimizer, rank))
            except Killed:
                pass
            except BaseException as error:
                group.failed = group.failed or error
            finally:
                for member in [*group.members, *group.coming]:
                    if member.rank == rank:
                        group.drop(member)
                group.changed.notify_all()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers + len(joins))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if group.failed is not None:
        raise group.failed
    return [models[rank] for rank in sorted(models)]
