"""A value goes once to each machine that needs it, however many edges cross the boundary (Dean et al. 2012).

Random layered models are placed on machines: local ones, whose nodes read a few neighbors in the layer below, and fully
connected ones. The script compares the messages with the edges, and the results with those of the whole model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rainband.model_parallel.execution.in_process import Partitioned
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split_marks import whole
from reproduce.claim import Check, Claim, Method, Results, Values

LAYERS, WIDTH, REACH = 4, 24, 3  # the largest distance of a neighbor that a local node reads
SIZE, BATCH = 4, 6  # numbers in a node, samples
MACHINES = (2, 3, 4, 6, 8, 12)
KINDS = ("local", "fully connected")

Wiring = dict[tuple[int, int], tuple[int, ...]]  # (layer, column) -> the columns of the layer below that it reads


def wiring(kind: str, dice: random.Random) -> Wiring:
    """Return the edges into layers 1 and up; a local node reads its own column and two thirds of its neighbors."""
    reads: Wiring = {}
    for layer in range(1, LAYERS):
        for column in range(WIDTH):
            near = range(max(0, column - REACH), min(WIDTH, column + REACH + 1))
            chosen = tuple(p for p in near if p == column or dice.random() < 2 / 3)
            reads[layer, column] = chosen if kind == "local" else tuple(range(WIDTH))
    return reads


class Node(nn.Module):
    """A node computes tanh of a linear function of all that it reads."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE * count, SIZE)
        whole(self)

    def forward(self, *read: Tensor) -> Tensor:
        value: Tensor = self.linear(torch.cat(read, dim=1)).tanh()
        return value


class Net(nn.Module):
    """A model with a node for each column of each layer, and one that reads all of the last layer."""

    def __init__(self, reads: Wiring) -> None:
        super().__init__()
        self.reads = reads
        self.first = nn.ModuleList(Node(1) for _ in range(WIDTH))
        self.later = nn.ModuleDict({f"{layer}_{column}": Node(len(below)) for (layer, column), below in reads.items()})
        self.answer = Node(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        values = [node(x) for node in self.first]
        for layer in range(1, LAYERS):
            below = values
            values = [self.later[f"{layer}_{p}"](*(below[b] for b in self.reads[layer, p])) for p in range(WIDTH)]
        answer: Tensor = self.answer(*values)
        return answer


@dataclass(frozen=True)
class Counted:
    sent: int  # values, forward
    came_back: int  # gradients
    distinct: int  # pairs of a value and a machine that needs it, from the edges
    edges: int  # between machines
    largest_error: float  # of the answer and of all gradients, against the whole model


def count(kind: str, machines: int, seed: int) -> Counted:
    """Count the messages of one batch, forward and backward, with columns placed on machines at random."""
    dice = random.Random(f"{kind} {machines} {seed}")
    torch.manual_seed(seed)
    reads = wiring(kind, dice)
    net, x = Net(reads).double(), torch.randn(BATCH, SIZE).double()
    machine_of = [column * machines // WIDTH for column in range(WIDTH)]
    for column in dice.sample(range(WIDTH), WIDTH // 6):  # mostly contiguous, with some exceptions
        machine_of[column] = dice.randrange(machines)

    graph = cut(net, (x,))
    parts = Partitioned(graph, {unit: _machine(unit, machine_of) for unit in graph.units})
    answer = parts(x)
    expected, gradients = _whole(net, x)
    parts.loss_and_gradients(_loss, (x,))
    kinds = [message.kind for message in parts.messages]
    errors = [(answer - expected).abs().max()]
    errors += [(p.grad - g).abs().max() for p, g in zip(net.parameters(), gradients, strict=True) if p.grad is not None]
    edges = _edges(reads, machine_of)
    return Counted(
        sent=kinds.count("value"),
        came_back=kinds.count("gradient"),
        distinct=len({(value, reader) for value, _, reader in edges}),
        edges=len(edges),
        largest_error=float(max(errors)),
    )


def _machine(unit: str, machine_of: list[int]) -> int:
    """Return the machine of a unit first_<column>, later_<layer>_<column>, or answer, which is on machine 0."""
    return 0 if unit == "answer" else machine_of[int(unit.rpartition("_")[2])]


def _edges(reads: Wiring, machine_of: list[int]) -> list[tuple[tuple[int, int], int, int]]:
    """Return (value, its machine, the reader's machine) of every edge between two machines."""
    edges = [((layer - 1, b), machine_of[b], machine_of[p]) for (layer, p), below in reads.items() for b in below]
    edges += [((LAYERS - 1, column), machine_of[column], 0) for column in range(WIDTH)]
    return [edge for edge in edges if edge[1] != edge[2]]


def _loss(answer: Tensor) -> Tensor:
    return (answer**2).sum()


def _whole(net: Net, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    answer = net(x)
    return answer.detach(), list(torch.autograd.grad(_loss(answer), list(net.parameters())))


def point(seed: int, x: float, kind: str) -> Values:
    torch.set_num_threads(1)  # nodes are too small for threads
    run = count(kind, int(x), seed)
    wrong = abs(run.sent - run.distinct) + abs(run.came_back - run.distinct)
    return {
        "sent": run.sent,
        "edges": run.edges,
        "fewer": run.edges / run.sent,
        "wrong": wrong,
        "off": run.largest_error,
    }


def worst(measure: str) -> Any:
    def over_all(r: Results) -> Any:
        return np.max([r(kind, measure, machines) for kind in KINDS for machines in MACHINES], axis=0)

    return over_all


CLAIM = Claim(
    paper="Dean et al. 2012, figure 1",
    text="a value is sent once to each machine that needs it, fewer times than edges cross",
    part="Model parallelism",
    methods=tuple(Method(kind, {"kind": kind}) for kind in KINDS),
    tasks={"": {}},
    how="computation",
    point=point,
    x=MACHINES,
    x_label="machines",
    log_x=True,
    shown={"sent": "messages in one pass", "fewer": "crossing edges per message"},
    checks=(
        Check("messages that are not one per value and machine", worst("wrong"), below=0.5),
        Check("the largest difference from the whole model", worst("off"), below=1e-12),
        *(
            Check(
                f"{kind}, {MACHINES[-1]} machines: crossing edges per message",
                lambda r, kind=kind: r(kind, "fewer", MACHINES[-1]),
                above=1.0,
                control=True,
            )
            for kind in KINDS
        ),
    ),
)
