"""What to be wary of: before a run, settings that are likely to go badly; after it, that it diverged.

A run that diverged ends like any other, and its model is of no use.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from statistics import median

from rainband.plugins import load_strategy
from rainband.runtimes.advice import foreseen, straggler_among, straggler_of
from rainband.runtimes.config import RunConfig
from rainband.runtimes.result import diverged
from rainband.strategy import Straggler
from rainband.views.formatting import count, percent, whole
from rainband.views.history import RunSoFar, is_run, read_run

LOUD, WIDTH = "WARNING: ", 100
LOOKED_BACK = 5  # runs that are looked at for one like this
LONG_BYTES = 1 << 22  # of a file of events


def before(config: RunConfig, runs: Path) -> list[str]:
    """Loud lines for the beginning of a run; `runs` is where earlier ones may have shown who is slow."""
    strategy = load_strategy(config.strategy, config.strategy_settings)
    straggler = straggler_of(config) or (last_straggler(config, runs) if config.runtime == "processes" else None)
    called = "copies of the model" if config.stage_plan else "workers"
    texts = foreseen(strategy, config.num_replicas, straggler, called)
    return [line for text in texts for line in _wrapped(text)]


def last_straggler(config: RunConfig, runs: Path) -> Straggler | None:
    """Who was slow when the same task was last trained here by as many workers."""
    newest = sorted(runs.iterdir(), reverse=True) if runs.is_dir() else []  # their names begin with the time
    for directory in [path for path in newest if is_run(path)][:LOOKED_BACK]:
        if (directory / "events.jsonl").stat().st_size > LONG_BYTES:
            continue  # reading it would take longer than a warning is worth
        run = read_run(directory)
        told = (run.config.get("task"), run.config.get("num_workers"), run.config.get("runtime"))
        if told != (config.task, config.num_workers, "processes") or run.config.get("sim", {}).get("compute"):
            continue
        seen: dict[int, list[float]] = {}
        for progress in run.so_far.progress:
            for worker, rate in progress.samples_per_s.items():
                seen.setdefault(worker, []).append(rate)
        rates = {worker: median(rates) for worker, rates in seen.items()}
        return straggler_among(rates, f"in the run {run.name}")
    return None


def warnings(so_far: RunSoFar) -> list[str]:
    """Loud lines for the end of a run; none where all is well, or where its failure was told anyway."""
    ended = so_far.ended
    if ended is None or ended.outcome == "failed":
        return []
    if many := diverged(ended.accounting):
        share = percent(many.skipped / many.batches)
        what = f"{whole(many.skipped)} of {count(many.batches, 'batch')} ({share}) were skipped"
        return _wrapped(f"the training diverged: {what}, because their gradients were not finite. {_advice(so_far)}")
    unknown = [name for name, value in ended.metrics.items() if value is None or not math.isfinite(value)]
    if unknown:
        return _wrapped(f"the model is of no use: its {' and '.join(unknown)} is not finite. {_advice(so_far)}")
    return []


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(f"{LOUD}{text}", WIDTH, subsequent_indent=" " * len(LOUD), break_on_hyphens=False)


def _advice(so_far: RunSoFar) -> str:
    settings = so_far.started.settings if so_far.started else {}
    lr, momentum = settings.get("lr"), settings.get("momentum")
    smaller = "a smaller learning rate"
    if isinstance(lr, int | float) and lr:
        smaller += f", such as lr={lr / 10:g} instead of {lr:g}"
    without = ", or momentum=0" if momentum else ""
    return f"Try {smaller}{without}; and see whether there is NaN in the data."
