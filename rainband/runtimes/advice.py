"""What is likely to go badly with these settings, said before a run begins, with the number that makes it bad.

Nothing is forbidden here: what cannot work is refused where settings are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from rainband.advice import SLOWER
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.settings import build
from rainband.strategy import Cluster, Straggler, Strategy


def foreseen(
    strategy: Strategy, num_workers: int, straggler: Straggler | None = None, called: str = "workers"
) -> list[str]:
    """Sentences; none: nothing is known to be wrong. Where several compute one model, `num_workers` are its copies."""
    return strategy.advice(Cluster(num_workers, called, straggler))


def waits_for_nobody(strategy: Strategy, num_workers: int) -> float | None:
    """The expected staleness of a strategy in which nobody waits; none: someone does, or there is only one worker."""
    requires = strategy.requires
    if requires.waits != "never" or requires.coordinated or requires.max_replicas == 1:
        return None
    return strategy.staleness(num_workers)


# ---- who is slow ----


def straggler_of(config: RunConfig) -> Straggler | None:
    """Someone slow, as the run's own settings of computing times have it."""
    if not config.sim.compute:
        return None
    model = build(ComputeModel, config.sim.compute)
    slow = [worker for worker in model.slow_workers if worker < config.num_workers]
    if slow and model.slow_factor >= SLOWER:
        named = " and ".join(f"worker {worker}" for worker in slow)
        return Straggler(named, model.slow_factor)
    if model.straggler_chance and model.straggler_factor >= SLOWER:
        return Straggler(f"one step in {1 / model.straggler_chance:.0f}", model.straggler_factor, always=False)
    return None


def straggler_among(samples_per_s: Mapping[int, float], where: str) -> Straggler | None:
    """The slowest of some workers whose rates were seen, if it is slower than the others by far."""
    rates = {worker: rate for worker, rate in samples_per_s.items() if rate > 0}
    if len(rates) < 2:
        return None
    slowest = min(rates, key=lambda worker: rates[worker])
    others = median(rate for worker, rate in rates.items() if worker != slowest)
    factor = others / rates[slowest]
    return Straggler(f"worker {slowest} ({where})", factor) if factor >= SLOWER else None
