"""Measurements of each worker and server as events, in bounded size and time, whatever the number of workers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

import msgspec

from rainband.coordinator.state import RunState, WorkerState
from rainband.protocol.accounting import BatchAccounting
from rainband.protocol.events import STALENESS_BINS, NodesMeasured
from rainband.protocol.messages import Report

MAX_SHOWN = 256  # workers in one event
STAND_OUT = 32  # of these, where there are more: lost ones, those that wait most, and those that did least; of each
MAX_PAIRS = 256  # of a worker and the worker that it waited for
MAX_BLOCKS = 64
MAX_BYTES_PER_S = 64e3  # of all events that come regularly; half of them are these
PER_COUNT_S = 1e-6  # about the time for one count of one worker
MAX_TIME_SHARE = 0.01  # of the coordinator's time


class NodeReport:
    """Decides which workers events show one by one, and how often."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.due_at = 0.0
        self.encode = msgspec.json.Encoder().encode

    def shown(self) -> dict[int, WorkerState]:
        """Return the workers that events show one by one: all, or a fixed selection and those that stand out."""
        workers = self.state.workers
        if len(workers) <= MAX_SHOWN:
            return dict(sorted(workers.items()))
        ranks = sorted(workers)
        lost = [i for i in ranks if not workers[i].connected][-STAND_OUT:]
        waiting = sorted(ranks, key=lambda i: -workers[i].heartbeat.waited_s)[:STAND_OUT]
        behind = sorted(ranks, key=lambda i: workers[i].heartbeat.samples)[:STAND_OUT]
        num_even = MAX_SHOWN - 3 * STAND_OUT
        even = [ranks[k * len(ranks) // num_even] for k in range(num_even)]
        return {i: workers[i] for i in sorted({*lost, *waiting, *behind, *even})}

    def is_due(self, now: float) -> bool:
        """Return True if an event would not cost too much time or space after the last one."""
        return now >= self.due_at or not self.state.settings.bounded_events

    def measured(
        self, now: float, shown: Mapping[int, WorkerState], accounting: BatchAccounting | None
    ) -> NodesMeasured:
        """Return the event of this moment."""
        event = self._event(now, shown, self.state.reports(), accounting)
        counts = sum(len(histogram) for report in self.state.reports() for histogram in report.staleness.values())
        cost_s = PER_COUNT_S * (counts + 20 * len(shown)) / MAX_TIME_SHARE
        self.due_at = now + max(cost_s, len(self.encode(event)) / (MAX_BYTES_PER_S / 2))
        return event

    def _event(
        self,
        now: float,
        shown: Mapping[int, WorkerState],
        reports: list[Report],
        accounting: BatchAccounting | None,
    ) -> NodesMeasured:
        heartbeats = [worker.heartbeat for worker in shown.values()]
        counted = {rank: WorkerStaleness() for rank in shown}
        everyone = WorkerStaleness()
        for report in reports:
            for rank, histogram in report.staleness.items():
                everyone.add(histogram)
                if rank in counted:
                    counted[rank].add(histogram)
        pairs = [(rank, other, s) for rank, w in shown.items() for other, s in w.heartbeat.waited_for.items()]
        servers = [server for _, server in sorted(self.state.servers.items())]
        blocks = sorted((missed for report in reports for missed in report.missed), key=lambda missed: missed.block)
        return NodesMeasured(
            at_s=now,
            workers=tuple(shown),
            num_workers=len(self.state.workers),
            samples=tuple(h.samples for h in heartbeats),
            waited_s=_rounded(h.waited_s for h in heartbeats),
            cpu_s=_rounded(h.cpu_s for h in heartbeats),
            pushed_bytes=tuple(h.pushed_bytes for h in heartbeats),
            pulled_bytes=tuple(h.pulled_bytes for h in heartbeats),
            sent_bytes=tuple(h.sent_bytes for h in heartbeats),
            staleness=tuple(one.binned() for one in counted.values()),
            missed=tuple(one.missed for one in counted.values()),
            max_missed=tuple(one.most for one in counted.values()),
            waiting=tuple(rank for rank, w in shown.items() if w.connected and w.heartbeat.waiting),
            waited_for=tuple(
                sorted((rank, other, round(s, 6)) for rank, other, s in sorted(pairs, key=_seconds)[-MAX_PAIRS:])
            ),
            all_staleness=everyone.binned(),
            updates=tuple(server.report.updates if server.report else 0 for server in servers),
            blocks=tuple(
                (round(missed.total / missed.pushes, 4) if missed.pushes else 0.0, missed.most)
                for missed in blocks[:MAX_BLOCKS]
            ),
            accounting=msgspec.to_builtins(accounting) if accounting else {},
            memory_bytes=tuple(h.memory_bytes for h in heartbeats),
            server_cpu_s=_rounded(server.cpu_s for server in servers),
            server_memory_bytes=tuple(server.memory_bytes for server in servers),
        )


class WorkerStaleness:
    """Gradients by the updates that they missed."""

    def __init__(self) -> None:
        self.bins = [0] * len(STALENESS_BINS)
        self.missed = self.most = 0

    def add(self, histogram: Mapping[int, int]) -> None:
        for missed, gradients in histogram.items():
            self.bins[bisect_right(STALENESS_BINS, missed) - 1] += gradients
            self.missed += missed * gradients
            self.most = max(self.most, missed)

    def binned(self) -> tuple[int, ...]:
        used = max((k + 1 for k, gradients in enumerate(self.bins) if gradients), default=0)
        return tuple(self.bins[:used])


def _rounded(seconds: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(s, 6) for s in seconds)


def _seconds(pair: tuple[int, int, float]) -> float:
    return pair[2]
