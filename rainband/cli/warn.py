"""What to be wary of when a run has finished: one that diverged ends like any other, and its model is of no use."""

from __future__ import annotations

import math
import textwrap

from rainband.cli.words import count, percent, whole
from rainband.history import RunSoFar
from rainband.worlds.verdict import diverged

LOUD, WIDTH = "WARNING: ", 100


def warnings(so_far: RunSoFar) -> list[str]:
    """Loud lines for the end of a run; none where all is well, or where its failure was told anyway."""
    ended = so_far.ended
    if ended is None or ended.outcome == "failed":
        return []
    if many := diverged(ended.books):
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
