"""Send one tensor between two workers, against copying it in one process and against gloo's send and recv.

Each time is half of a round trip.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from statistics import median

import msgspec
import torch
import torch.distributed as dist

from rainband.bench.baselines.limit import timed
from rainband.bench.harness.processes import PRELOAD, BenchProcess, free_port
from rainband.bench.harness.rows import Effort, Row
from rainband.protocol.messages import Address, Peer
from rainband.runtimes.processes.zygote import Zygote
from rainband.transports.auth import new_run_id, new_secret, role_keys
from rainband.transports.event_loop import EventLoop
from rainband.transports.peers import PeerLinks

SIZES = {"1 MB": 1 << 20, "64 MB": 64 << 20}
WARM_UP = 3


class PeersOrder(msgspec.Struct, frozen=True):
    """The order for one of two processes that send a tensor back and forth."""

    index: int
    keys: dict[str, bytes]
    run_id: bytes
    transport: str
    num_bytes: int
    rounds: int
    port: int = 0  # of gloo's ranks


class CopyOrder(msgspec.Struct, frozen=True):
    """The order for a process that copies a tensor."""

    num_bytes: int
    rounds: int


def run(effort: Effort) -> list[Row]:
    rounds = 30 if effort == "full" else 8
    zygote = Zygote.start(PRELOAD)
    try:
        return [row for size, num_bytes in SIZES.items() for row in _size(zygote, size, num_bytes, rounds)]
    finally:
        zygote.close(1.0)


def _size(zygote: Zygote, size: str, num_bytes: int, rounds: int) -> list[Row]:
    shm = _pair(zygote, "links_main", "shm", num_bytes, rounds)
    tcp = _pair(zygote, "links_main", "tcp", num_bytes, rounds)
    gloo = _pair(zygote, "gloo_main", "", num_bytes, rounds)
    copy = _copy_s(zygote, num_bytes, rounds)
    name = f"{size} from worker to worker"
    rows = [Row(f"{name}, shared memory", shm * 1000, "ms"), Row(f"{name}, TCP", tcp * 1000, "ms")]
    rows += [Row(f"{name}, gloo", gloo * 1000, "ms"), Row(f"{size} copied in one process", copy * 1000, "ms")]
    rows.append(Row(f"{name}, shared memory", shm / copy, "x", "one copy"))
    for transport, seconds in (("shared memory", shm), ("TCP", tcp)):
        rows.append(Row(f"time of gloo, {name}", gloo / seconds, "x", transport))
    return rows


def _pair(zygote: Zygote, entry: str, transport: str, num_bytes: int, rounds: int) -> float:
    keys, run_id, port = role_keys(new_secret()), new_run_id(), free_port()
    ends = socket.socketpair()  # to exchange the addresses
    processes = []
    for index in range(2):
        order = PeersOrder(index, keys, run_id, transport, num_bytes, rounds, port)
        processes.append(
            BenchProcess(zygote, f"rainband.bench.cases.peers:{entry}", order, "peer", [ends[index].fileno()])
        )
    for end in ends:
        end.close()
    seconds: list[float] = processes[0].result()
    processes[1].result()
    return median(seconds) / 2


def _copy_s(zygote: Zygote, num_bytes: int, rounds: int) -> float:
    """Copy in a process like the others: this one has a thread per core, and they wait for each other."""
    order = CopyOrder(num_bytes, rounds)
    seconds: list[float] = BenchProcess(zygote, "rainband.bench.cases.peers:copy_main", order, "copy").result()
    return median(seconds)


def copy_main(job: bytes, fds: list[int]) -> None:
    """Copy from one tensor to another."""
    order = msgspec.msgpack.decode(job, type=CopyOrder)
    source, target = torch.ones(order.num_bytes // 4), torch.zeros(order.num_bytes // 4)
    seconds = [timed(lambda: target.copy_(source)) for _ in range(WARM_UP + order.rounds)]
    _report(fds[0], seconds)


def links_main(job: bytes, fds: list[int]) -> None:
    """Send and receive through Rainband's peer links."""
    order = msgspec.msgpack.decode(job, type=PeersOrder)
    links = PeerLinks(Peer("worker", order.index), order.keys, order.run_id, EventLoop(), order.transport, 30.0)
    address, other = links.listen(), 1 - order.index
    with socket.socket(fileno=fds[1]) as end:
        end.sendall(msgspec.msgpack.encode(address))
        other_address = msgspec.msgpack.decode(end.recv(4096), type=Address)
    links.connect({order.index: address, other: other_address})
    value = [torch.ones(order.num_bytes // 4)]

    def receive() -> None:
        received = links.recv(other, ("value",))
        while not received.ready():
            links.event_loop.wait()
        received.result()

    _report_round_trips(order, fds[0], lambda: links.send(other, ("value",), value), receive)
    links.close()


def gloo_main(job: bytes, fds: list[int]) -> None:
    """Send and receive through gloo."""
    order = msgspec.msgpack.decode(job, type=PeersOrder)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{order.port}", rank=order.index, world_size=2)
    value, other = torch.ones(order.num_bytes // 4), 1 - order.index
    _report_round_trips(order, fds[0], lambda: dist.send(value, other), lambda: dist.recv(value, other))


def _report_round_trips(order: PeersOrder, fd: int, send: Callable[[], object], receive: Callable[[], object]) -> None:
    def round_trip() -> None:
        for action in (send, receive) if order.index == 0 else (receive, send):
            action()

    seconds = [timed(round_trip) for _ in range(WARM_UP + order.rounds)]
    _report(fd, seconds)


def _report(fd: int, seconds: list[float]) -> None:
    os.write(fd, msgspec.msgpack.encode(seconds[WARM_UP:]))
    os.close(fd)
