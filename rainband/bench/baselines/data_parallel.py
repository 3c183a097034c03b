"""Baselines of data-parallel training: gloo's all-reduce, a bare socket loop, plain PyTorch, DDP.

All run in processes from the same zygote, with one torch thread each and the same allocator settings as our workers.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rainband.bench.baselines.limit import timed
from rainband.transports.connect import SOCKET_BUFFER_BYTES, listen_tcp

CHUNK_BYTES = 1 << 20


class GlooOrder(msgspec.Struct, frozen=True):
    """The order for one of two ranks that all-reduce one vector."""

    rank: int
    port: int
    num_elements: int
    rounds: int


def gloo_main(job: bytes, fds: list[int]) -> None:
    order = msgspec.msgpack.decode(job, type=GlooOrder)
    join_gloo(order.rank, order.port)
    vector = torch.full((order.num_elements,), 1e-3)
    for _ in range(3):
        dist.all_reduce(vector)
    seconds = []
    for _ in range(order.rounds):
        dist.barrier()
        seconds.append(timed(lambda: dist.all_reduce(vector)))
        vector.fill_(1e-3)
    _report(fds[0], seconds)


def join_gloo(rank: int, port: int, num_ranks: int = 2, host: str = "127.0.0.1") -> None:
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=num_ranks)


class SocketOrder(msgspec.Struct, frozen=True):
    """The order for a bare socket loop with the same bytes and the same work as a push, an apply and a pull."""

    port: int
    num_elements: int
    rounds: int
    warmup: int


def socket_server_main(job: bytes, fds: list[int]) -> None:
    """Receive a chunk, apply it, send the parameters back; until the other side closes."""
    order = msgspec.msgpack.decode(job, type=SocketOrder)
    values = torch.zeros(order.num_elements)
    chunks = [values[at : at + CHUNK_BYTES // 4] for at in range(0, order.num_elements, CHUNK_BYTES // 4)]
    optimizers = [torch.optim.SGD([chunk], lr=0.1, fused=True) for chunk in chunks]
    received = torch.empty(CHUNK_BYTES // 4)
    listener = listen_tcp("127.0.0.1", order.port)
    os.write(fds[0], b"l")
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        for chunk, optimizer in zip(chunks, optimizers, strict=True):
            memory = _bytes(received)[: chunk.nbytes]
            if not _receive(sock, memory):
                return
            chunk.grad = received[: chunk.numel()]
            optimizer.step()
            sock.sendall(_bytes(chunk))


def socket_client_main(job: bytes, fds: list[int]) -> None:
    order = msgspec.msgpack.decode(job, type=SocketOrder)
    gradient = torch.full((order.num_elements,), 1e-3)
    values = torch.zeros(order.num_elements)
    sock = socket.create_connection(("127.0.0.1", order.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)

    def exchange() -> None:
        sender = threading.Thread(target=sock.sendall, args=(_bytes(gradient),))
        sender.start()
        _receive(sock, _bytes(values))
        sender.join()

    for _ in range(order.warmup):
        exchange()
    _report(fds[0], [timed(exchange) for _ in range(order.rounds)])


def _receive(sock: socket.socket, memory: memoryview) -> bool:
    at = 0
    while at < len(memory):
        count = sock.recv_into(memory[at:], 0, socket.MSG_WAITALL)
        if count == 0:
            return False
        at += count
    return True


class TrainOrder(msgspec.Struct, frozen=True):
    """The order to train the MLP for some seconds in plain PyTorch, or with DDP."""

    parameters: str
    seconds: float
    rank: int = 0
    port: int = 0  # of DDP's process group; 0: plain PyTorch
    host: str = "127.0.0.1"  # of the first rank
    num_ranks: int = 2


def train_main(job: bytes, fds: list[int]) -> None:
    """Report the samples per second of a plain PyTorch loop, or of DDP over gloo."""
    from rainband.tasks.mlp import Mlp

    order = msgspec.msgpack.decode(job, type=TrainOrder)
    task = Mlp(parameters=order.parameters)
    torch.manual_seed(0)
    model: nn.Module = task.model()
    if order.port:
        join_gloo(order.rank, order.port, order.num_ranks, order.host)
        model = nn.parallel.DistributedDataParallel(model)
    data = task.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    steps = len(data) // task.batch_size
    batches: list[Any] = [data.batch(range(i * task.batch_size, (i + 1) * task.batch_size)) for i in range(steps)]
    samples, started = 0, 0.0
    for number in range(1_000_000):
        if number == 3:
            started = time.perf_counter()
        if number > 3 and number % 4 == 0 and _all_stop(order, time.perf_counter() - started):
            break
        optimizer.zero_grad()
        task.loss(model, batches[number % steps]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        samples += task.batch_size if number >= 3 else 0
    _report(fds[0], [samples / (time.perf_counter() - started)])


def _all_stop(order: TrainOrder, seconds: float) -> bool:
    stop = torch.tensor(float(seconds > order.seconds))
    if order.port:
        dist.broadcast(stop, 0)  # the ranks must stop at the same step
    return bool(stop)


class PacedOrder(msgspec.Struct, frozen=True):
    """The order to train digits with DDP up to an accuracy, each step taking a fixed time as on a device of its own."""

    rank: int
    num_ranks: int
    port: int
    step_s: float  # of this rank
    lr: float
    accuracy: float
    max_steps: int = 400


def paced_main(job: bytes, fds: list[int]) -> None:
    """Report the samples per second of all ranks, and the seconds to the accuracy (0: not reached).

    Initial parameters and batches are those of Rainband's rounds, so that only the way of training differs. The first
    rank evaluates after every step, while the others compute the next one and do not wait.
    """
    from rainband.tasks.digits import Digits

    order = msgspec.msgpack.decode(job, type=PacedOrder)
    join_gloo(order.rank, order.port, order.num_ranks)
    task, size = Digits(), order.num_ranks
    torch.manual_seed(0)
    plain = task.model()
    model = nn.parallel.DistributedDataParallel(plain)
    data, optimizer = task.data(), torch.optim.SGD(model.parameters(), lr=order.lr)
    steps_per_epoch = len(data) // (task.batch_size * size)
    with model.no_sync():  # the time of a backward pass alone, which is part of the step
        losses = [task.loss(model, data.batch(range(task.batch_size))) for _ in range(5)]  # type: ignore[arg-type]
        backward_s = min(timed(loss.backward) for loss in losses)
    dist.barrier()
    started = time.perf_counter()
    reached_s, step, enough = 0.0, 0, False
    while step < order.max_steps and not enough:
        done_at = time.perf_counter() + order.step_s
        epoch, inside = divmod(step, steps_per_epoch)
        shuffled = np.random.Generator(np.random.PCG64([0, epoch])).permutation(len(data))
        first = (inside * size + order.rank) * task.batch_size
        optimizer.zero_grad()
        loss = task.loss(model, data.batch(shuffled[first : first + task.batch_size]))  # type: ignore[arg-type]
        time.sleep(
            max(0.0, done_at - backward_s - time.perf_counter())
        )  # before the backward pass, in which the ranks synchronize
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        enough = _decided_by_first_rank(reached_s > 0)  # from its evaluation before this step
        if order.rank == 0 and not enough and task.evaluate(plain)["accuracy"] >= order.accuracy:
            reached_s = time.perf_counter() - started
    _report(fds[0], [step * task.batch_size * size / (time.perf_counter() - started), reached_s])


def _decided_by_first_rank(decision: bool) -> bool:
    value = torch.tensor(float(decision))
    dist.broadcast(value, 0)
    return bool(value)


def _report(fd: int, seconds: list[float]) -> None:
    os.write(fd, msgspec.msgpack.encode(seconds))
    os.close(fd)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
