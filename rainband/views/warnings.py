"""Warnings: before a run, about settings that are likely to fail; after it, that training diverged.

A run that diverged ends like any other, but its model is of no use.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from statistics import median

from rainband.plugins import load_strategy
from rainband.runtimes.advice import straggler_among, straggler_of, warnings_for
from rainband.runtimes.config import RunConfig
from rainband.runtimes.result import diverged
from rainband.strategy import Straggler
from rainband.views.formatting import count, percent, whole
from rainband.views.history import RunSoFar, is_run, read_run

CODEC_IN_MEMORY = (
    "codec {} costs time here and saves none, because all processes of this machine share memory. It pays between "
    "machines (--listen); here it shows what it does to the accuracy."
)
NO_PULLS = (
    "--pull-codec {} is not used here, because workers read the parameters in the memory of this machine. It is used "
    "between machines (--listen), and with --transport tcp."
)
PREFIX, WIDTH = "WARNING: ", 100
MAX_RUNS_READ = 5  # the newest; a straggler in older runs is not found
MAX_BYTES_READ = 1 << 22  # of events.jsonl; reading more takes longer than a warning is worth


def before_run(config: RunConfig, runs: Path) -> list[str]:
    """Return the warnings for a run to be started; earlier runs in `runs` tell which worker is slow."""
    strategy = load_strategy(config.strategy, config.strategy_settings)
    straggler = straggler_of(config) or (last_straggler(config, runs) if config.runtime == "processes" else None)
    called = "replicas of the model" if config.stage_plan else "workers"
    texts = warnings_for(strategy, config.num_replicas, straggler, called)
    if config.runtime == "processes" and not config.listen and config.transport != "tcp":
        texts += [CODEC_IN_MEMORY.format(config.codec)] if config.codec else []
        texts += [NO_PULLS.format(config.pull_codec)] if config.pull_codec else []
    return [line for text in texts for line in _wrapped(text)]


def last_straggler(config: RunConfig, runs: Path) -> Straggler | None:
    """Return the straggler of the last run of the same task with the same number of workers."""
    newest = sorted(runs.iterdir(), reverse=True) if runs.is_dir() else []  # their names begin with the time
    for directory in [path for path in newest if is_run(path)][:MAX_RUNS_READ]:
        if (directory / "events.jsonl").stat().st_size > MAX_BYTES_READ:
            continue
        run = read_run(directory)
        settings = (run.config.get("task"), run.config.get("num_workers"), run.config.get("runtime"))
        if settings != (config.task, config.num_workers, "processes") or run.config.get("sim", {}).get("compute"):
            continue
        measured: dict[int, list[float]] = {}
        for progress in run.so_far.progress:
            for worker, rate in progress.samples_per_s.items():
                measured.setdefault(worker, []).append(rate)
        rates = {worker: median(rates) for worker, rates in measured.items()}
        return straggler_among(rates, f"in the run {run.name}")
    return None


def warnings(so_far: RunSoFar) -> list[str]:
    """Return the warnings for a run that has ended; none if its failure is reported anyway."""
    ended = so_far.ended
    if ended is None or ended.outcome == "failed":
        return []
    if check := diverged(ended.accounting):
        skipped = f"{whole(check.skipped)} of {count(check.batches, 'batch')}"
        share = percent(check.skipped / check.batches)
        why = f"{skipped} ({share}) were skipped, because their gradients were not finite"
        return _wrapped(f"training diverged: {why}. {_advice(so_far)}")
    if unknown := [name for name, value in ended.metrics.items() if value is None or not math.isfinite(value)]:
        return _wrapped(f"the model is of no use: {' and '.join(unknown)} is not finite. {_advice(so_far)}")
    return []


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(f"{PREFIX}{text}", WIDTH, subsequent_indent=" " * len(PREFIX), break_on_hyphens=False)


def _advice(so_far: RunSoFar) -> str:
    settings = so_far.started.settings if so_far.started else {}
    lr, momentum = settings.get("lr"), settings.get("momentum")
    smaller = "a smaller learning rate"
    if isinstance(lr, int | float) and lr:
        smaller += f", such as lr={lr / 10:g} instead of {lr:g}"
    without = ", or momentum=0" if momentum else ""
    return f"Try {smaller}{without}; and check the data for NaN."
