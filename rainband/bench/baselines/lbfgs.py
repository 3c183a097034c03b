"""Baseline of Sandblaster: torch.optim.LBFGS in one process, with a closure over all the data."""

from __future__ import annotations

import os
import time

import msgspec
import torch

from rainband.tasks.mlp import Mlp


class PlainOrder(msgspec.Struct, frozen=True):
    """The order to run L-BFGS for some iterations."""

    parameters: str
    samples: int
    iterations: int
    threads: int


def plain_main(job: bytes, fds: list[int]) -> None:
    """Report the seconds of one evaluation, including the optimizer's own work."""
    order = msgspec.msgpack.decode(job, type=PlainOrder)
    torch.set_num_threads(order.threads)
    task = Mlp(parameters=order.parameters, samples=order.samples)
    torch.manual_seed(0)
    model, data = task.model(), task.data()
    batches = [data.batch(range(at, at + task.batch_size)) for at in range(0, task.samples, task.batch_size)]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=order.iterations, line_search_fn="strong_wolfe")
    evaluations = 0

    def closure() -> float:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = task.loss(model, (batch[0], batch[1])) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    closure()  # the first evaluation is slower
    evaluations, started = 0, time.perf_counter()
    optimizer.step(closure)  # type: ignore[no-untyped-call]
    os.write(fds[0], msgspec.msgpack.encode([(time.perf_counter() - started) / evaluations]))
    os.close(fds[0])
