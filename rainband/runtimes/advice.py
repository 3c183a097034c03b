"""Warnings before a run about settings that are likely to perform badly, with the numbers.

Settings that cannot work are refused elsewhere, where options and settings are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from rainband.advice import SLOWER
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.settings import build
from rainband.strategy import Cluster, Straggler, Strategy


def warnings_for(
    strategy: Strategy, num_replicas: int, straggler: Straggler | None = None, called: str = "workers"
) -> list[str]:
    """Return warnings, one sentence each; `num_replicas` is the number of workers, or of copies of a split model."""
    return strategy.advice(Cluster(num_replicas, called, straggler))


def expected_staleness(strategy: Strategy, num_workers: int) -> float | None:
    """Return the expected staleness, or None if the strategy does not predict it or workers wait for each other."""
    return strategy.staleness(num_workers) if may_be_stale(strategy) else None


def may_be_stale(strategy: Strategy) -> bool:
    """Return True if workers never wait for each other, so that only the strategy can predict the staleness."""
    requires = strategy.requires
    return requires.waits == "never" and not requires.coordinated and requires.max_replicas != 1


def straggler_of(config: RunConfig) -> Straggler | None:
    """Return the straggler that the run's settings of computing times define, if any."""
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
    """Return the slowest worker of an earlier run, if it is much slower than the median of the others."""
    rates = {worker: rate for worker, rate in samples_per_s.items() if rate > 0}
    if len(rates) < 2:
        return None
    slowest = min(rates, key=lambda worker: rates[worker])
    others = median(rate for worker, rate in rates.items() if worker != slowest)
    factor = others / rates[slowest]
    return Straggler(f"worker {slowest} ({where})", factor) if factor >= SLOWER else None
