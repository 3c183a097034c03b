"""Random schedules with faults, and the oracle that says whether a run kept its promises.

The task counts: its gradients are whole numbers that do not depend on the parameters, so with plain SGD the final
parameters are known to the last bit. Beside the books, which are the run's own, every batch that reaches a block's
optimizer is counted here, apart from any name that was remembered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

import torch

from rainband.catalogue import load_strategy
from rainband.coordinator import RunSettings
from rainband.errors import Deadlock
from rainband.flat import Flat
from rainband.gradient import ModuleGradient
from rainband.messages import Push
from rainband.server import Server
from rainband.sim.compute import ComputeModel
from rainband.sim.faults import Chances, Script, random_script, shrink
from rainband.sim.model import ClusterModel, NodeModel
from rainband.sim.network import NetworkModel
from rainband.sim.trace import Trace
from rainband.tasks.linear import Linear
from rainband.tasks.task import Data
from rainband.types import Batch
from rainband.worker import ModuleWorker
from rainband.worlds.sim import join_of
from rainband.worlds.sim_body import RealBody
from rainband.worlds.sim_faults import Trouble
from rainband.worlds.sim_memory import Desk
from rainband.worlds.sim_nodes import ServerNode
from rainband.worlds.sim_world import Play, World

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.block import Block

LR = 0.25  # a power of two: every sum of updates is exact
TIMEOUT_S = 1.0
LIMIT_S = 600.0  # of virtual time: a run that takes longer goes round in circles
TASK = Linear(dimension=48, samples=32, batch_size=2, epochs=1)
MODEL = ClusterModel(
    NetworkModel(latency_s=0.002, bytes_per_s=1e8, jitter_s=0.01),
    ComputeModel(kind="exponential", step_s=0.05, slow_workers=(1,), slow_factor=3.0),
    NodeModel(message_s=0.001),
)
STRATEGIES = {
    "downpour": {"optimizer": "sgd", "lr": LR, "n_push": 1},
    "downpour2": {"optimizer": "sgd", "lr": LR, "n_push": 2, "overlap": False},
    "sync": {"optimizer": "sgd", "lr": LR},
}


@dataclass(frozen=True)
class Case:
    """One run with faults."""

    seed: int
    strategy: str
    num_workers: int
    num_servers: int
    script: Script


def random_case(seed: int, strategy: str | None = None) -> Case:
    """Everything about a run follows from its seed."""
    random = Random(f"case {seed}")
    drawn = random.choice(list(STRATEGIES))
    num_workers, num_servers = random.choice((2, 4)), random.choice((1, 2, 3))
    chances = Chances(length_s=1.5, timeout_s=TIMEOUT_S, servers_die=random.random() < 0.1)
    script = random_script(random, num_workers, num_servers, chances)
    return Case(seed, strategy or drawn, num_workers, num_servers, script)


@dataclass
class Verdict:
    """What became of a run."""

    case: Case
    wrong: list[str] = field(default_factory=list)
    outcome: str = ""
    trace: Trace = field(default_factory=Trace)
    seconds: float = 0.0

    @property
    def command(self) -> str:
        """What replays it."""
        return f"rainband simtest {self.case.seed} --strategy {self.case.strategy}"


class Ledger:
    """Counts what reaches the optimizer of each block, independently of marks and books."""

    def __init__(self) -> None:
        self.applied: dict[int, Counter[tuple[int, int]]] = {}  # block -> batch -> times
        self.steps: dict[int, list[frozenset[tuple[int, int]]]] = {}  # block -> what each update was made of

    def watch(self, server: Server) -> None:
        for block in server.blocks.values():
            self.applied[block.spec.index], self.steps[block.spec.index] = Counter(), []
            block.apply = self._counted(block)  # type: ignore[method-assign, assignment]

    def _counted(self, block: Block) -> Callable[[Tensor, Sequence[Push], Collection[int]], None]:
        apply, number = block.apply, block.spec.index

        def counted(gradient: Tensor, pushes: Sequence[Push], absent: Collection[int]) -> None:
            batches = [(r.portion, k) for p in pushes if not p.skip for r in p.name for k in range(r.first, r.last)]
            self.applied[number].update(batches)
            self.steps[number].append(frozenset(batches))
            apply(gradient, pushes, absent)

        return counted


class CountingBody(RealBody):
    """Gradients of this task do not depend on the parameters, so each is computed once for all runs."""

    def __init__(
        self, known: dict[tuple[int, int], Tensor], desk: Desk, task: Linear, data: Data, num_workers: int
    ) -> None:
        super().__init__(desk, task, data, num_workers)
        self.known = known

    def gradient(self, worker: ModuleWorker, batch: Batch) -> ModuleGradient:
        key = worker.plan.seed, worker.plan.number(batch.portion, batch.k)
        if key not in self.known:
            samples = self.data.batch(worker.sampler.indices(batch))
            self.known[key] = samples[0].mean(0, keepdim=True)
        worker.client.stats.steps += 1
        return ModuleGradient([self.known[key].clone()], (batch,), worker.plan.samples_in(batch.portion, batch.k), 0.0)


@lru_cache(maxsize=32)
def _play(strategy: str, num_workers: int) -> Play:
    """Built once; every run gets memory of its own."""
    built = load_strategy(strategy.rstrip("2"), STRATEGIES[strategy])
    data = TASK.data()
    flat = Flat(TASK.model())
    desk = Desk(flat)
    join = join_of(built, flat, "", len(data), TASK.batch_size, TASK.epochs)
    known: dict[tuple[int, int], Tensor] = {}
    return Play(built, join, lambda: CountingBody(known, desk, TASK, data, num_workers), real=True)


def check(case: Case, keep_trace: bool = False) -> Verdict:
    """Run a case and judge it."""
    verdict = Verdict(case, trace=Trace(keep_trace))
    settings = RunSettings(
        num_workers=case.num_workers,
        num_servers=case.num_servers,
        seed=0,  # of the plan: the same batches in every run; all else follows from the case's
        failure_timeout_s=TIMEOUT_S,
    )
    play = _play(case.strategy, case.num_workers)
    shuffle = Random(f"shuffle {case.seed}")
    world = World(play, settings, MODEL, lambda event: None, TIMEOUT_S / 5, verdict.trace, shuffle, seed=case.seed)
    ledger = Ledger()
    trouble = Trouble(world, case.script, case.seed)
    world.start()
    for node in world.servers.values():
        assert isinstance(node, ServerNode)
        node.assigned = ledger.watch
    try:
        world.run(until_s=LIMIT_S)
    except Deadlock as deadlock:
        verdict.wrong.append(f"deadlock: {deadlock}")
        verdict.outcome = "stuck"
        return verdict
    verdict.outcome, verdict.seconds = world.coordinator.outcome, world.clock.now
    verdict.wrong += Judge(case, world, ledger, trouble).complaints()
    return verdict


@dataclass
class Judge:
    """Looks at a run that is over."""

    case: Case
    world: World
    ledger: Ledger
    trouble: Trouble

    def complaints(self) -> list[str]:
        wrong = self._twice() + self._books()
        if self.world.coordinator.phase != "over":
            return [*wrong, f"not over after {self.world.clock.now:.1f} s: {self.world.who_waits()}"]
        if self.world.coordinator.outcome != "finished":
            return wrong + self._excuses()
        return wrong + self._missing() + self._rounds() + self._parameters()

    def _twice(self) -> list[str]:
        return [
            f"batch {k} of portion {portion} was applied {times} times to block {block}"
            for block, applied in self.ledger.applied.items()
            for (portion, k), times in sorted(applied.items())
            if times > 1
        ]

    def _missing(self) -> list[str]:
        plan = self.world.coordinator.plan
        assert plan is not None
        every = {(p, k) for p in range(plan.num_portions) for k in range(plan.batches_in(p))}
        return [
            f"batch {k} of portion {portion} never reached block {block}"
            for block, applied in self.ledger.applied.items()
            for portion, k in sorted(every - set(applied))
        ]

    def _books(self) -> list[str]:
        books = self.world.coordinator.books()
        if books is None:
            return []
        wrong = [] if books.balanced else [f"the books are not balanced: lost {books.lost}, twice {books.twice}"]
        if self.world.coordinator.outcome == "finished" and (books.not_done or books.skipped):
            wrong.append(f"the books say finished, with {books.not_done} not done and {books.skipped} skipped")
        return wrong

    def _rounds(self) -> list[str]:
        """Each round's update is made of the same batches on every block."""
        if self.case.strategy != "sync":
            return []
        different = len({tuple(steps) for steps in self.ledger.steps.values()}) > 1
        return ["the blocks have made rounds of different batches"] if different else []

    def _parameters(self) -> list[str]:
        share = 1 if self.case.strategy != "sync" else self.case.num_workers  # a round is the mean of its cells
        expected = TASK.after(LR / share)
        got = torch.zeros(TASK.dimension)
        for node in self.world.servers.values():
            for block in node.server.blocks.values():
                got[block.spec.start : block.spec.stop] = block.place.of(block.version)[: TASK.dimension]
        return [] if torch.equal(got, expected) else [f"the parameters differ: {got - expected}"]

    def _excuses(self) -> list[str]:
        """A run may only fail for what was done to it."""
        reason = self.world.coordinator.reason
        excused = (
            ("server" in reason and any(not node.alive for node in self.world.servers.values()))
            or ("no worker is left" in reason and not self._members_alive())
            or ("ended 3 workers" in reason and self.trouble.deaths >= 3)
        )
        return [] if excused else [f"it failed: {reason}"]

    def _members_alive(self) -> bool:
        """Does anyone live who took part? Who came at the end was sent away."""
        return any(worker.peer in self.world.post.nodes for worker in self.world.coordinator.workers.values())


def shortest(case: Case) -> Case:
    """The same failure with as few faults as possible."""
    return replace(case, script=shrink(case.script, lambda script: bool(check(replace(case, script=script)).wrong)))
