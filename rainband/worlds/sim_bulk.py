"""Thousands of workers and many servers, time only: what goes to all servers is one message.

Shared with every other world: the coordinator, the strategies' coroutines, the client, and one real server with one
block that has no elements, which stands for all of them (marks, rules, rounds, clocks, staleness, books). Modelled:
that all servers take messages in one order, and when each of them has received, applied and answered (vectors of
times). Left out: racks' uplinks, jitter, faults, and shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
from torch import Tensor

from rainband.blocks import BlockSpec, Layout, cut, deal
from rainband.messages import Assign, Load, Message, Params, Peer, Pull, Push, Welcome
from rainband.server import Out, Server
from rainband.sim.bank import Bank, Times
from rainband.sim.model import ClusterModel
from rainband.sim.network import Machine
from rainband.types import ServerHalf
from rainband.worlds.sim_memory import NOTHING, hollow
from rainband.worlds.sim_nodes import publish
from rainband.worlds.sim_post import Node, Payload, Post
from rainband.worlds.sim_worker import WorkerNode

REPORTS = 200  # to the coordinator about completed portions, in a whole run
ALL = Peer("server", 0)  # the coordinator knows of one server, which is all of them


class BankNode(Node):
    """All servers as one node."""

    def __init__(self, post: Post, machine: Machine, half: Callable[[int], ServerHalf], bank: Bank) -> None:
        super().__init__(post, ALL, machine)
        self.name = "servers"
        self.server = Server(half, publish)
        self.bank = bank

    def receive(self, sender: Peer, message: Message, payload: Payload) -> None:
        """What the coordinator says; it takes the servers no time."""
        if isinstance(message, Assign):
            self.server.report_every = max(1, message.plan.num_portions // REPORTS)
        for out in self.server.receive(sender, message, payload):
            self._send(out, self.bank.processor_free)

    def take(self, worker: WorkerNode, message: Message, left_at: float) -> None:
        """A worker's message begins to arrive; the first byte of a push left then."""
        bank, now = self.bank, self.clock.now
        if isinstance(message, Load) or (isinstance(message, Push) and not message.skip):
            times = bank.apply(left_at)
        else:
            idle = bank.processor_free[bank.middle] <= now
            times = bank.ask(now)
            if idle:  # nothing can come between
                self._handle(worker, message, times)
                return
        self.clock.at(float(times[bank.middle]), partial(self._handle, worker, message, times))

    def _handle(self, worker: WorkerNode, message: Message, times: Times) -> None:
        self.post.trace.message(self.clock.now, worker.name, self.name, message)
        for out in self.server.receive(worker.peer, message, NOTHING):
            self._send(out, times)

    def _send(self, out: Out, times: Times) -> None:
        worker = self.post.nodes.get(out.to)
        if not isinstance(worker, WorkerNode):
            self.post.send(self, out.to, out.message)
        elif isinstance(out.message, Params):
            queued = self.bank.out_free[self.bank.middle] > times[self.bank.middle]
            leaves, arrives = self.bank.reply(worker.machine, times)
            if queued:
                self.clock.at(leaves, partial(self._leave, worker, out.message, arrives))
            else:
                self._leave(worker, out.message, arrives)
        else:
            last = max(self.clock.now, float(np.maximum.reduce(times)))
            self._deliver_at(last + self.bank.latency_s, worker, out.message)

    def _leave(self, worker: WorkerNode, params: Params, arrives: float) -> None:
        """Replies are read when they leave: what was applied while they queued is in them."""
        message, _ = self.server.read(params)
        self._deliver_at(arrives, worker, message)

    def _deliver_at(self, arrives: float, worker: WorkerNode, message: Message) -> None:
        """A worker that computes looks at its messages only afterwards, so for these no event is needed."""
        if arrives <= worker.computes_until:
            self._deliver(arrives, worker, message)
        else:
            self.clock.at(arrives, partial(self._deliver, arrives, worker, message))

    def _deliver(self, at_s: float, worker: WorkerNode, message: Message) -> None:
        self.post.trace.message(at_s, self.name, worker.name, message)
        worker.receive(self.peer, message, NOTHING if isinstance(message, Params) else None)


class BankPort:
    """A worker's way to all servers at once."""

    direct = False

    def __init__(self, worker: WorkerNode, node: BankNode) -> None:
        self.worker = worker
        self.node = node
        self.peer = node.peer

    def send(self, message: Message) -> None:
        assert isinstance(message, Pull | Push), f"{type(message).__name__} has no place in a simulation of time"
        at_s = self.worker.free_at()
        self.worker.clock.at(at_s + self.node.bank.latency_s, partial(self.node.take, self.worker, message, at_s))

    def push(self, message: Push | Load, fill: Callable[[Tensor], None]) -> None:
        worker, bank = self.worker, self.node.bank
        # The first share leaves while the next ones are copied: only the copying of the first is waited for.
        at_s = worker.free_at()
        worker.busy_until = at_s + bank.total_bytes / worker.costs.push_bytes_per_s
        begin = bank.leave(worker.machine, at_s)
        worker.stats.pushed_bytes += bank.total_bytes
        worker.clock.at(begin + bank.latency_s, partial(self.node.take, worker, message, begin))

    def read(self, spec: BlockSpec, point: int, out: Tensor) -> int | None:
        raise AssertionError("parameters come with the answer, there is nothing to read in place")


def make_bank(model: ClusterModel, layout: Layout, num_servers: int) -> Bank:
    """The servers' shares of a model."""
    if model.nodes.shared_memory or model.nodes.cores:
        raise ValueError("in bulk every node has a machine of its own: leave shared_memory and cores out of the model.")
    blocks = cut(layout, num_servers)
    dealt = deal(blocks, num_servers)
    return Bank(model, [sum(blocks[b].num_bytes for b in mine) for mine in dealt], list(map(len, dealt)))


def as_one_block(message: Message) -> Message:
    """The blocks that nodes are told of become one without elements, owned by the one server."""
    match message:
        case Welcome():
            return msgspec.structs.replace(message, blocks=(hollow(message.blocks[0]),), owners=(0,))
        case Assign():
            return msgspec.structs.replace(message, blocks=(hollow(message.blocks[0]),))
    return message
