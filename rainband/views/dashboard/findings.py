"""Sentences on what stands out in a run, and a judgement which of its workers are slow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rainband.protocol.events import Lost
from rainband.views.dashboard.fold import Folded, totals
from rainband.views.formatting import count, duration, short
from rainband.views.history import MUCH_WAITING, SLOW

MAX_SENTENCES = 4
MAX_LOST = 64  # of very many workers
MUCH_HELD = 0.2  # of all waiting, because of one worker
WORTH_A_WORD_S = 0.05  # of waiting in all, per worker
MANY_WAIT = 0.3  # of the time
NEARLY_ALL = 0.8  # of the work, by one of several workers
FEW_BATCHES = 20  # so few say nothing about shares


class Level(StrEnum):
    """The seriousness of a sentence."""

    BAD = "bad"
    WARN = "warn"
    GOOD = "good"


@dataclass(frozen=True)
class Sentence:
    """A sentence about the run."""

    level: Level
    text: str


@dataclass(frozen=True)
class WorkerFacts:
    """The rate, waiting and staleness of one worker: now, or over the whole of a run that has ended."""

    rank: int
    per_s: float
    waiting: float  # fraction of the time
    waited_s: float
    slow: bool
    lost: Lost | None  # none: it takes part
    missed_mean: float | None  # updates that its gradients missed; none: no gradient was counted


def workers_of(folded: Folded, is_over: bool) -> dict[int, WorkerFacts]:
    """Return the facts of every worker of which they are known."""
    so_far, nodes = folded.so_far, folded.nodes
    sums = totals(nodes) if nodes else {}
    began_s = so_far.training.began_s or 0.0
    length_s = max(1e-9, (so_far.last.at_s if so_far.last else 0.0) - began_s)
    only = None
    if nodes is not None and nodes.num_workers > len(nodes.workers):  # of the others, nothing is known one by one
        lost = [node.removeprefix("worker ") for node in so_far.lost if node.startswith("worker ")]
        only = {*nodes.workers, *map(int, lost[-MAX_LOST:])}
    now = {worker.index: worker for worker in so_far.workers(only)}
    facts = {}
    for rank in sorted({*now, *sums}):
        worker, sum_ = now.get(rank), sums.get(rank)
        per_s = worker.per_s if worker else 0.0
        waiting, waited_s = (worker.waiting, worker.waited_s) if worker else (0.0, 0.0)
        if sum_ is not None:
            waited_s = sum_.waited_s
        if is_over:
            waiting = min(1.0, waited_s / length_s)
            per_s = sum_.samples / length_s if sum_ and sum_.samples else per_s
        facts[rank] = WorkerFacts(
            rank=rank,
            per_s=per_s,
            waiting=waiting,
            waited_s=waited_s,
            slow=bool(worker and worker.slow),
            lost=so_far.lost.get(f"worker {rank}"),
            missed_mean=sum_.missed / sum_.gradients if sum_ and sum_.gradients else None,
        )
    return _with_slow(folded, facts) if is_over else facts


def _with_slow(folded: Folded, facts: dict[int, WorkerFacts]) -> dict[int, WorkerFacts]:
    """Mark the workers that were slow over the whole run: they did far less, or the others waited mostly for them."""
    counted = [worker for worker in facts.values() if not worker.lost and worker.per_s]
    rates = sorted(worker.per_s for worker in counted)
    if len(rates) < 2:
        return facts
    held = held_up(folded)
    waited_s = sum(worker.waited_s for worker in facts.values())
    others_wait = sum(worker.waiting for worker in counted) / len(counted) > MUCH_WAITING
    for worker in counted:
        holds = others_wait and held.get(worker.rank, 0.0) > waited_s / 2 and worker.waiting < MUCH_WAITING
        if holds or worker.per_s < SLOW * rates[len(rates) // 2]:
            facts[worker.rank] = WorkerFacts(**{**vars(worker), "slow": True})
    return facts


def held_up(folded: Folded) -> dict[int, float]:
    """Return for each worker the seconds that others have waited for it."""
    seconds: dict[int, float] = {}
    for _, holder, waited_s in folded.nodes.waited_for if folded.nodes else ():
        seconds[holder] = seconds.get(holder, 0.0) + waited_s
    return seconds


def accounting_of(folded: Folded) -> Mapping[str, Any]:
    """Return the batch accounting at the end, or so far."""
    if folded.so_far.ended is not None:
        return folded.so_far.ended.accounting
    return folded.nodes.accounting if folded.nodes else {}


def sentences(folded: Folded, workers: Mapping[int, WorkerFacts], state: str) -> list[Sentence]:
    """Return what stands out, the worst first."""
    found = [
        *_failures(folded, state),
        *_nearly_all(folded),
        *_slow_ones(workers),
        *_waits(folded, workers),
        *_skipped(folded),
    ]
    if not found and folded.so_far.last is not None:
        found = [Sentence(Level.GOOD, _nothing(folded, workers))]
    return found[:MAX_SENTENCES]


def _failures(folded: Folded, state: str) -> list[Sentence]:
    so_far, found = folded.so_far, []
    if so_far.error:
        where = f"in worker {so_far.error.worker}, step {so_far.error.step}"
        found.append(Sentence(Level.BAD, f"Your code raised {where}: {so_far.error.error}"))
    elif state == "failed" and so_far.ended:
        found.append(Sentence(Level.BAD, f"The run failed: {so_far.ended.reason}"))
    if state == "killed":
        found.append(Sentence(Level.BAD, "The run was killed: its launcher ended without writing the last event."))
    counts = accounting_of(folded)
    if so_far.ended and (counts.get("lost") or counts.get("applied_twice")):
        text = f"The batch accounting does not balance: {counts['lost']} lost, {counts['applied_twice']} applied twice."
        found.append(Sentence(Level.BAD, text))
    gone = {node: lost.why for node, lost in so_far.lost.items() if lost.state in ("lost", "inactive")}
    if gone:
        named = [f"{node} ({why})" for node, why in list(gone.items())[:2]]
        more = f" and {len(gone) - 2} more" if len(gone) > 2 else ""
        found.append(Sentence(Level.BAD, f"Lost or inactive: {', '.join(named)}{more}."))
    return found


def _nearly_all(folded: Folded) -> list[Sentence]:
    """Return a warning if one worker does nearly all of the work."""
    nodes, last = folded.nodes, folded.so_far.last
    if nodes is None or last is None or last.batches_done < FEW_BATCHES or len(nodes.workers) < 2:
        return []
    most = max(range(len(nodes.workers)), key=lambda k: nodes.samples[k])
    share = nodes.samples[most] / max(1, sum(nodes.samples))
    if share < NEARLY_ALL:
        return []
    others = "the other worker has" if len(nodes.workers) == 2 else f"the {len(nodes.workers) - 1} others have"
    text = f"Worker {nodes.workers[most]} has done {int(100 * share)} % of the work; {others} hardly helped."
    return [Sentence(Level.WARN, text)]


def _slow_ones(workers: Mapping[int, WorkerFacts]) -> list[Sentence]:
    active = [worker for worker in workers.values() if not worker.lost and worker.per_s]
    slow = [worker for worker in active if worker.slow]
    if not slow or len(active) < 2:
        return []
    if len(slow) > 1:
        names = ", ".join(str(worker.rank) for worker in slow[:4]) + (" and others" if len(slow) > 4 else "")
        return [Sentence(Level.WARN, f"{len(slow)} workers are slow: {names}.")]
    worst = slow[0]
    others = [worker for worker in active if worker is not worst]
    share = worst.per_s / (sum(worker.per_s for worker in others) / len(others))
    if share >= SLOW:  # the others wait for it, and so do as little
        return []
    missed = [worker.missed_mean for worker in others if worker.missed_mean is not None]
    stale = ""
    if missed and worst.missed_mean is not None:
        stale = (
            f"; its gradients miss {worst.missed_mean:.1f} updates, those of the others {sum(missed) / len(missed):.1f}"
        )
    return [Sentence(Level.WARN, f"Worker {worst.rank} does {share:.2f} of what each of the others does{stale}.")]


def _waits(folded: Folded, workers: Mapping[int, WorkerFacts]) -> list[Sentence]:
    found, held = [], held_up(folded)
    waited_s = sum(worker.waited_s for worker in workers.values())
    if held and len(workers) > 1:
        holder = max(held, key=lambda rank: held[rank])
        share = held[holder] / waited_s if waited_s else 0.0
        ahead = share > 1.5 / len(workers)  # in lock-step, each worker waits a little for each other
        if share > MUCH_HELD and ahead and held[holder] > WORTH_A_WORD_S * len(workers):
            of_all = f"{min(100, round(100 * share))} % of all waiting"
            text = f"The others have waited {duration(held[holder])} for worker {holder}: {of_all}."
            found.append(Sentence(Level.WARN, text))
    shares = [worker.waiting for worker in workers.values() if not worker.lost]
    if shares and sum(shares) / len(shares) > MANY_WAIT:
        mean = round(100 * sum(shares) / len(shares))
        found.append(Sentence(Level.WARN, f"On average, workers wait {mean} % of the time."))
    return found


def _skipped(folded: Folded) -> list[Sentence]:
    skipped = accounting_of(folded).get("skipped") or {}
    if not skipped:
        return []
    reason = max(skipped, key=lambda name: skipped[name])
    return [Sentence(Level.WARN, f"{count(sum(skipped.values()), 'batch')} skipped, most because: {reason}.")]


def _nothing(folded: Folded, workers: Mapping[int, WorkerFacts]) -> str:
    last = folded.so_far.last
    stale = f" Gradients miss {short(last.staleness_mean)} updates on average." if last and last.staleness_mean else ""
    if len(workers) < 2:
        return f"Nothing stands out.{stale}"
    return f"Nothing stands out: no worker is lost or slow, and none waits long.{stale}"
