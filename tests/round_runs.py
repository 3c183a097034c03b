"""Members of split-batch rounds, stepped in one thread in any order, with kills, exclusions, restarts and skips.

The parameter is a vector with one number per sample, and the gradient of a sample is a unit vector: so the parameter
counts how often each sample has been applied, and every error in an average, a cut or a state shows in it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rainband.errors import StateLost
from rainband.rounds.board import LocalBoard, SharedMemory
from rainband.rounds.current_round import CurrentRound
from rainband.rounds.member import RoundMember
from rainband.rounds.membership import RoundMembership

Waits = Generator[Any, None, None]


class Plan(NamedTuple):
    """A run: the batches of an epoch, and what goes wrong in the script itself."""

    num_workers: int
    batches: tuple[int, ...] = (4, 4)  # samples of each batch
    epochs: int = 1
    skips: frozenset[tuple[int, int]] = frozenset()  # (rank, serial number of the round)
    double: bool = False  # two backward passes a round; the second one has no samples of its own
    breaks: frozenset[tuple[int, int]] = frozenset()  # (rank, epoch): leaves it before its last batch
    pauses: frozenset[tuple[int, int]] = frozenset()  # (rank, serial number of the round)

    @property
    def num_samples(self) -> int:
        return sum(self.batches)

    def batch(self, number: int) -> list[int] | None:
        if number >= len(self.batches):
            return None
        start = sum(self.batches[:number])
        return list(range(start, start + self.batches[number]))


class Script:
    """A worker's training script."""

    def __init__(self, plan: Plan, memory: SharedMemory, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.counts = torch.zeros(plan.num_samples, dtype=torch.float64)
        self.second = 0.0
        self.has_paused = False
        self.member = RoundMember(LocalBoard(memory, rank), self, lambda: 0.0, equal_parts=True)
        self.log: list[tuple[Any, ...]] = []
        self.waits = self.run()

    def collect(self) -> Any:
        return {"counts": self.counts, "second": self.second}

    def apply(self, state: Any) -> None:
        self.counts, self.second = state["counts"].clone(), state["second"]

    def fingerprint(self) -> int:
        return 1 + int(self.counts.sum())

    def has_changed(self) -> bool:
        return False

    def run(self) -> Waits:
        member, plan = self.member, self.plan
        for epoch in range(plan.epochs):
            while True:
                where = yield from member.begin(epoch)
                if where.epoch > epoch:
                    break
                view = member.view
                self.log.append(
                    (
                        tuple(where),
                        member.view.key(),
                        member.count,
                        tuple(self.counts.tolist()),
                        self.second,
                    )
                )
                if (self.rank, epoch) in plan.breaks and where.batch == len(plan.batches) - 1:
                    break
                if (self.rank, view.serial) in plan.pauses and not self.has_paused:
                    self.has_paused = True
                    yield from member.pause()
                    continue
                part = member.cut(plan.batch(where.batch))
                if part.is_over:
                    break
                if (self.rank, view.serial) in plan.skips:
                    member.round.kind, member.round.reason = "skip", "not finite"
                    continue
                yield from self.step(part.samples)
        yield from member.leave()

    def step(self, samples: Sequence[int]) -> Waits:
        gradient = torch.zeros_like(self.counts)
        gradient[list(samples)] = 1.0 / len(samples)
        tensors: list[Tensor | None] = [gradient]
        outcome = yield from self.member.mean(tensors, None, (), (1.0,))
        self.counts += gradient * outcome.weight
        if self.plan.double:
            again: list[Tensor | None] = [torch.full_like(self.counts, 3.0)]
            outcome = yield from self.member.mean(again, 1.0, (), ())
            assert again[0] is not None
            self.second += float(again[0][0])
        self.member.stepped()


class RoundRun:
    """All members of a run, and what is waiting to happen to them."""

    def __init__(self, plan: Plan, kills: int = 0, fences: int = 0, restarts: int = 0) -> None:
        self.plan = plan
        self.memory = SharedMemory(plan.num_workers, [torch.zeros(plan.num_samples, dtype=torch.float64)])
        self.scripts = [Script(plan, self.memory, rank) for rank in range(plan.num_workers)]
        self.until: list[Callable[[], bool] | None] = [None] * plan.num_workers
        self.alive = [True] * plan.num_workers  # False: killed, or at its end
        self.dead: set[int] = set()  # killed, and not yet excluded
        self.over: set[int] = set()
        self.lost: set[int] = set()  # found the state lost
        self.kills, self.fences, self.restarts = kills, fences, restarts

    def actions(self) -> list[tuple[str, int]]:
        """Return what can happen next."""
        found = [("step", r) for r, alive in enumerate(self.alive) if alive and self.ready(r)]
        found += [("exclude", r) for r in sorted(self.dead)]
        if self.kills:
            found += [("kill", r) for r, alive in enumerate(self.alive) if alive]
        if self.fences:
            words = self.memory.words
            found += [("fence", r) for r, alive in enumerate(self.alive) if alive and words[r].excluded < words[r].life]
        if self.restarts:
            gone = [r for r, alive in enumerate(self.alive) if not alive and r not in self.dead | self.over | self.lost]
            found += [("restart", r) for r in gone]
        return found

    def ready(self, rank: int) -> bool:
        until = self.until[rank]
        return until is None or until()

    def do(self, action: tuple[str, int]) -> None:
        what, rank = action
        match what:
            case "step":
                self.step(rank)
            case "kill":
                self.kills -= 1
                self.alive[rank] = False
                self.dead.add(rank)
            case "exclude":
                self.dead.discard(rank)
                self.memory.exclude(rank)
            case "fence":
                self.fences -= 1
                self.memory.exclude(rank)
            case "restart":
                self.restarts -= 1
                self.scripts[rank] = Script(self.plan, self.memory, rank)
                self.until[rank] = None
                self.alive[rank] = True

    def step(self, rank: int) -> None:
        try:
            self.until[rank] = next(self.scripts[rank].waits)
        except StopIteration:
            self.alive[rank] = False
            self.over.add(rank)
        except StateLost:
            self.alive[rank] = False
            self.lost.add(rank)
            self.memory.exclude(rank)

    def check(self) -> None:
        """Raise AssertionError if members disagree, a sample counts twice, or nobody can go on."""
        seen: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        for script in self.scripts:
            for where, key, count, counts, second in script.log[-2:]:
                agreed = seen.setdefault((where, key, count), (counts, second))
                assert agreed == (counts, second), f"parameters differ at {where}: {agreed} and {(counts, second)}"
                assert max(counts) <= self.plan.epochs, f"a sample was applied twice: {counts}"
        self.check_members()
        if not self.actions():
            stuck = [rank for rank, alive in enumerate(self.alive) if alive]
            assert not stuck, f"workers {stuck} wait forever"
            self.check_end()

    def check_members(self) -> None:
        """Check that members which are in the same round know each other."""
        words = self.memory.words
        here = [s.member for s in self.scripts if s.member.is_in and words[s.rank].excluded < s.member.membership.life]
        for member in here:
            for other in here:
                if member.view.where == other.view.where:
                    assert member.view.members == other.view.members, "two groups train by themselves"

    def check_end(self) -> None:
        """Check the account of samples of those that came to the end."""
        for rank in self.over:
            script = self.scripts[rank]
            view, total = script.member.view, script.counts.sum().item()
            assert view.applied == total, f"{view.applied} samples are reported as applied, {total} were"
            left = len(view.carried) + sum(len(samples) for _, samples in view.deferred)
            done = view.applied + sum(number for _, number in view.skipped) + view.not_seen + left
            if not self.plan.breaks:
                expected = self.plan.epochs * self.plan.num_samples
                assert done == expected, f"{done} samples of {expected} are accounted for: {view}"

    def digest(self) -> tuple[Any, ...]:
        """Return what the future depends on, for comparison."""
        members = [
            (_frames(script.waits), _plain(vars(script.member)), script.counts.tolist(), self.alive[rank])
            for rank, script in enumerate(self.scripts)
        ]
        words = [_plain(vars(words)) for words in self.memory.words]
        return (repr((members, words, sorted(self.dead), self.kills, self.fences, self.restarts)),)


def _frames(waits: Any) -> list[Any]:
    found = []
    while waits is not None and hasattr(waits, "gi_frame"):
        frame: FrameType | None = waits.gi_frame
        if frame is None:
            break
        found.append((frame.f_code.co_name, frame.f_lasti, _plain(frame.f_locals)))
        waits = waits.gi_yieldfrom
    return found


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    left_out = ("self", "board", "holder", "clock", "member", "handover", "joining", "plan", "memory", "script")
    return {
        name: _plain(vars(value)) if isinstance(value, RoundMembership | CurrentRound) else repr(value)
        for name, value in values.items()
        if name not in left_out and not callable(value)
    }


def replay(plan: Plan, path: Sequence[tuple[str, int]], **events: int) -> RoundRun:
    """Return a run after these actions."""
    run = RoundRun(plan, **events)
    for action in path:
        run.do(action)
    return run


def explore(plan: Plan, limit: int = 1_000_000, **events: int) -> int:
    """Visit all states that a run can reach, check each, and return their number."""
    seen: set[int] = set()
    stack: list[tuple[tuple[str, int], ...]] = [()]
    while stack:
        path = stack.pop()
        run = replay(plan, path, **events)
        while True:
            digest = hash(run.digest())
            if digest in seen:
                break
            seen.add(digest)
            assert len(seen) <= limit, f"more than {limit} states"
            try:
                run.check()
                actions = run.actions()
                if not actions:
                    break
                stack.extend((*path, action) for action in actions[1:])
                path = (*path, actions[0])
                run.do(actions[0])
            except AssertionError as error:
                raise AssertionError(f"{error}, after {path}") from None
    return len(seen)
