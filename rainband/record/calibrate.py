"""Measure this machine, and build the cluster model that simulates it.

A measuring process simulates a few steps with real gradients and times every kind of work: the gradient, the worker's
other work (checking, its own step, copying), the server's work on a push, copying a block to the worker. It runs alone
and, in turns, beside as many others as there will be workers, which shows how busy cores slow each other down. The cost
of a message follows from a short real run: see `message_cost`. All times are processor times, so the load of other
programs is not part of the model.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import fsum

import msgspec
import torch

from rainband.observer import Observer, TimedWork
from rainband.protocol import events
from rainband.protocol.messages import Message, Push
from rainband.record.message_cost import WARM_UP, MessageCost, message_cost
from rainband.record.wakeup_latency import WakeupLatency, measure_wakeup, read_all
from rainband.runtimes.config import RunConfig
from rainband.runtimes.processes.launcher import Launcher
from rainband.runtimes.processes.zygote import Zygote
from rainband.runtimes.simulation.cluster import Notes, SimulatedCluster
from rainband.runtimes.simulation.gradients import GradientCompute
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.runtimes.simulation.run import make_scenario, settings_of
from rainband.runtimes.simulation.worker import SimulatedCompute
from rainband.server.server import Server
from rainband.strategy import Batch
from rainband.worker.worker import ModuleWorker

PRELOAD = ("torch", "torch._dynamo", "rainband.record.calibrate")
TURNS = 5  # of measuring alone, then together
PIECES = ("compute", "push", "step", "apply", "gather", "read")  # of work in a step
ENDLESS = 1_000_000  # epochs: a measurement must not reach the end of the data
IN_MEMORY_S = 1e-6  # a message arrives at once; sending, waking up and reading are in other costs
INSTANT = ClusterModel(NetworkModel(latency_s=0.0), ComputeModel(kind="constant", step_s=1.0), NodeModel())


class Measurements(msgspec.Struct, frozen=True):
    """Seconds of each kind of work in a step, as one process measured them."""

    compute_s: list[float]
    push_s: list[float]  # a worker checks a gradient and copies it to where it is sent from
    step_s: list[float]  # its own step, if the strategy has one
    apply_s: list[float]  # a server: per block, with an optimizer step
    gather_s: list[float]  # a server: per block, without a step: the gradient is only added to others
    read_s: list[float]  # a worker copies a block
    model_bytes: int
    num_blocks: int


def calibrate(config: RunConfig, steps: int = 40) -> ClusterModel:
    """Measure a task and strategy on this machine.

    Measurements alone and together alternate, so that a slow moment of the machine affects both.
    """
    num_cores = len(os.sched_getaffinity(0))
    zygote = Zygote.start(PRELOAD)
    crowd = min(2, num_cores)
    meters = [Meter(zygote, config) for _ in range(max(crowd, min(config.num_workers, 2 * num_cores)))]
    try:
        alone, together = [], []
        for _ in range(TURNS):
            alone.append(measure_together(meters[:1], -(-steps // TURNS))[0])
            together += measure_together(meters, -(-steps // TURNS))
        wakeup = measure_wakeup(zygote)
    finally:
        for meter in meters:
            meter.close()
        zygote.close(1.0)
    num_busy = min(len(meters), num_cores)
    return assemble(joined(alone), together, num_busy, num_cores, wakeup, short_run(config, num_busy, steps))


def short_run(config: RunConfig, num_workers: int, steps: int) -> MessageCost:
    """Run for some steps in real processes; returns the cost of a message."""
    with tempfile.TemporaryDirectory() as folder:
        config = msgspec.structs.replace(
            config,
            num_workers=num_workers,
            epochs=ENDLESS,
            eval_every_s=0.0,
            failure_timeout_s=1.0,  # progress events are five times as frequent
            directory=folder,
            message_cost=True,
            timeline=False,
            record=False,
        )

        def view(event: events.AnyEvent) -> None:
            enough = isinstance(event, events.Progress) and event.batches_done >= num_workers * (2 * WARM_UP + steps)
            if enough and not launcher.interrupts:
                launcher.stop_soon()

        launcher = Launcher(config, view)
        with launcher.signals():
            result = launcher.run()
        if launcher.signal:
            raise KeyboardInterrupt
        if result.outcome != "stopped":
            raise ValueError(f"the run to measure {result.outcome}: {result.reason}")
        return message_cost(folder)


def joined(parts: list[Measurements]) -> Measurements:
    """Concatenate measurements of one process."""
    seconds = {f"{name}_s": [t for part in parts for t in getattr(part, f"{name}_s")] for name in PIECES}
    return Measurements(**seconds, model_bytes=parts[0].model_bytes, num_blocks=parts[0].num_blocks)


def assemble(
    alone: Measurements,
    together: list[Measurements],
    num_busy: int,
    num_cores: int,
    wakeup: WakeupLatency,
    message_cost: MessageCost,
) -> ClusterModel:
    """Return the model of one machine; `num_busy` of its cores were busy in the measurements together."""
    if not alone.apply_s:  # full batch: pushes are only added up, and steps are commands
        alone = msgspec.structs.replace(alone, apply_s=alone.gather_s, gather_s=[])
    for work in ("compute_s", "push_s", "apply_s", "read_s"):
        if not _trimmed_mean(getattr(alone, work)):
            raise ValueError(f"too few steps to measure {work.removesuffix('_s')}: try twice as many with --steps.")
    slower = max(1.0, _trimmed_mean([t for one in together for t in one.compute_s]) / _trimmed_mean(alone.compute_s))
    crowding = (slower - 1) / (num_busy - 1) if num_busy > 1 else 0.0
    block_bytes = alone.model_bytes / alone.num_blocks
    # The machine may have been faster or slower in the short run.
    pace = _trimmed_mean(alone.compute_s) / message_cost.compute_s
    nodes = NodeModel(
        apply_bytes_per_s=block_bytes / _trimmed_mean(alone.apply_s),
        gather_bytes_per_s=block_bytes / _trimmed_mean(alone.gather_s) if _trimmed_mean(alone.gather_s) else 0.0,
        read_bytes_per_s=block_bytes / _trimmed_mean(alone.read_s),
        push_bytes_per_s=alone.model_bytes / (_trimmed_mean(alone.push_s) + _trimmed_mean(alone.step_s)),
        pull_bytes_per_s=block_bytes / _trimmed_mean(alone.read_s),
        message_s=pace * message_cost.server_s,
        worker_message_s=pace * message_cost.worker_s,
        shared_memory=True,
        cores=num_cores,
        crowding=crowding,
        wake_s=wakeup.wake_s,
        moves=wakeup.moves,
    )
    trace = tuple(round(t, 7) for t in alone.compute_s)
    network = NetworkModel(latency_s=IN_MEMORY_S, bytes_per_s=1e10)
    return ClusterModel(
        network, ComputeModel(kind="trace", trace_s=trace, step_s=_trimmed_mean(alone.compute_s)), nodes
    )


def _trimmed_mean(values: list[float]) -> float:
    """Return the mean without the fastest and the slowest tenth."""
    ordered = sorted(values)
    middle = ordered[len(ordered) // 10 : len(ordered) - len(ordered) // 10]
    return fsum(middle) / len(middle) if middle else 0.0


class Meter:
    """A measuring process, which measures on request."""

    def __init__(self, zygote: Zygote, config: RunConfig) -> None:
        theirs_in, self.asks = os.pipe()
        self.answers, theirs_out = os.pipe()
        job = msgspec.msgpack.encode(config)
        zygote.spawn("rainband.record.calibrate:measure_main", job, "rainband calibrate", [theirs_in, theirs_out], 1)
        os.close(theirs_in)
        os.close(theirs_out)

    def ask(self, steps: int) -> None:
        os.write(self.asks, steps.to_bytes(4, "little"))

    def close(self) -> None:
        """Close the pipes; the process ends when it can receive no request any more."""
        os.close(self.asks)
        os.close(self.answers)

    def answer(self) -> Measurements:
        length = int.from_bytes(read_all(self.answers, 4), "little")
        return msgspec.msgpack.decode(read_all(self.answers, length), type=Measurements)


def measure_together(meters: list[Meter], steps: int) -> list[Measurements]:
    """Measure with all processes at the same time."""
    for meter in meters:
        meter.ask(steps)
    return [meter.answer() for meter in meters]


def measure_main(job: bytes, fds: list[int]) -> None:
    """Measure on request, until the pipe is closed: the entry of a measuring process."""
    torch.set_num_threads(1)
    stopwatch = Stopwatch(msgspec.msgpack.decode(job, type=RunConfig))
    asks, answers = fds
    with open(asks, "rb") as reader, open(answers, "wb") as writer:
        while asked := reader.read(4):
            data = msgspec.msgpack.encode(stopwatch.measure(int.from_bytes(asked, "little")))
            writer.write(len(data).to_bytes(4, "little") + data)
            writer.flush()


class Stopwatch:
    """Times each kind of work in a simulated run."""

    def __init__(self, config: RunConfig) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in PIECES}
        config = msgspec.structs.replace(config, epochs=ENDLESS)
        scenario = make_scenario(config)
        scenario = replace(scenario, make_compute=partial(computing_as_in_a_process, scenario.make_compute))
        notes = Notes(observe=lambda peer: WorkTimer(self.seconds))
        self.runtime = SimulatedCluster(scenario, settings_of(config, ""), INSTANT, notes)
        self.runtime.start()
        self._run(WARM_UP)

    def _run(self, steps: int) -> None:
        while len(self.seconds["compute"]) < steps:
            self.runtime.run(until_s=self.runtime.clock.now + 1.0)

    def measure(self, steps: int) -> Measurements:
        self.seconds.update({name: [] for name in PIECES})
        self._run(steps)
        blocks = self.runtime.coordinator_node.block_bytes
        times = {f"{name}_s": seconds for name, seconds in self.seconds.items()}
        return Measurements(**times, model_bytes=sum(blocks), num_blocks=len(blocks))


def computing_as_in_a_process(make_compute: Callable[[], SimulatedCompute]) -> SimulatedCompute:
    """Make a worker's compute write gradients block by block, as a process does: that is timed with the push."""
    compute = make_compute()
    assert isinstance(compute, GradientCompute)
    compute.writes_once = False
    return compute


class WorkTimer(Observer):
    """Adds the processor time of each kind of one node's work to `seconds`."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self.seconds = seconds
        self.began_s: list[float] = []  # of each kind of work that has not ended, the innermost last
        self.server: Server | None = None
        self.updates = 0  # of the server, before the message that it handles now

    def _begin(self) -> None:
        self.began_s.append(time.process_time())

    def _end(self, work: str) -> None:
        self.seconds[work].append(time.process_time() - self.began_s.pop())

    def computing(self, worker: ModuleWorker, batch: Batch) -> None:
        self._begin()

    def computed(self, worker: ModuleWorker, batch: Batch) -> None:
        self._end("compute")

    def began(self, work: TimedWork) -> None:
        self._begin()

    def ended(self, work: TimedWork) -> None:
        self._end(work)

    def assigned(self, server: Server) -> None:
        self.server = server

    def receiving(self, message: Message) -> None:
        if self.server is not None and isinstance(message, Push):
            self.updates = self.server.updates
            self._begin()

    def received(self, message: Message) -> None:
        if self.server is not None and isinstance(message, Push):
            self._end("apply" if self.server.updates > self.updates else "gather")


def describe(config: RunConfig, model: ClusterModel) -> str:
    """Return the comment at the top of the network file."""
    step_ms = 1e3 * model.compute.step_s
    return (
        f"This machine, measured with {config.task} and {config.strategy}: a gradient takes {step_ms:.2f} ms alone, "
        f"{100 * model.nodes.crowding:.0f} % longer for each other busy core."
    )
