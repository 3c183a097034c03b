"""The cost of one update: through parameter servers (star, tree), and by each all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rainband.collectives.algorithm import algorithm_names, load_algorithm
from rainband.collectives.bounds import logp_of, lower_bound_s
from rainband.collectives.cost import LinkCosts, predict_s
from rainband.collectives.servers import server_tree, star
from rainband.collectives.table import MoveTable


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
