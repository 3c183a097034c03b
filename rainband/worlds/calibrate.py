"""Measure this machine, and make of it the model with which virtual time can tell what a run here would take.

A measuring process simulates a few steps with real gradients and takes the time of every piece: of the gradient, of
what the worker does besides (checking, its own step, copying), of a server's work on a push, of taking a block over.
It runs alone, and once more on every core at the same time, which shows what busy cores take from each other.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from rainband.client import Client
from rainband.messages import Push
from rainband.sim.compute import ComputeModel
from rainband.sim.model import ClusterModel, NodeModel
from rainband.sim.network import NetworkModel
from rainband.sim.trace import Trace
from rainband.worker import ModuleWorker
from rainband.worlds.config import RunConfig
from rainband.worlds.sim import make_play, settings_of
from rainband.worlds.sim_nodes import ServerNode
from rainband.worlds.sim_worker import WorkerNode
from rainband.worlds.sim_world import World
from rainband.worlds.zygote import Zygote

PRELOAD = ("torch", "torch._dynamo", "rainband.worlds.calibrate")
WARM_UP = 5  # steps that are not counted: allocators, caches
PINGS = 2000
INSTANT = ClusterModel(NetworkModel(latency_s=0.0), ComputeModel(kind="constant", step_s=1.0), NodeModel())


class Measured(msgspec.Struct, frozen=True):
    """Seconds of each piece of a step, as one process measured them."""

    compute_s: list[float]
    push_s: list[float]  # a worker checks a gradient and copies it to where it is sent from
    step_s: list[float]  # its own step, where the strategy has one
    apply_s: list[float]  # a server, per block
    take_s: list[float]  # a worker takes a block over
    model_bytes: int
    num_blocks: int


def calibrate(config: RunConfig, steps: int = 40) -> ClusterModel:
    """Measure what a run of this task and strategy takes on this machine."""
    num_cores = len(os.sched_getaffinity(0))
    zygote = Zygote.start(PRELOAD)
    try:
        order = (config, steps)
        [alone] = _measure(zygote, order, 1)
        together = _measure(zygote, order, num_cores) if num_cores > 1 else [alone]
        latency_s, message_s = _ping(zygote)
    finally:
        zygote.close(1.0)
    return assemble(alone, together, num_cores, latency_s, message_s)


def assemble(
    alone: Measured, together: list[Measured], num_cores: int, latency_s: float, message_s: float
) -> ClusterModel:
    """From the pieces to a model: one machine with its cores, memory shared between its processes."""
    slower = max(1.0, _median([t for one in together for t in one.compute_s]) / _median(alone.compute_s))
    crowding = (slower - 1) / (num_cores - 1) if num_cores > 1 else 0.0
    block_bytes = alone.model_bytes / alone.num_blocks
    nodes = NodeModel(
        apply_bytes_per_s=block_bytes / _median(alone.apply_s),
        read_bytes_per_s=block_bytes / _median(alone.take_s),
        push_bytes_per_s=alone.model_bytes / (_median(alone.push_s) + _median(alone.step_s)),
        pull_bytes_per_s=block_bytes / _median(alone.take_s),
        message_s=message_s,
        shared_memory=True,
        cores=num_cores,
        crowding=crowding,
    )
    trace = tuple(round(t, 7) for t in alone.compute_s)
    network = NetworkModel(latency_s=latency_s, bytes_per_s=1e10)
    return ClusterModel(network, ComputeModel(kind="trace", trace_s=trace, step_s=_median(alone.compute_s)), nodes)


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


# ---- processes ----


def _measure(zygote: Zygote, order: tuple[RunConfig, int], copies: int) -> list[Measured]:
    data = msgspec.msgpack.encode(order)
    readers = []
    for _ in range(copies):
        reader, writer = os.pipe()
        zygote.spawn("rainband.worlds.calibrate:measure_main", data, "rainband calibrate", [writer], 1)
        os.close(writer)
        readers.append(reader)
    return [msgspec.msgpack.decode(_read_all(reader), type=Measured) for reader in readers]


def _read_all(fd: int) -> bytes:
    with open(fd, "rb") as file:
        data = file.read()
    if not data:
        raise RuntimeError("a measuring process ended without a result; what it printed above says why.")
    return data


def _ping(zygote: Zygote) -> tuple[float, float]:
    """Seconds that a small message takes to another process on this machine, and that it costs this one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        zygote.spawn("rainband.worlds.calibrate:echo_main", b"", "rainband echo", [theirs.fileno()], 1)
        ours.sendall(b"x")
        ours.recv(1)
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(PINGS):
            ours.sendall(b"x")
            ours.recv(1)
        return (time.perf_counter() - began) / PINGS / 2, (time.process_time() - worked) / PINGS


def echo_main(job: bytes, fds: list[int]) -> None:
    """Sends back what comes."""
    with socket.socket(fileno=fds[0]) as sock:
        while data := sock.recv(1):
            sock.sendall(data)


def measure_main(job: bytes, fds: list[int]) -> None:
    """A measuring process."""
    config, steps = msgspec.msgpack.decode(job, type=tuple[RunConfig, int])
    torch.set_num_threads(1)
    with open(fds[0], "wb") as file:
        file.write(msgspec.msgpack.encode(Stopwatch().measure(config, steps)))


# ---- taking the time ----


class Stopwatch:
    """Puts clocks around the pieces of a simulated run."""

    def __init__(self) -> None:
        self.compute_s: list[float] = []
        self.push_s: list[float] = []
        self.step_s: list[float] = []
        self.apply_s: list[float] = []
        self.take_s: list[float] = []

    def measure(self, config: RunConfig, steps: int) -> Measured:
        play = make_play(config)
        world = World(play, settings_of(config, ""), INSTANT, lambda event: None, 1.0, Trace())
        world.start()
        for server in world.servers.values():
            assert isinstance(server, ServerNode)
            server.server.receive = self._timed_server(server.server.receive)  # type: ignore[method-assign]
        for worker in world.workers.values():
            self._time_worker(worker)
        while len(self.compute_s) < steps + WARM_UP and world.coordinator.phase != "over":
            world.run(until_s=world.clock.now + 1.0)
        blocks = world.leader.block_bytes
        return Measured(
            compute_s=self.compute_s[WARM_UP:],
            push_s=self.push_s[WARM_UP:],
            step_s=self.step_s[WARM_UP:],
            apply_s=self.apply_s[WARM_UP:],
            take_s=self.take_s[WARM_UP:],
            model_bytes=sum(blocks),
            num_blocks=len(blocks),
        )

    def _time_worker(self, node: WorkerNode) -> None:
        node.body.gradient = self._timed(node.body.gradient, self.compute_s)  # type: ignore[method-assign]
        make_worker = node.body.worker

        def watched(index: int, client: Client) -> ModuleWorker:
            worker = make_worker(index, client)
            client.take = self._timed(client.take, self.take_s)  # type: ignore[method-assign]
            client._push = self._timed(client._push, self.push_s)  # type: ignore[method-assign]
            worker.params.step = self._timed(worker.params.step, self.step_s)  # type: ignore[method-assign]
            return worker

        node.body.worker = watched  # type: ignore[method-assign]

    def _timed_server(self, receive: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed(receive, self.apply_s)

        def choose(sender: Any, message: Any, *rest: Any, **named: Any) -> Any:
            return (timed if isinstance(message, Push) else receive)(sender, message, *rest, **named)

        return choose

    @staticmethod
    def _timed(work: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = work(*args, **named)
            seconds.append(time.perf_counter() - began)
            return result

        return timed


def describe(config: RunConfig, model: ClusterModel) -> str:
    """What stands at the top of the file."""
    step_ms = 1e3 * model.compute.step_s
    return (
        f"This machine, measured with {config.task} and {config.strategy}: a gradient takes {step_ms:.2f} ms alone, "
        f"{100 * model.nodes.crowding:.0f} % longer for each other busy core."
    )
