r"""The cost of one update, in which all workers receive the sum of their gradients; and a lower bound on it.

Through parameter servers on machines of their own, as tables: ranks 0 to K-1 are the workers, those after them servers.

    star    step 0    server j adds part j of every worker          (each of S servers has one part)
            step 1    every worker stores part j of server j
    tree    up        every worker gives its vector to a leaf, every inner server its sum to the server above
            down      the root's vector comes back the same way

No all-reduce is faster than a bound in the LogP model (Culler et al. 1993) with bytes (LogGP). A message takes L from
one rank to another; sending and receiving each take o of a rank's own time; between two messages that a rank sends, g
passes at least; a byte takes G. Every algorithm needs at least

    B(P)                    the optimal broadcast of one message among P ranks: every rank's vector must reach all
    2 (P-1)/P N G           each element is moved P-1 times into its sum, and the sum P-1 times to the others
    + (P-1)/P N gamma       of the moves into the sum, each adds

so it takes no less than the larger of B(P) and the other two together. The model of cost.py, in which a message takes
alpha of the sender's and of the receiver's time at once, is L = g = alpha, o = 0, where B(P) = ceil(log2 P) alpha.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from rainband.collectives.algorithm import algorithm_names, load_algorithm
from rainband.collectives.cost import LinkCosts, predict_s
from rainband.collectives.table import Move, MoveTable


def star(num_workers: int, num_servers: int) -> MoveTable:
    """Return the moves of an update by servers that each have an equal part of the model."""
    pairs = [(worker, server) for server in range(num_servers) for worker in range(num_workers)]
    moves = [
        *(Move(0, worker, num_workers + server, server, server + 1, True) for worker, server in pairs),
        *(Move(1, num_workers + server, worker, server, server + 1, False) for worker, server in pairs),
    ]
    return MoveTable("update", num_workers + num_servers, num_servers, tuple(sorted(moves)))


def server_tree(num_workers: int, num_servers: int, arity: int) -> MoveTable:
    """Return the moves of an update by a tree: server i has the children arity * i + 1 to arity * i + arity."""
    above = [(number - 1) // arity for number in range(num_servers)]
    level = [0] * num_servers
    for number in range(1, num_servers):
        level[number] = level[above[number]] + 1
    leaves = [number for number in range(num_servers) if arity * number + 1 >= num_servers]
    depth = max(level) + 1  # steps up: one for each level, and that of the workers
    up = [
        Move(depth - 1 - level[leaf], worker, num_workers + leaf, 0, 1, True)
        for worker in range(num_workers)
        for leaf in [leaves[worker % len(leaves)]]
    ]
    up += [
        Move(depth - level[number], num_workers + number, num_workers + above[number], 0, 1, True)
        for number in range(1, num_servers)
    ]
    down = [Move(2 * depth - 1 - move.step, move.target, move.source, 0, 1, False) for move in up]
    return MoveTable("update", num_workers + num_servers, 1, tuple(sorted(up + down)))


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


class UpdateCost(NamedTuple):
    """The cost of bringing the sum of all gradients to all workers: alphas * alpha + betas * N * beta, or less.

    It takes less with long vectors, which are cut into chunks: steps then overlap.
    """

    name: str
    steps: int
    alphas: float  # messages, one after the other
    betas: float  # bytes that the busiest machine sends or receives, in multiples of the model's
    seconds: float


def update_costs(num_bytes: int, workers: int, servers: int, arity: int, costs: LinkCosts) -> list[UpdateCost]:
    """Return the cost of each way, the fastest first. Every rank has a network card of its own, or they share cores."""
    rows = []
    for name, table in _tables(workers, servers, arity):
        own = costs if costs.cores < workers else costs._replace(cores=table.num_ranks)
        unit = LinkCosts(1.0, 0.0, 0.0, table.num_ranks)
        rows.append(
            UpdateCost(
                name,
                table.num_steps,
                predict_s(table, 1, unit),
                predict_s(table, 1, unit._replace(alpha_s=0.0, beta_s=1.0)),
                predict_s(table, num_bytes, own),
            )
        )
    return sorted(rows, key=lambda row: row.seconds)


def _tables(workers: int, servers: int, arity: int) -> Iterator[tuple[str, MoveTable]]:
    yield f"star of {servers} server{'s' if servers > 1 else ''}", star(workers, servers)
    inner = arity + 1
    yield f"tree of {inner} servers", server_tree(workers, inner, arity)
    for name in algorithm_names():
        yield name, load_algorithm(name).table(workers)


def bound_s(num_bytes: int, workers: int, costs: LinkCosts) -> float:
    """Return the time that no all-reduce among the workers can beat, in the cost model's own terms."""
    return lower_bound_s(workers, num_bytes, logp_of(costs))
