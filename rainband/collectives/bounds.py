r"""A lower bound on the time of an all-reduce, in the LogP model (Culler et al. 1993) with bytes (LogGP).

A message takes L from one rank to another; sending and receiving each take o of a rank's own time; between two messages
that a rank sends, g passes at least; a byte takes G. Every algorithm needs at least

    B(P)                    the optimal broadcast of one message among P ranks: every rank's vector must reach all
    2 (P-1)/P N G           each element is moved P-1 times into its sum, and the sum P-1 times to the others
    + (P-1)/P N gamma       of the moves into the sum, each adds

so it takes no less than the larger of B(P) and the other two together. The model of cost.py, in which a message takes
alpha of the sender's and of the receiver's time at once, is L = g = alpha, o = 0, where B(P) = ceil(log2 P) alpha.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from rainband.collectives.cost import LinkCosts


class LogP(NamedTuple):
    """The four parameters besides P, and the seconds in which a rank adds a byte; all in seconds."""

    latency_s: float
    overhead_s: float
    gap_s: float
    byte_s: float
    add_s: float = 0.0


def logp_of(costs: LinkCosts) -> LogP:
    """Return the parameters with which LogP counts as the cost model does."""
    return LogP(costs.alpha_s, 0.0, costs.alpha_s, costs.beta_s, costs.gamma_s)


def broadcast_s(num_ranks: int, logp: LogP) -> float:
    """Return the time of the optimal broadcast: every rank that has the message sends it on, as early as possible."""
    between_s, takes_s = max(logp.gap_s, logp.overhead_s), logp.latency_s + 2 * logp.overhead_s
    arrivals, last_s = [takes_s], 0.0
    for _ in range(num_ranks - 1):
        last_s = heapq.heappop(arrivals)
        heapq.heappush(arrivals, last_s + between_s)  # the next message of its sender
        heapq.heappush(arrivals, last_s + takes_s)  # the first one of its receiver
    return last_s


def lower_bound_s(num_ranks: int, num_bytes: int, logp: LogP) -> float:
    """Return a time that no all-reduce of vectors of this size can beat."""
    if num_ranks < 2:
        return 0.0
    moved = (num_ranks - 1) / num_ranks * num_bytes
    return max(broadcast_s(num_ranks, logp), moved * (2 * logp.byte_s + logp.add_s))
