"""Sandblaster with two workers on two cores: against L-BFGS in one process, and what an iteration sends to its leader.

Compute-bound: the mlp with 0.7 million parameters on 16,384 samples. The opponent is torch.optim.LBFGS with a closure
over the same samples in the same batches: on one thread, as each of our workers has, and on two, as many as we have
cores. The bar is against the first; both are printed. Seconds are per evaluation of the loss, because two searches need
not look at the same points.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rainband import events
from rainband.bench.rows import Effort, Row, at_least, at_most, median
from rainband.coordinator import Coordinator, Out
from rainband.messages import Answer, Cells, Command, Delivered, Evaluated, Message, Peer, Return, Want, encode
from rainband.tasks.mlp import Mlp
from rainband.transports.frames import PREFIX_BYTES
from rainband.worlds import local
from rainband.worlds.config import RunConfig
from rainband.worlds.directory import new_directory

SIZES = ("0.1M", "0.7M")
SAMPLES = 16384
FULL_HISTORY = 14  # iterations, until each direction has all its pairs
SETTINGS = {"n_push": 32, "gradient_tolerance": 0.0, "loss_tolerance": 0.0}  # it never converges
FASTER, MOST_KB = 1.7, 10.0
LED = (Command, Answer, Evaluated, Cells, Delivered, Want, Return)


def run(effort: Effort) -> list[Row]:
    repeats, iterations = (3, 6) if effort == "full" else (1, 3)
    plain: dict[int, list[float]] = {1: [], 2: []}  # threads -> seconds
    ours = []
    for _ in range(repeats):  # in turns, so that a slow minute of the machine hits all
        for threads, seconds in plain.items():
            seconds.append(_plain(SIZES[-1], iterations, threads))
        ours.append(_sandblaster(SIZES[-1], iterations)[0])
    traffic = [_sandblaster(size, FULL_HISTORY)[1] for size in SIZES]
    name = f"Sandblaster, 2 workers, {SIZES[-1]} parameters"
    faster = {
        threads: median([a / b for a, b in zip(seconds, ours, strict=True)]) for threads, seconds in plain.items()
    }
    return [
        Row("torch.optim.LBFGS, one process, one thread", 1000 * median(plain[1]), "ms/evaluation"),
        Row("torch.optim.LBFGS, one process, two threads", 1000 * median(plain[2]), "ms/evaluation"),
        Row(name, 1000 * median(ours), "ms/evaluation"),
        at_least(name, faster[1], FASTER, "one process, one thread"),
        Row(name, faster[2], "x", "one process, two threads"),
        *(
            at_most(f"to and from the coordinator, 2 servers, {size} parameters", kb, MOST_KB, "", "KB/iteration")
            for size, kb in zip(SIZES, traffic, strict=True)
        ),
    ]


def _plain(size: str, iterations: int, num_threads: int) -> float:
    """Seconds of one evaluation, the optimizer's own work included."""
    task = Mlp(parameters=size, samples=SAMPLES)
    torch.manual_seed(0)
    model, data = task.model(), task.data()
    batches = [data.batch(range(at, at + task.batch_size)) for at in range(0, task.samples, task.batch_size)]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=iterations, line_search_fn="strong_wolfe")
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

    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        closure()  # the first is slower
        evaluations, started = 0, time.perf_counter()
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return (time.perf_counter() - started) / evaluations
    finally:
        torch.set_num_threads(threads)


class Weighed(Coordinator):
    """Counts the bytes of what leading takes, as they are on the wire."""

    led_bytes = 0

    def receive(self, sender: Peer, message: Message, now: float, body: Any = None) -> list[Out]:
        self._weigh(message)
        return self._weighed(super().receive(sender, message, now, body))

    def tick(self, now: float) -> list[Out]:
        return self._weighed(super().tick(now))

    def look(self, now: float) -> list[Out]:
        return self._weighed(super().look(now))

    def _weighed(self, outs: list[Out]) -> list[Out]:
        for out in outs:
            self._weigh(out.message)
        return outs

    def _weigh(self, message: Message) -> None:
        if isinstance(message, LED):
            self.led_bytes += PREFIX_BYTES + len(encode(message))


def _sandblaster(size: str, iterations: int) -> tuple[float, float]:
    """Seconds of one evaluation, everything between two of them included; kilobytes of the last iteration."""
    seen: list[events.Iterated] = []
    weighed: list[int] = []  # so far, after each iteration

    def view(event: events.AnyEvent) -> None:
        if isinstance(event, events.Iterated):
            seen.append(event)
            assert isinstance(launcher.coordinator, Weighed)
            weighed.append(launcher.coordinator.led_bytes)

    with tempfile.TemporaryDirectory() as root:
        config = RunConfig(
            task="mlp",
            task_settings={"parameters": size, "samples": SAMPLES},
            strategy="sandblaster",
            strategy_settings={"iterations": iterations, **SETTINGS},
            num_workers=2,
            num_servers=2,
            directory=str(new_directory(Path(root), "mlp", "sandblaster")),
        )
        launcher = local.Launcher(config, view)
        launcher.coordinator.__class__ = Weighed
        with launcher.signals():
            result = launcher.run()
    if result.outcome != "finished" or len(seen) < 2:
        raise RuntimeError(f"the run {result.outcome} {result.reason}: there is nothing to measure.")
    first, last = seen[0], seen[-1]
    assert isinstance(launcher.coordinator, Weighed)
    kb = (launcher.coordinator.led_bytes - weighed[-2]) / 1000
    return (last.at_s - first.at_s) / (last.evaluations - first.evaluations), kb
