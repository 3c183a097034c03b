"""The clocks of many servers at once: one push to all of them is one thing to compute.

All servers take the messages in the same order: that of the server in the middle. So what the servers decide is the
same everywhere, and only when they do it differs: their cards and their processors are busy at different times.

A worker's card sends each server its share, one after the other: to server i after `first_i` seconds. A pull arrives
everywhere at once. Any time at a server is the end of a chain of works that began with one or the other, and the
longest chain counts. So among neighbours with shares of one size it is

    time_i = max(a, b + first_i)

with the same a and b for all of them: two numbers, however many servers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import inf

from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel
from rainband.runtimes.simulation.models.network import Machine

Pair = tuple[float, float]  # (a, b) of some moment: see above
Times = list[Pair]  # of all servers, in the order of `Bank.alike`


class EqualServers:
    """Servers one after the other whose shares have one size, and when they have time."""

    def __init__(
        self, first_s: Sequence[float], num_bytes: int, num_blocks: int, transfer_s: float, nodes: NodeModel
    ) -> None:
        self.first_s = min(first_s)  # after which the first of them is sent its share
        self.last_s = max(first_s)
        self.transfer_s = transfer_s  # of one share, on any card
        self.all_s = transfer_s * len(first_s)
        self.apply_s = num_blocks * nodes.message_s + num_bytes / nodes.apply_bytes_per_s
        self.reply_s = nodes.message_s + num_bytes / nodes.read_bytes_per_s
        self.into = self.out = self.processor = (-inf, -inf)  # free from then on


class AggregatedServers:
    """When each of the servers has time."""

    def __init__(self, model: ClusterModel, server_bytes: Sequence[int], server_blocks: Sequence[int]) -> None:
        network = model.network
        self.latency_s = network.latency_s
        self.duplex = network.duplex
        self.total_bytes = sum(server_bytes)
        self.all_sent_s = self.total_bytes / network.bytes_per_s
        self.first_s: list[float] = []
        self.group_of: list[int] = []
        self.alike: list[EqualServers] = []
        sent = 0
        for (num_bytes, num_blocks), run in groupby(zip(server_bytes, server_blocks, strict=True)):
            size = len(list(run))
            first_s = [(sent + i * num_bytes) / network.bytes_per_s for i in range(size)]
            sent += size * num_bytes
            self.first_s += first_s
            self.group_of += [len(self.alike)] * size
            transfer_s = num_bytes / network.bytes_per_s
            self.alike.append(EqualServers(first_s, num_bytes, num_blocks, transfer_s, model.nodes))
        middle = len(self.first_s) // 2  # the server whose order counts
        self.middle_group, self.middle_s = self.group_of[middle], self.first_s[middle]

    def of(self, times: Times, server: int) -> float:
        a, b = times[self.group_of[server]]
        return max(a, b + self.first_s[server])

    def in_the_middle(self, times: Times) -> float:
        """When it is so at the server whose order counts."""
        a, b = times[self.middle_group]
        b += self.middle_s
        return a if a > b else b

    def at_the_last(self, times: Times) -> float:
        """When it is so at every server."""
        last = -inf
        for group, (a, b) in zip(self.alike, times, strict=True):
            b += group.last_s
            if a > last:
                last = a
            if b > last:
                last = b
        return last

    def free(self) -> Times:
        """When each processor has nothing more to do."""
        return [group.processor for group in self.alike]

    def leave(self, worker: Machine, at_s: float) -> float:
        """A worker sends each server its share, one after the other; returns when the first byte leaves."""
        free_at = worker.out.free_at
        begin = at_s if at_s > free_at else free_at
        worker.out.free_at = begin + self.all_sent_s
        return begin

    def apply(self, left_at: float) -> Times:
        """A push whose first byte left then arrives everywhere; returns when each server has applied it."""
        arrive, times = left_at + self.latency_s, []
        for group in self.alike:
            a, b = group.into
            a, b = a + group.transfer_s, (b if b > arrive else arrive) + group.transfer_s
            group.into = a, b
            if not self.duplex:
                group.out = group.into
            free_a, free_b = group.processor
            apply_s = group.apply_s
            group.processor = both = (a if a > free_a else free_a) + apply_s, (b if b > free_b else free_b) + apply_s
            times.append(both)
        return times

    def ask(self, now: float) -> Times:
        """A pull arrives everywhere; returns when each server has a reply ready."""
        times = []
        for group in self.alike:
            a, b = group.processor
            group.processor = both = (a if a > now else now) + group.reply_s, b + group.reply_s
            times.append(both)
        return times

    def reply(self, worker: Machine, ready: Times) -> tuple[float, float]:
        """Every server sends a worker its share, when it has it ready and its card is free.

        Returns when the share of the middle one leaves, and when the last byte of all is there.
        """
        begin, starts, latency_s = [], [], self.latency_s
        for group, (a, b) in zip(self.alike, ready, strict=True):
            free_a, free_b = group.out
            if free_a > a:
                a = free_a
            if free_b > b:
                b = free_b
            begin.append((a, b))
            group.out = a + group.transfer_s, b + group.transfer_s
            if not self.duplex:
                group.into = group.out
            b += group.first_s
            starts.append(((a if a > b else b) + latency_s, group.all_s))
        starts.sort()
        # Through the worker's card. Within a group each share comes at the latest when the one before is through, so
        # that the card is never idle in between.
        through = worker.into.free_at
        for start, all_s in starts:
            through = (start if start > through else through) + all_s
        worker.into.free_at = through
        return self.in_the_middle(begin), through
