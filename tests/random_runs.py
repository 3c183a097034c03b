"""The run that a seed stands for: its size and its faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from rainband.rules import ApplyEvery
from rainband.rules.rule import RuleBlock
from rainband.runtimes.simulation.oracle import scenarios
from rainband.strategies.bounded_delay import BoundedDelay
from rainband.strategies.downpour import Downpour
from rainband.strategies.soft_sync import SoftSync
from rainband.strategies.stale_sync import StaleSync
from rainband.strategies.sync import Sync
from rainband.strategy import ServerPart, Strategy, Worker
from tests.harness import Faults, Outcome, run
from tests.ledger import LR, Case


class Ragged(scenarios.Ragged):
    """Downpour whose workers cut a work item differently, at the learning rate of these runs."""

    def server(self, num_replicas: int) -> ServerPart:
        return Downpour(lr=LR, optimizer="sgd", guard=False).server(num_replicas)


def draw(seed: int, kind: str) -> tuple[Case, Faults]:
    """The run and the faults that a seed stands for; `kind` is one of DRAWS."""
    r = random.Random(f"{kind} {seed}")
    epochs = r.choice((1, 1, 2))
    num_samples, batch_size = r.randint(8, 40 // epochs), r.choice((1, 2))
    num_batches, num_servers = -(-num_samples // batch_size) * epochs, r.randint(1, 3)
    dtypes = tuple(r.choices(("float32", "float32", "float64", "bfloat16"), k=r.randint(1, 2)))
    odd = r.random() < 0.3
    not_finite = frozenset(r.sample(range(num_batches), 2)) if odd else frozenset()
    strategy = DRAWS[kind](r)
    case = Case(
        strategy=strategy,
        num_workers=r.randint(2, 4),
        num_servers=num_servers,
        dtypes=dtypes,
        num_samples=num_samples,
        batch_size=batch_size,
        epochs=epochs,
        portion_batches=r.choice((0, 2, 4)) * strategy.requires.batches_per_item,
        direct=r.random() < 0.5,
        not_finite=not_finite,
        absent=_draw_absent(r, num_batches, len(dtypes) * num_servers, not_finite) if odd else frozenset(),
    )
    most = 2 if kind == "ragged" else 1  # its pushes are many in flight, so breaking its lines tells most
    faults = Faults(
        kills=r.choice((0, 1, 2)),
        restarts=r.choice((0, 1)),
        pauses=r.choice((0, 1, 2)) * most,
        suspicions=r.choice((0, 1, 3)) * most,
        reconnects=r.choice((0, 1, 4)) * most,
        duplicates=r.choice((0.0, 0.0, 0.1, 0.3)),
        latecomers=r.choice((0, 0, 1)),
        stop=r.random() < 0.05,
    )
    return case, faults


def _draw_downpour(r: random.Random) -> Downpour:
    return Downpour(
        n_push=r.randint(1, 3),
        n_fetch=r.randint(1, 2),
        lr=LR,
        optimizer="sgd",
        overlap=r.random() < 0.5,
        warm_start_batches=r.choice((0, 0, 4)),
        guard=False,  # or not every gradient would count alike
    )


def _draw_ragged(r: random.Random) -> Ragged:
    return Ragged(batches_per_item=r.randint(3, 5))


def _draw_sync(r: random.Random) -> Sync:
    return Sync(batch_per_worker=True, lr=LR)


def _draw_backup(r: random.Random) -> Sync:
    return Sync(batch_per_worker=True, lr=LR, backup_workers=r.choice((1, 1, 2)))


def _draw_stale_sync(r: random.Random) -> StaleSync:
    return StaleSync(bound=r.choice((0, 0, 1, 2)), n_push=r.choice((1, 1, 2)), lr=LR, guard=False)


def _draw_bounded_delay(r: random.Random) -> BoundedDelay:
    return BoundedDelay(tau=r.choice((0, 1, 1, 3)), tau_end=r.choice((None, None, 0, 4)), lr=LR, guard=False)


class SumOfArrivals(ApplyEvery):
    """The same updates, but every gradient counts as much as Downpour's, however many there are in one."""

    def flush(self, block: RuleBlock) -> None:
        if self.total is not None:
            self.total.mul_(self.gradients_per_update)
        super().flush(block)


@dataclass(frozen=True)
class Softly(Strategy):
    """Soft synchronisation, so that the ledger can count."""

    n: int

    async def run(self, worker: Worker) -> None:
        await SoftSync().run(worker)

    def server(self, num_replicas: int) -> ServerPart:
        soft = SoftSync(n=self.n, lr=LR, scaling="none", guard=False)
        rule = partial(
            SumOfArrivals, soft.gradients_per_update(num_replicas), False, num_replicas, soft.gradients_per_update
        )
        return replace(soft.server(num_replicas), rule=rule)


def _draw_soft_sync(r: random.Random) -> Softly:
    return Softly(n=r.choice((1, 1, 2, 4)))


DRAWS: dict[str, Callable[[random.Random], Strategy]] = {
    "downpour": _draw_downpour,
    "ragged": _draw_ragged,
    "per_worker": _draw_sync,
    "stale_sync": _draw_stale_sync,
    "soft_sync": _draw_soft_sync,
    "backup": _draw_backup,
    "bounded_delay": _draw_bounded_delay,
}


def _draw_absent(
    r: random.Random, num_batches: int, num_blocks: int, but: Collection[int]
) -> frozenset[tuple[int, int]]:
    drawn = [(r.randrange(num_batches), r.randrange(num_blocks)) for _ in range(4)]
    return frozenset((batch, block) for batch, block in drawn if batch not in but)


def run_seed(seed: int, kind: str, max_steps: int = 20_000) -> Outcome:
    """Run what a seed stands for; a failure says how to run it again."""
    case, faults = draw(seed, kind)
    try:
        return run(seed, case, faults, max_steps)
    except Exception as error:
        error.add_note(f"to see it again: tests.random_runs.run_seed({seed}, {kind!r})\n{case}\n{faults}")
        raise
