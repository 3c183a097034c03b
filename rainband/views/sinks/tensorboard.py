"""Write curves over the samples done for TensorBoard, in the folder tensorboard/ of the run.

tensorboard --logdir runs
"""

from __future__ import annotations

import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rainband.options import OptionError, opt
from rainband.protocol.events import AnyEvent, Progress, RunEnded, RunStarted

FLUSH_S = 5  # an open page shows new values after this time


class TensorBoard:
    """A sink for TensorBoard; needs the package tensorboard."""

    def __init__(self, directory: Path) -> None:
        check_installed()
        self.library = _Library()
        self.writer = self.library.EventFileWriter(str(directory / "tensorboard"), flush_secs=FLUSH_S)
        self.began_s = 0.0  # Unix time

    def write(self, event: AnyEvent) -> None:
        match event:
            case RunStarted(started_at=str(text)) if text:
                self.began_s = datetime.datetime.fromisoformat(text).timestamp()
            case Progress():
                self._add(event.at_s, event.samples_done, _curves(event))
            case RunEnded():
                known = {f"result/{name}": v for name, v in event.metrics.items() if v is not None}
                self._add(event.at_s, event.samples, known)

    def close(self) -> None:
        self.writer.close()

    def _add(self, at_s: float, samples_done: int, values: dict[str, float]) -> None:
        summary = self.library.Summary(
            value=[self.library.Summary.Value(tag=name, simple_value=v) for name, v in values.items()]
        )
        self.writer.add_event(self.library.Event(wall_time=self.began_s + at_s, step=samples_done, summary=summary))


def _curves(event: Progress) -> dict[str, float]:
    curves = {
        "samples_per_s": sum(event.samples_per_s.values()),
        "staleness/mean": event.staleness_mean,
        "staleness/max": float(event.staleness_max),
    }
    if event.loss is not None:
        curves["loss"] = event.loss
    if event.disagreement is not None:
        curves["disagreement"] = event.disagreement
    curves |= {f"worker_{i}/samples_per_s": rate for i, rate in event.samples_per_s.items()}
    return curves | {f"worker_{i}/waited_s": waited_s for i, waited_s in event.waited_s.items()}


class _Library:
    """The parts of tensorboard that are used: its own writer, because torch's would import torch."""

    def __init__(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.Event: Any = Event
        self.Summary: Any = Summary
        self.EventFileWriter: Any = EventFileWriter


def check_installed() -> None:
    """Raise an error if tensorboard is not installed, without importing it, which takes seconds."""
    if find_spec("tensorboard") is None:
        raise OptionError(
            f"{opt('tensorboard', True)} requires the package tensorboard: type pip install 'rainband[tensorboard]', "
            f"or use {opt('csv', True)}, which requires nothing."
        )
