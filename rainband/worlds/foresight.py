"""What is likely to go badly with these settings, said before a run begins, with the number that makes it bad.

Nothing is forbidden here: what cannot work is refused where settings are checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from rainband.rules import Compensated
from rainband.settings import build
from rainband.sim.compute import ComputeModel
from rainband.types import GatheringRule, Rule, Strategy, TunableRule, offers
from rainband.worlds.config import RunConfig, is_one_memory, lead_of

SLOWER = 2.0  # times as slow as the others: a straggler
MANY_TIMES = 10.0  # too large a rate is worth a word from here on


class Straggler(NamedTuple):
    """Someone slow, and how it is known."""

    who: str
    factor: float  # how many times slower
    always: bool = True  # not only now and then


class Crew(NamedTuple):
    """Who pushes: workers, or copies of a model that several of them compute together."""

    number: int
    called: str

    def __str__(self) -> str:
        return f"{self.number} {self.called}"


def foreseen(
    strategy: Strategy, num_workers: int, straggler: Straggler | None = None, called: str = "workers"
) -> list[str]:
    """Sentences; none: nothing is known to be wrong. Where several compute one model, `num_workers` are its copies."""
    if lead_of(strategy) is not None:
        return []
    half = strategy.server(num_workers)
    if half is None:
        return _stale_rate(num_workers - 1, strategy) if is_one_memory(strategy) else []
    rule = half.rule()
    if isinstance(rule, Compensated):
        rule = rule.rule
    settings, crew = half.optimizer.settings, Crew(num_workers, called)
    if rule.reads == "round":
        return _scaling(strategy, num_workers) + _backups(strategy, crew) + _waiting(strategy, rule, straggler)
    missed = expected_staleness(strategy, num_workers)
    return [
        *_momentum(float(settings.get("momentum", 0) or 0), crew, missed),  # type: ignore[arg-type]
        *_groups(strategy, crew),
        *_waiting(strategy, rule, straggler),
        *(_stale_rate(missed, strategy) if half.optimizer.name == "sgd" else []),
    ]


def expected_staleness(strategy: Strategy, num_workers: int) -> float:
    """Updates that a gradient misses in the mean, of workers that are alike: each update makes all others one older."""
    half = strategy.server(num_workers)
    rule = None if half is None else half.rule()
    tunable, gathering = offers(rule, TunableRule), offers(rule, GatheringRule)
    missed = float(num_workers - 1)
    if tunable is not None and not max(tunable.bound, getattr(strategy, "high", 0)):
        missed /= 2  # in lock-step the first to push misses none, the last all the others'
    elif getattr(strategy, "overlap", False) or getattr(strategy, "tau", 0):
        missed += num_workers  # it is fetched one step before it is used
    if getattr(strategy, "n_push", 1) == 1:  # of sums, which have gradients of several ages, it is less
        missed += num_workers * (getattr(strategy, "n_fetch", 1) - 1) / 2
    return missed / (1 if gathering is None else gathering.count)


def waits_for_nobody(strategy: Strategy, num_workers: int) -> float | None:
    """The expected staleness of a strategy in which nobody waits; none: someone does, or there is only one worker."""
    half = strategy.server(num_workers)
    if half is None:
        return float(num_workers - 1) if is_one_memory(strategy) else None
    rule = half.rule()
    inner = rule.rule if isinstance(rule, Compensated) else rule
    return expected_staleness(strategy, num_workers) if inner.reads == "any" else None


def _momentum(momentum: float, crew: Crew, missed: float) -> list[str]:
    """Gradients that miss s updates in the mean act as a momentum of s / (s + 1): 1 - 1/g for g workers, each alone."""
    own = missed / (missed + 1)
    if not momentum or momentum + own < 1:
        return []
    return [
        f"momentum={momentum:g} with {crew}: gradients miss {missed:.3g} updates in the mean, which "
        f"acts as a momentum of {own:.2f} by itself; together they are 1 or more. Leave momentum out, or choose sync."
    ]


def _groups(strategy: Strategy, crew: Crew) -> list[str]:
    n, number = getattr(strategy, "n", None), crew.number
    if not isinstance(n, int) or number < 2:
        return []
    if n > number:
        rate = f" and the learning rate is divided by {n}" if getattr(strategy, "scaling", "") == "n" else ""
        return [
            f"n={n} with {crew}: an update cannot be of less than one gradient, so n is {number} in truth{rate}. "
            f"Choose n from 1 to {number}."
        ]
    if number % n:
        count = number // n
        fitting = ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
        return [
            f"n={n} does not divide {crew}: c = {number} / {n} is rounded down to {count}, so there are "
            f"{number / count:.3g} updates, not {n}, when all have pushed once. Choose n from {fitting}."
        ]
    return []


def _waiting(strategy: Strategy, rule: Rule, straggler: Straggler | None) -> list[str]:
    """Who waits for the slowest goes at its speed."""
    if straggler is None or bool(getattr(strategy, "backup_workers", 0)):
        return []
    tunable = offers(rule, TunableRule)
    highest: int = getattr(strategy, "high", 0)
    if rule.reads == "round":
        bound, setting = 0, "in rounds"
    elif tunable is not None:
        bound = max(tunable.bound, highest)
        setting = f"with a bound of {bound}"
    else:
        return []  # nobody waits
    idle = 1 - 1 / straggler.factor
    if not straggler.always:
        if bound:
            return []  # that is what a bound is for
        return [
            f"{straggler.who} takes {straggler.factor:.3g} times as long, and {setting} everyone waits for it: "
            f"{100 * idle:.0f} % of such a step. Choose stale_sync bound=3, or soft_sync."
        ]
    after = "" if not bound else f" after {bound} steps"
    return [
        f"{straggler.who} is {straggler.factor:.3g} times slower, and {setting}{after} everyone goes at its speed: the "
        f"others wait {100 * idle:.0f} % of the time. Choose soft_sync or downpour, or sync backup_workers=1."
    ]


def _scaling(strategy: Strategy, num_workers: int) -> list[str]:
    cells = getattr(strategy, "num_cells", lambda number: number)(num_workers)
    if getattr(strategy, "scaling", "none") != "linear" or getattr(strategy, "warmup", 0.0) or cells < 2:
        return []
    lr = getattr(strategy, "lr", 0.0)
    return [
        f"scaling=linear without a warm-up: the first step has a learning rate of {cells * lr:g}, {cells} times that "
        f"of one worker, at parameters that no rate was tuned for. Add warmup=0.1."
    ]


def _backups(strategy: Strategy, crew: Crew) -> list[str]:
    backups, number = getattr(strategy, "backup_workers", 0), crew.number
    if not backups:
        return []
    kept = max(1, number - backups)
    if backups < number and 2 * kept >= number:
        return []
    return [
        f"backup_workers={backups} with {crew}: of {number} gradients {number - kept} are computed and thrown away. "
        f"Choose at most {number // 2}."
    ]


def _stale_rate(missed: float, strategy: Strategy) -> list[str]:
    """x <- x - a h x(t - s) is stable for a h < 2 sin(pi / (4 s + 2)); with s = 0 that is 2."""
    divided = getattr(strategy, "scaling", "none") in ("staleness", "n")
    times = 1 / math.sin(math.pi / (4 * missed + 2))
    if divided or times < MANY_TIMES:
        return []
    return [
        f"gradients will miss {missed:.3g} updates in the mean: the largest stable learning rate is then {times:.2g} "
        "times smaller than that of one process. Choose a smaller lr, or soft_sync, which divides it, or adagrad."
    ]


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
