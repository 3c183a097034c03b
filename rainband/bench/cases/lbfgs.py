"""Sandblaster with two workers on two cores: speed against L-BFGS in one process, and traffic.

The model is compute-bound: an MLP with 0.7 million parameters and 16,384 samples. The baseline is torch.optim.LBFGS
with a closure over the same batches, on one thread, as each worker has, and on two. Two independent such processes at
once show the limit of two cores. Seconds are per evaluation of the loss, because two line searches need not evaluate
the same steps. In the rows with a slow worker, every step takes a fixed time, as on a device of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from rainband.bench.baselines.lbfgs import PlainOrder
from rainband.bench.harness.processes import PRELOAD, BenchProcess
from rainband.bench.harness.rows import Effort, Row, at_least, at_most
from rainband.bench.harness.runs import run_to_measure
from rainband.coordinator import work_queue
from rainband.observer import Observer
from rainband.protocol import events, messages
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.processes.launcher import Launcher
from rainband.runtimes.processes.zygote import Zygote
from rainband.runtimes.run import RunResult, View
from rainband.tasks.digits import Digits
from rainband.transports.frames import PREFIX_BYTES

SIZES = ("0.1M", "0.7M")
SAMPLES = 16384
FULL_HISTORY = 14  # iterations until each direction uses all its pairs
SETTINGS = {"gradient_tolerance": 0.0, "loss_tolerance": 0.0}  # it must not stop early
N_PUSH = 32
MIN_SPEEDUP, MAX_KB = 1.7, 10.0
FULL_BATCH = (
    *(messages.Command, messages.Answer, messages.Evaluated, messages.AssignItems, messages.ItemsDelivered),
    *(messages.LeaseRequest, messages.Return),
)
PACED_WORKERS, STEP_S, FACTOR, PACED_N_PUSH = 4, 0.02, 5.0, 2  # one of four workers is five times slower
NEVER = 1e9  # times the usual time of a work item


def run(effort: Effort) -> Iterator[Row]:
    repeats, iterations = (3, 6) if effort == "full" else (1, 3)
    yield from _speed(repeats, iterations)
    yield from _traffic()
    yield from _slow_worker(iterations)


def _speed(repeats: int, iterations: int) -> list[Row]:
    plain: dict[int, list[float]] = {1: [], 2: []}  # threads -> seconds
    at_once, ours = [], []
    zygote = Zygote.start((*PRELOAD, "rainband.bench.baselines.lbfgs"))
    try:
        for _ in range(repeats):  # in turns, so that a slow minute of the machine hits all
            for threads, seconds in plain.items():
                seconds += _plain(zygote, iterations, threads)
            at_once.append(1 / sum(1 / seconds for seconds in _plain(zygote, iterations, 1, processes=2)))
            ours.append(_sandblaster("mlp", _mlp(SIZES[-1]), iterations, N_PUSH).evaluation_s)
    finally:
        zygote.close(1.0)
    name = f"Sandblaster, 2 workers, {SIZES[-1]} parameters"
    one, two = (median(_ratios(plain[threads], ours)) for threads in (1, 2))
    return [
        Row("torch.optim.LBFGS, one process, one thread", 1000 * median(plain[1]), "ms/evaluation"),
        Row("torch.optim.LBFGS, one process, two threads", 1000 * median(plain[2]), "ms/evaluation"),
        Row("two such processes at once, the limit", 1000 * median(at_once), "ms/evaluation"),
        Row(name, 1000 * median(ours), "ms/evaluation"),
        at_least(name, one, MIN_SPEEDUP, "one process, one thread"),
        Row("two such processes at once", median(_ratios(plain[1], at_once)), "x", "one of them alone"),
        Row(name, median(_ratios(at_once, ours)), "x", "two such processes at once"),
        Row(name, two, "x", "one process, two threads"),
    ]


def _ratios(theirs: list[float], ours: list[float]) -> list[float]:
    return [a / b for a, b in zip(theirs, ours, strict=True)]


def _plain(zygote: Zygote, iterations: int, threads: int, processes: int = 1) -> list[float]:
    """Return the seconds of one evaluation in each of several processes that run at the same time."""
    order, entry = PlainOrder(SIZES[-1], SAMPLES, iterations, threads), "rainband.bench.baselines.lbfgs:plain_main"
    started = [BenchProcess(zygote, entry, order, "L-BFGS") for _ in range(processes)]
    return [process.result()[0] for process in started]


def _traffic() -> list[Row]:
    """Measure the traffic of an iteration with the coordinator, and of a pass over the data with the servers."""
    found = {size: _sandblaster("mlp", _mlp(size), FULL_HISTORY, N_PUSH) for size in SIZES}
    downpour = _downpour_bytes(SIZES[0])
    name = "traffic of the coordinator, 2 servers, {} parameters"
    return [
        *(at_most(name.format(size), f.coordination_kb, MAX_KB, "", "KB/iteration") for size, f in found.items()),
        Row("traffic of a pass over the data, Downpour, 0.1M parameters", downpour / 1e6, "MB"),
        Row("traffic of a pass over the data, Sandblaster, 0.1M parameters", found[SIZES[0]].pass_bytes / 1e6, "MB"),
        Row(
            f"traffic of a pass, Downpour, with {N_PUSH} batches per push of Sandblaster",
            downpour / found[SIZES[0]].pass_bytes,
            "x",
            "Sandblaster",
        ),
    ]


def _slow_worker(iterations: int) -> list[Row]:
    """Measure an evaluation with a slow worker, against dividing the data equally beforehand.

    Then each worker has one work item, a quarter of the batches, and idle workers compute no copies of it.
    """
    even = _sandblaster("digits", {}, iterations, PACED_N_PUSH, slow_factor=1.0).evaluation_s
    ours = _sandblaster("digits", {}, iterations, PACED_N_PUSH, slow_factor=FACTOR).evaluation_s
    quarter = -(-len(Digits().data()) // Digits().batch_size // PACED_WORKERS)
    with no_copies():
        static = _sandblaster("digits", {}, iterations, quarter, slow_factor=FACTOR).evaluation_s
    return [
        Row("4 equal workers, on demand", 1000 * even, "ms/evaluation"),
        Row("one of 4 workers 5 times slower, on demand", 1000 * ours, "ms/evaluation"),
        Row("one of 4 workers 5 times slower, a quarter each", 1000 * static, "ms/evaluation"),
        at_least("one of 4 workers 5 times slower, on demand, speedup", static / ours, 1.0, "a quarter each"),
    ]


@contextmanager
def no_copies() -> Iterator[None]:
    """Let idle workers compute no copies of overdue work items."""
    before, work_queue.OVERDUE = work_queue.OVERDUE, NEVER
    try:
        yield
    finally:
        work_queue.OVERDUE = before


def _mlp(size: str) -> dict[str, Any]:
    return {"parameters": size, "samples": SAMPLES}


class FullBatchTraffic(Observer):
    """Counts the bytes on the wire of the messages with which the coordinator directs a full-batch strategy."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def receiving(self, message: messages.Message) -> None:
        if isinstance(message, FULL_BATCH):
            self.num_bytes += PREFIX_BYTES + len(messages.encode(message))

    def sent(self, message: messages.Message) -> None:
        self.receiving(message)


@dataclass(frozen=True)
class LbfgsResult:
    """The result of a run."""

    evaluation_s: float  # including all work between two evaluations
    coordination_kb: float  # of the last iteration, to and from the coordinator
    pass_bytes: float  # of one evaluation, to and from the servers


def _sandblaster(
    task: str, task_settings: dict[str, Any], iterations: int, n_push: int, slow_factor: float | None = None
) -> LbfgsResult:
    """Run two workers at full speed, or with `slow_factor` four whose steps take a fixed time, the first one slower."""
    traffic = FullBatchTraffic()
    reports: list[events.IterationDone] = []
    coordination_bytes: list[int] = []  # so far, after each iteration
    moved_bytes: list[int] = []

    def view(event: events.AnyEvent) -> None:
        if isinstance(event, events.IterationDone):
            reports.append(event)
            coordination_bytes.append(traffic.num_bytes)
        elif isinstance(event, events.Progress):
            moved_bytes.append(event.pushed_bytes + event.pulled_bytes)

    workers, compute = 2, None
    if slow_factor is not None:
        workers = PACED_WORKERS
        compute = {"kind": "constant", "step_s": STEP_S, "slow_workers": (0,), "slow_factor": slow_factor}

    def run(config: RunConfig, view: View) -> RunResult:
        launcher = Launcher(config, view, observer=traffic)
        with launcher.signals():
            return launcher.run()

    config = RunConfig(
        task=task,
        task_settings=task_settings,
        strategy="sandblaster",
        strategy_settings={"iterations": iterations, "n_push": n_push, **SETTINGS},
        num_workers=workers,
        num_servers=2,
        sim=SimSettings() if compute is None else SimSettings(compute=compute),
    )
    run_to_measure(config, view, run)
    if len(reports) < 2:
        raise RuntimeError("the run ended after one iteration, nothing to measure: use more iterations.")
    first, last = reports[0], reports[-1]
    return LbfgsResult(
        evaluation_s=(last.at_s - first.at_s) / (last.evaluations - first.evaluations),
        coordination_kb=(traffic.num_bytes - coordination_bytes[-2]) / 1000,
        pass_bytes=moved_bytes[-1] / last.evaluations,
    )


def _downpour_bytes(size: str) -> float:
    """Return the bytes to and from the servers in one epoch."""
    reports: list[events.Progress] = []

    def view(event: events.AnyEvent) -> None:
        if isinstance(event, events.Progress):
            reports.append(event)

    settings = _mlp(size)
    run_to_measure(
        RunConfig(task="mlp", task_settings=settings, strategy="downpour", num_workers=2, num_servers=2, epochs=1), view
    )
    return reports[-1].pushed_bytes + reports[-1].pulled_bytes
