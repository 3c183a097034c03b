"""Updates through parameter servers as tables, so that the same cost model prices them and all-reduces.

Ranks 0 to K-1 are the workers, and the ranks after them the servers, on machines of their own. The sum of the workers'
vectors ends on every worker.

    star    step 0    server j adds part j of every worker          (each of S servers has one part)
            step 1    every worker stores part j of server j
    tree    up        every worker gives its vector to a leaf, every inner server its sum to the server above
            down      the root's vector comes back the same way
"""

from __future__ import annotations

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
