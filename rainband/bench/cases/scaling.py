"""Throughput of Downpour with two workers on two cores, against one plain process and against DDP/gloo."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rainband.bench.baselines.data_parallel import TrainOrder
from rainband.bench.harness.processes import PRELOAD, BenchProcess, free_port
from rainband.bench.harness.rows import Effort, Row, at_least
from rainband.bench.harness.runs import run_to_measure
from rainband.protocol import events
from rainband.runtimes.config import RunConfig
from rainband.runtimes.processes.zygote import Zygote

TRAIN = "rainband.bench.baselines.data_parallel:train_main"
SIZES = ("0.7M", "5.8M", "20M")
TARGETS = {"5.8M": (1.5, 1.3)}  # against one process, against DDP


def run(effort: Effort) -> Iterator[Row]:
    repeats, seconds = (3, 6.0) if effort == "full" else (1, 3.0)
    for size in SIZES:
        yield from _size(size, repeats, seconds)


def _size(size: str, repeats: int, seconds: float) -> list[Row]:
    plain, ddp, ours = [], [], []
    zygote = Zygote.start(PRELOAD)
    try:
        for _ in range(repeats):  # in turns, so that a slow minute of the machine hits all
            plain.append(_plain(zygote, size, seconds))
            ddp.append(_ddp(zygote, size, seconds))
            ours.append(_downpour(size, seconds))
    finally:
        zygote.close(1.0)
    against_one = median([a / b for a, b in zip(ours, plain, strict=True)])
    against_ddp = median([a / b for a, b in zip(ours, ddp, strict=True)])
    name = f"Downpour, 2 workers, {size} parameters"
    rows = [
        Row(f"one plain process, {size}", median(plain), "samples/s"),
        Row(f"DDP/gloo, 2 ranks, {size}", median(ddp), "samples/s"),
        Row(name, median(ours), "samples/s"),
    ]
    if size in TARGETS:
        one, two = TARGETS[size]
        rows.append(at_least(name, against_one, one, "one plain process"))
        return [*rows, at_least(name, against_ddp, two, "DDP/gloo")]
    return [*rows, Row(name, against_one, "x", "one plain process"), Row(name, against_ddp, "x", "DDP/gloo")]


def _plain(zygote: Zygote, size: str, seconds: float) -> float:
    return float(BenchProcess(zygote, TRAIN, TrainOrder(size, seconds), "plain").result()[0])


def _ddp(zygote: Zygote, size: str, seconds: float) -> float:
    port = free_port()
    ranks = [BenchProcess(zygote, TRAIN, TrainOrder(size, seconds, rank, port), "DDP") for rank in range(2)]
    return sum(float(rank.result()[0]) for rank in ranks)


def _downpour(size: str, seconds: float) -> float:
    """Return the samples per second between the first and the last progress report."""
    reports: list[events.Progress] = []

    def view(event: events.AnyEvent) -> None:
        if isinstance(event, events.Progress) and event.samples_done:
            reports.append(event)

    epochs = {"0.7M": 8, "5.8M": 1, "20M": 1}[size] * max(1, round(seconds / 3))
    config = RunConfig(
        task="mlp",
        task_settings={"parameters": size},
        strategy="downpour",
        strategy_settings={"optimizer": "sgd", "lr": 1e-3},
        num_workers=2,
        num_servers=1,
        epochs=epochs,
        failure_timeout_s=1.0,
    )
    run_to_measure(config, view)
    if len(reports) < 2:
        raise RuntimeError(f"the run had {len(reports)} progress reports, too few to measure.")
    first, last = reports[0], reports[-1]
    return (last.samples_done - first.samples_done) / (last.at_s - first.at_s)
