"""Write progress.csv, a table for spreadsheets with one row for each Progress event."""

from __future__ import annotations

import csv
from pathlib import Path

from rainband.protocol.events import AnyEvent, Progress

COLUMNS = (
    "at_s",
    "batches_done",
    "samples_done",
    "loss",
    "samples_per_s",
    "staleness_mean",
    "staleness_max",
    "waited_s",
)


class Csv:
    """A sink that flushes each row, so that readers never see part of one."""

    def __init__(self, directory: Path) -> None:
        self.file = (directory / "progress.csv").open("w", newline="", encoding="utf-8")
        self.writer = csv.writer(self.file)
        self.writer.writerow(COLUMNS)
        self.file.flush()

    def write(self, event: AnyEvent) -> None:
        if isinstance(event, Progress):
            self.writer.writerow(_row(event))
            self.file.flush()

    def close(self) -> None:
        self.file.close()


def _row(progress: Progress) -> tuple[float | int | str, ...]:
    return (
        round(progress.at_s, 3),
        progress.batches_done,
        progress.samples_done,
        "" if progress.loss is None else progress.loss,
        round(sum(progress.samples_per_s.values()), 3),
        progress.staleness_mean,
        progress.staleness_max,
        round(sum(progress.waited_s.values()), 3),
    )
