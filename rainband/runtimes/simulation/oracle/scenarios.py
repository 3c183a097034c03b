"""Cases for `rainband fuzz`: strategies, a task for each, random faults, and how the right result is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from operator import add
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from rainband.model.flat_parameters import Flat
from rainband.model.gradient import Gradient
from rainband.plugins import load_strategy
from rainband.protocol.messages import Dataset
from rainband.runtimes.simulation.cluster import Scenario
from rainband.runtimes.simulation.gradients import GradientCompute
from rainband.runtimes.simulation.models.faults import Chances, Script, random_script
from rainband.runtimes.simulation.shared_module import SharedModule
from rainband.strategy import Batch, BatchPart, Requirements, ServerPart, Strategy, Worker
from rainband.tasks.linear import Linear
from rainband.tasks.quadratic import Quadratic
from rainband.worker.session import join_of
from rainband.worker.worker import ModuleWorker

if TYPE_CHECKING:
    from torch import Tensor


LR = 0.25  # a power of two: every sum of updates is exact
TIMEOUT_S = 1.0
TASK = Linear(dimension=48, samples=32, batch_size=2, epochs=1)
SHARED = Linear(dimension=48, samples=128, batch_size=8, epochs=1)
BOWL = Quadratic(dimension=48, samples=24, batch_size=2, epochs=1, condition=4.0)
PLAIN = {"optimizer": "sgd", "lr": LR}
STRENGTH = 1 / 64  # of the delay compensation

Known = Literal["sum", "shared", "averaged", "mixed", "rounds", "first", "gathered", "corrected", "coordinated"]


@dataclass(frozen=True)
class FuzzedStrategy:
    """A strategy, and how its result is known.

    sum          every gradient has the same weight: the parameters are known to the last bit
    shared       workers share each batch: the updates of one process, up to rounding
    averaged     workers average models: each batch counts as much as one of K models does, or more without lost ones
    mixed        the same, but a model that is lost before neighbors have averaged it takes a part of a batch with it
    rounds       each update is the mean of a round
    first        the same without the late gradients of a round; every batch is in a round or skipped
    gathered     each update is divided by the number of its gradients, which follows the number of workers
    corrected    each gradient is corrected by the change of the parameters since they were read
    coordinated  full batch: the same iterates as without faults, up to rounding
    """

    make: Callable[[], Strategy]
    known: Known = "sum"


@dataclass(frozen=True)
class Ragged(Strategy):
    """Downpour whose workers push different numbers of batches, as custom training loops may."""

    batches_per_item: int = 4

    @property
    def requires(self) -> Requirements:
        return Requirements(batches_per_item=self.batches_per_item)

    async def run(self, worker: Worker) -> None:
        await worker.servers.pull()
        async for work_item in worker.work_items():
            cut = 2 + worker.rank % (self.batches_per_item - 1)
            for at in range(0, len(work_item.batches), cut):
                gradients = [await worker.gradient(batch) for batch in work_item.batches[at : at + cut]]
                worker.servers.push(reduce(add, gradients))

    def server(self, num_replicas: int) -> ServerPart | None:
        return load_strategy("downpour", PLAIN).server(num_replicas)


def _kind(name: str, known: Known = "sum", **settings: object) -> FuzzedStrategy:
    return FuzzedStrategy(lambda: load_strategy(name, {**PLAIN, **settings}), known)


def _full_batch(name: str) -> FuzzedStrategy:
    return FuzzedStrategy(lambda: load_strategy(name, {"iterations": 3, "n_push": 2}), "coordinated")


# The 16 batches must be whole rounds; with one backup worker, a round needs another one.
IN_ROUNDS = ("shared", "averaged", "mixed")  # of workers, without servers
NUM_WORKERS: dict[Known, tuple[int, ...]] = {"rounds": (1, 2, 4), "first": (2, 4)}

KINDS: dict[str, FuzzedStrategy] = {
    "downpour": _kind("downpour"),
    "downpour2": _kind("downpour", n_push=2, overlap=False),
    "corrected": _kind("downpour", "corrected", compensation=STRENGTH),
    "ragged": FuzzedStrategy(Ragged),
    "sync": _kind("sync", "shared"),
    "averaging": _kind("averaging", "averaged", period=2),
    "gossip": _kind("gossip", "mixed"),
    "per_worker": _kind("sync", "rounds", batch_per_worker=True),
    "backup": _kind("sync", "first", batch_per_worker=True, backup_workers=1),
    "stale_sync": _kind("stale_sync", bound=1),
    "adaptive_bound": _kind("adaptive_bound", min_bound=0, max_bound=3),
    "bounded_delay": _kind("bounded_delay", tau=2, tau_end=1),
    "soft_sync": _kind("soft_sync", "gathered", scaling="none"),
    "sandblaster": _full_batch("sandblaster"),
    "conjugate_gradient": _full_batch("conjugate_gradient"),
    "tree": _kind("tree", "gathered", arity=2, variant="adv_star"),
    "tree_rounds": _kind("tree", "rounds", arity=2, synchronous=True),
}


@dataclass(frozen=True)
class Case:
    """One run with faults."""

    seed: int
    strategy: str  # one of KINDS
    num_workers: int
    num_servers: int
    script: Script

    @property
    def known(self) -> Known:
        return KINDS[self.strategy].known


def random_case(seed: int, strategy: str | None = None) -> Case:
    """Draw a case; everything about the run follows from the seed."""
    random = Random(f"case {seed}")
    drawn = Random(f"strategy {seed}").choice(list(KINDS))
    name = strategy or drawn
    num_workers, num_servers = random.choice(NUM_WORKERS.get(KINDS[name].known, (1, 2, 3, 4))), random.choice((1, 2, 3))
    chances = Chances(
        length_s=random.choice((0.3, 1.5, 1.5, 4.0)),  # the start, all of a run without faults, its end
        timeout_s=TIMEOUT_S,
        most=random.choice((5, 5, 10)),
        servers_die=random.random() < 0.3,
        coordinator_returns=KINDS[name].known == "coordinated",
        shared_batches=KINDS[name].known in IN_ROUNDS,
        stops=Random(f"stop {seed}").random() < 0.2,
        raises=Random(f"raise {seed}").random() < 0.1,
    )
    script = random_script(random, num_workers, num_servers, chances)
    if KINDS[name].known in IN_ROUNDS:
        num_servers = 0  # faults of servers have no effect
    return Case(seed, name, num_workers, num_servers, script)


class CaseSetup:
    """The objects that all runs of a strategy share; workers get their own memory in each run."""

    def __init__(self, strategy: str, task: Linear | None = None) -> None:
        kind = KINDS[strategy]
        self.strategy = kind.make()
        usual = BOWL if kind.known == "coordinated" else SHARED if kind.known in IN_ROUNDS else TASK
        self.task = task or usual
        self.data = self.task.data()
        model = self.task.model().double() if kind.known == "coordinated" else self.task.model()
        flat = Flat(model)
        self.shared_module = SharedModule(flat)
        self.join = join_of(
            self.strategy, flat.layout, Dataset("", len(self.data), self.task.batch_size, self.task.epochs)
        )
        self.gradients: dict[int, Tensor] = {}  # by batch number, if they do not depend on the parameters

    def scenario(self, num_workers: int) -> Scenario:
        compute = GradientCompute if self.task is BOWL else partial(CountingCompute, self)
        return Scenario(
            self.strategy, self.join, lambda: compute(self.shared_module, self.task, self.data, num_workers), real=True
        )

    def gradient(self, worker: ModuleWorker, batch: Batch) -> Tensor:
        """Return a gradient that does not depend on the parameters, computed once for all runs."""
        number = worker.plan.number(batch.portion, batch.k)
        if number not in self.gradients:
            samples = self.data.batch(worker.sampler.indices(batch))
            self.gradients[number] = samples[0].mean(0)
        return self.gradients[number]


setup_of = lru_cache(maxsize=32)(CaseSetup)  # building one takes as long as a run


class CountingCompute(GradientCompute):
    """Returns gradients that do not depend on the parameters."""

    def __init__(self, setup: CaseSetup, *args: Any) -> None:
        super().__init__(*args)
        self.setup = setup

    def gradient(self, worker: ModuleWorker, batch: Batch | BatchPart) -> Gradient:
        if isinstance(batch, BatchPart):
            return self._of_part(worker, batch)
        return self._of(
            worker, batch, self.setup.gradient(worker, batch), worker.plan.samples_in(batch.portion, batch.k)
        )

    def _of_part(self, worker: ModuleWorker, part: BatchPart) -> Gradient:
        if not part.positions:
            return Gradient([None], (part.batch,), 0, 0.0)
        samples = self.data.batch(worker.sampler.indices(part.batch)[list(part.positions)])[0]
        return self._of(worker, part.batch, samples.mean(0), len(samples))

    def _of(self, worker: ModuleWorker, batch: Batch, gradient: Tensor, samples: int) -> Gradient:
        stats = worker.client.stats
        stats.steps += 1
        stats.loss_sum += samples
        stats.loss_samples += samples  # the loss is always 1
        return Gradient([gradient[None].clone()], (batch,), samples, 1.0)
