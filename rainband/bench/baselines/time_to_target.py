"""DDP over gloo until a fixed accuracy, on the data and with the model of the task mlp."""

from __future__ import annotations

import time

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from rainband.bench.baselines.data_parallel import join_gloo
from rainband.tasks.mlp import Mlp

EVAL_EVERY_S = 1.0  # as in a run with a target


class TargetOrder(msgspec.Struct, frozen=True):
    """The order for one rank."""

    parameters: str
    samples: int
    batch_size: int
    lr: float
    accuracy: float
    limit_s: float
    rank: int
    num_ranks: int
    host: str
    port: int


def main(job: bytes, fds: list[int]) -> None:
    """Train until the first rank has measured the accuracy; write the seconds, or infinity."""
    order = msgspec.msgpack.decode(job, type=TargetOrder)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    join_gloo(order.rank, order.port, order.num_ranks, order.host)
    task = Mlp(parameters=order.parameters, samples=order.samples)
    data = task.data()
    model = nn.parallel.DistributedDataParallel(task.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=order.lr)
    random = torch.Generator().manual_seed(order.rank)
    dist.barrier()
    began = evaluated = time.perf_counter()
    found, flag = float("inf"), torch.zeros(1)
    while not flag.item():
        inputs, labels = data.batch(torch.randint(0, order.samples, (order.batch_size,), generator=random).numpy())
        optimizer.zero_grad()
        task.loss(model, (inputs, labels)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        now = time.perf_counter()
        if order.rank == 0 and now - evaluated > EVAL_EVERY_S:
            with torch.no_grad():
                reached = task.evaluate(model.module)["accuracy"] >= order.accuracy
            evaluated = time.perf_counter()
            if reached:
                found = evaluated - began
            flag.fill_(float(reached or now - began > order.limit_s))
        dist.broadcast(flag, 0)
    with open(fds[0], "wb", closefd=False) as out:
        out.write(msgspec.msgpack.encode(found))
    dist.destroy_process_group()
