"""The clocks of many servers at once, as vectors: one push to all of them is one event.

All servers take the messages in the same order: that of the server in the middle. So what the servers decide is the
same everywhere, and only when they do it differs: their cards and their processors are busy at different times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rainband.sim.model import ClusterModel
from rainband.sim.network import Machine

Times = NDArray[np.float64]


class Bank:
    """When each of the servers has time."""

    def __init__(self, model: ClusterModel, server_bytes: Sequence[int], server_blocks: Sequence[int]) -> None:
        network, nodes = model.network, model.nodes
        sizes, blocks = np.array(server_bytes, dtype=np.float64), np.array(server_blocks, dtype=np.float64)
        self.latency_s = network.latency_s
        self.total_bytes = int(sum(server_bytes))
        self.transfer_s = sizes / network.bytes_per_s  # of one server's share, on any card
        self.sent_s = np.cumsum(self.transfer_s)  # when each share has left a worker's card, from the first byte on
        self.first_s = self.sent_s - self.transfer_s
        self.turns_s = np.arange(len(sizes)) * (self.sent_s[-1] / len(sizes))  # shares are equal, but for a few bytes
        self.apply_s = blocks * nodes.message_s + sizes / nodes.apply_bytes_per_s
        self.reply_s = nodes.message_s + sizes / nodes.read_bytes_per_s
        self.middle = len(sizes) // 2  # the server whose order counts
        self.into_free = np.zeros(len(sizes))
        self.out_free = self.into_free if not network.duplex else np.zeros(len(sizes))
        self.processor_free = np.zeros(len(sizes))

    def leave(self, worker: Machine, at_s: float) -> float:
        """A worker sends each server its share, one after the other; returns when the first byte leaves."""
        begin = max(at_s, worker.out.free_at)
        worker.out.free_at = begin + float(self.sent_s[-1])
        return begin

    def apply(self, left_at: float) -> Times:
        """A push whose first byte left then arrives everywhere; returns when each server has applied it."""
        arrive = self.first_s + (left_at + self.latency_s)
        np.maximum(arrive, self.into_free, out=arrive)
        arrive += self.transfer_s
        self.into_free[:] = arrive
        np.maximum(arrive, self.processor_free, out=arrive)
        arrive += self.apply_s
        self.processor_free[:] = arrive
        return arrive

    def ask(self, now: float) -> Times:
        """A pull arrives everywhere; returns when each server has a reply ready."""
        ready = np.maximum(self.processor_free, now)
        ready += self.reply_s
        self.processor_free[:] = ready
        return ready

    def reply(self, worker: Machine, ready: Times) -> tuple[float, float]:
        """Every server sends a worker its share, when it has it ready and its card is free.

        Returns when the share of the middle one leaves, and when the last byte of all is there.
        """
        begin = np.maximum(ready, self.out_free)
        np.add(begin, self.transfer_s, out=self.out_free)
        leave = float(begin[self.middle])
        # On the worker's card one share comes after the other:  end_i = max(arrive_i, end_{i-1}) + transfer.
        begin.sort()
        begin -= self.turns_s
        slowest = float(np.maximum.reduce(begin)) + self.latency_s
        last = max(slowest, worker.into.free_at) + float(self.sent_s[-1])
        worker.into.free_at = last
        return leave, last
