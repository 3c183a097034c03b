"""Random schedules with faults, and the oracle that says whether a run kept its promises.

The task counts: its gradients are whole numbers that do not depend on the parameters, so with plain SGD the final
parameters are known to the last bit. Beside the books, which are the run's own, every batch that reaches a block's
optimizer is counted here, apart from any name that was remembered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from operator import add
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
from rainband.types import Batch, ServerHalf, Strategy, Worker
from rainband.worker import ModuleWorker
from rainband.worlds.sim import join_of
from rainband.worlds.sim_body import RealBody
from rainband.worlds.sim_faults import Trouble
from rainband.worlds.sim_memory import Desk
from rainband.worlds.sim_nodes import ServerNode
from rainband.worlds.sim_world import Notes, Play, World

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


@dataclass(frozen=True)
class Ragged:
    """Downpour whose workers sum other numbers of batches in each push, as loops of their own may: nothing lines up."""

    cell_batches: int = 4

    async def run(self, worker: Worker) -> None:
        await worker.server.pull()
        async for cell in worker.cells():
            cut = 2 + worker.index % (self.cell_batches - 1)
            for at in range(0, len(cell.batches), cut):
                gradients = [await worker.gradient(batch) for batch in cell.batches[at : at + cut]]
                worker.server.push(reduce(add, gradients))

    def server(self, num_workers: int) -> ServerHalf | None:
        return load_strategy("downpour", PLAIN).server(num_workers)


PLAIN = {"optimizer": "sgd", "lr": LR}
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "downpour": lambda: load_strategy("downpour", PLAIN),
    "downpour2": lambda: load_strategy("downpour", PLAIN | {"n_push": 2, "overlap": False}),
    "ragged": Ragged,
    "sync": lambda: load_strategy("sync", PLAIN),
    "stale_sync": lambda: load_strategy("stale_sync", PLAIN | {"bound": 1}),
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
    """Counts what reaches the optimizer of each block, and keeps all its versions, apart from marks and books."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.versions: dict[tuple[int, int], Tensor] = {}  # (block, version) -> what it was, once it is no more
        self.misread: list[str] = []
        self.applied: dict[int, Counter[tuple[int, int]]] = {}  # block -> batch -> times
        self.steps: dict[int, list[frozenset[tuple[int, int]]]] = {}  # block -> what each update was made of

    def watch(self, server: Server) -> None:
        self.blocks |= server.blocks
        for block in server.blocks.values():
            self.applied[block.spec.index], self.steps[block.spec.index] = Counter(), []
            block.apply = self._counted(block)  # type: ignore[method-assign, assignment]

    def _counted(self, block: Block) -> Callable[[Tensor, Sequence[Push], Collection[int]], None]:
        apply, number = block.apply, block.spec.index

        def counted(gradient: Tensor, pushes: Sequence[Push], absent: Collection[int]) -> None:
            batches = [(r.portion, k) for p in pushes if not p.skip for r in p.name for k in range(r.first, r.last)]
            self.applied[number].update(batches)
            self.steps[number].append(frozenset(batches))
            self.versions[number, block.version] = block.place.of(block.version).clone()
            apply(gradient, pushes, absent)

        return counted

    def look_at(self, worker: ModuleWorker, batch: Batch) -> None:
        """A gradient is about to be computed: are the parameters what they are said to be?"""
        client, round_ = worker.client, -1
        if worker.plan.columns:
            round_ = worker.plan.round_of(batch.portion, batch.k)
        for index, version in enumerate(client.versions):
            block = self.blocks[index]
            true = block.place.of(version) if version == block.version else self.versions.get((index, version))
            if true is None or not torch.equal(client.views[index], true):
                self.misread.append(f"worker {worker.index} has other parameters than version {version} of {index}")
            if round_ not in (-1, version):
                self.misread.append(f"worker {worker.index} computes round {round_} at version {version} of {index}")


class CountingBody(RealBody):
    """Gradients of this task do not depend on the parameters, so each is computed once for all runs."""

    def __init__(self, stage: Stage, ledger: Ledger, num_workers: int) -> None:
        super().__init__(stage.desk, TASK, stage.data, num_workers)
        self.known = stage.known
        self.ledger = ledger

    def gradient(self, worker: ModuleWorker, batch: Batch) -> ModuleGradient:
        self.ledger.look_at(worker, batch)
        key = worker.plan.seed, worker.plan.number(batch.portion, batch.k)
        if key not in self.known:
            samples = self.data.batch(worker.sampler.indices(batch))
            self.known[key] = samples[0].mean(0, keepdim=True)
        worker.client.stats.steps += 1
        return ModuleGradient([self.known[key].clone()], (batch,), worker.plan.samples_in(batch.portion, batch.k), 0.0)


class Stage:
    """What all runs of a strategy share; every run gets memory of its own."""

    def __init__(self, strategy: str) -> None:
        self.strategy = STRATEGIES[strategy]()
        self.data = TASK.data()
        flat = Flat(TASK.model())
        self.desk = Desk(flat)
        self.join = join_of(self.strategy, flat, "", len(self.data), TASK.batch_size, TASK.epochs)
        self.known: dict[tuple[int, int], Tensor] = {}  # gradients that were computed before

    def play(self, ledger: Ledger, num_workers: int) -> Play:
        return Play(self.strategy, self.join, lambda: CountingBody(self, ledger, num_workers), real=True)


stage_of = lru_cache(maxsize=32)(Stage)  # building one takes as long as a run


def check(case: Case, keep_trace: bool = False) -> Verdict:
    """Run a case and judge it."""
    verdict = Verdict(case, trace=Trace(keep_trace))
    settings = RunSettings(
        num_workers=case.num_workers,
        num_servers=case.num_servers,
        seed=0,  # of the plan: the same batches in every run; all else follows from the case's
        failure_timeout_s=TIMEOUT_S,
    )
    ledger = Ledger()
    play = stage_of(case.strategy).play(ledger, case.num_workers)
    shuffle = Random(f"shuffle {case.seed}")
    world = World(play, settings, MODEL, Notes(verdict.trace), TIMEOUT_S / 5, shuffle, case.seed)
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
        wrong = self.ledger.misread[:1] + self._twice() + self._books() + self._bound()
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

    def _bound(self) -> list[str]:
        """No reader missed more than its rule allows, in the rule's own unit, on any block."""
        blocks = [block for node in self.world.servers.values() for block in node.server.blocks.values()]
        limits = [(block.spec.index, limit) for block in blocks if (limit := block.limit()) is not None]
        return [
            f"{limit.exceeded} gradients of block {block} came from readers that missed up to {limit.largest:g} "
            f"{limit.unit}: {limit.bound:g} are allowed"
            for block, limit in limits
            if limit.exceeded
        ]

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
            or ("the coordinator was lost" in reason and not self.world.leader.alive)
        )
        return [] if excused else [f"it failed: {reason}"]

    def _members_alive(self) -> bool:
        """Does anyone live who took part? Who came at the end was sent away."""
        return any(worker.peer in self.world.post.nodes for worker in self.world.coordinator.workers.values())


def shortest(case: Case) -> Case:
    """The same failure with as few faults as possible."""
    return replace(case, script=shrink(case.script, lambda script: bool(check(replace(case, script=script)).wrong)))
