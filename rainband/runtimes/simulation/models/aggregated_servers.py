"""The times of many servers at once: a push to all of them is one computation.

All servers handle messages in the same order: that of the server in the middle. So all servers decide the same, and
only their times differ, because their NICs and processors are busy at different times.

A worker's NIC sends each server its shard, one after the other: to server i after `first_i` seconds. A pull arrives at
all servers at once. Every time at a server is the end of a chain of work that began with a push or a pull, and the
longest chain counts. So for neighbors with shards of equal size

    time_i = max(a, b + first_i)

with the same a and b: two numbers for any number of servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import inf

from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel
from rainband.runtimes.simulation.models.network import Machine

Pair = tuple[float, float]  # (a, b) of some moment: see above
Times = list[Pair]  # of all servers, in the order of `AggregatedServers.groups`


class EqualServers:
    """Neighboring servers with shards of equal size, and the times when they are free."""

    def __init__(
        self, first_s: Sequence[float], num_bytes: int, num_blocks: int, transfer_s: float, nodes: NodeModel
    ) -> None:
        self.first_s = min(first_s)  # after which the first of them is sent its shard
        self.last_s = max(first_s)
        self.transfer_s = transfer_s  # of one shard, on any NIC
        self.all_s = transfer_s * len(first_s)
        self.apply_s = num_blocks * nodes.message_s + num_bytes / nodes.apply_bytes_per_s
        self.reply_s = nodes.message_s + num_bytes / nodes.read_bytes_per_s
        self.into = self.out = self.processor = (-inf, -inf)  # free from then on


class AggregatedServers:
    """The times when each of the servers is free."""

    def __init__(self, model: ClusterModel, server_bytes: Sequence[int], server_blocks: Sequence[int]) -> None:
        network = model.network
        self.latency_s = network.latency_s
        self.duplex = network.duplex
        self.total_bytes = sum(server_bytes)
        self.all_sent_s = self.total_bytes / network.bytes_per_s
        self.first_s: list[float] = []
        self.group_of: list[int] = []
        self.groups: list[EqualServers] = []
        sent = 0
        for (num_bytes, num_blocks), run in groupby(zip(server_bytes, server_blocks, strict=True)):
            size = len(list(run))
            first_s = [(sent + i * num_bytes) / network.bytes_per_s for i in range(size)]
            sent += size * num_bytes
            self.first_s += first_s
            self.group_of += [len(self.groups)] * size
            transfer_s = num_bytes / network.bytes_per_s
            self.groups.append(EqualServers(first_s, num_bytes, num_blocks, transfer_s, model.nodes))
        middle = len(self.first_s) // 2  # the server whose order counts
        self.middle_group, self.middle_s = self.group_of[middle], self.first_s[middle]

    def of(self, times: Times, server: int) -> float:
        a, b = times[self.group_of[server]]
        return max(a, b + self.first_s[server])

    def in_the_middle(self, times: Times) -> float:
        """Return the time at the server in the middle."""
        a, b = times[self.middle_group]
        b += self.middle_s
        return a if a > b else b

    def at_the_last(self, times: Times) -> float:
        """Return the latest time of all servers."""
        last = -inf
        for group, (a, b) in zip(self.groups, times, strict=True):
            b += group.last_s
            if a > last:
                last = a
            if b > last:
                last = b
        return last

    def free(self) -> Times:
        """Return when each processor is free."""
        return [group.processor for group in self.groups]

    def leave(self, worker: Machine, at_s: float) -> float:
        """Send each server its shard from a worker; returns when the first byte leaves."""
        free_at = worker.out.free_at
        begin = at_s if at_s > free_at else free_at
        worker.out.free_at = begin + self.all_sent_s
        return begin

    def apply(self, left_at: float) -> Times:
        """Apply a push whose first byte left then; returns when each server has applied it."""
        arrive, times = left_at + self.latency_s, []
        for group in self.groups:
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
        """Handle a pull that arrives at all servers; returns when each has a reply ready."""
        times = []
        for group in self.groups:
            a, b = group.processor
            group.processor = both = (a if a > now else now) + group.reply_s, b + group.reply_s
            times.append(both)
        return times

    def reply(self, worker: Machine, ready: Times) -> tuple[float, float]:
        """Send a worker all shards, each when it is ready and its server's NIC is free.

        Returns when the shard of the middle server leaves, and when the last byte of all arrives.
        """
        begin, starts, latency_s = [], [], self.latency_s
        for group, (a, b) in zip(self.groups, ready, strict=True):
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
        # Through the worker's NIC. Within a group each shard arrives before the previous one is through, so the NIC is
        # never idle in between.
        through = worker.into.free_at
        for start, all_s in starts:
            through = (start if start > through else through) + all_s
        worker.into.free_at = through
        return self.in_the_middle(begin), through
