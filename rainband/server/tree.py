"""A tree of servers: server 0 is the root, and server i has the children arity * i + 1 to arity * i + arity."""

from __future__ import annotations


def parent(server: int, arity: int) -> int:
    """Return the server above this one."""
    return (server - 1) // arity


def leaves(num_servers: int, arity: int) -> range:
    """Return the servers without servers below them: workers are attached to these."""
    first = -(-(num_servers - 1) // arity)  # the number of servers that have children
    return range(first, num_servers)


def server_of(worker: int, num_servers: int, arity: int) -> int:
    """Return the server to which a worker is attached; the workers are spread evenly."""
    of = leaves(num_servers, arity)
    return of[worker % len(of)]
