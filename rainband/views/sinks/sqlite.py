"""Write metrics.sqlite, tables of progress, workers and results for queries.

select at_s, loss from progress
select worker, avg(samples_per_s), max(waited_s) from workers group by worker
"""

from __future__ import annotations

import sqlite3
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from rainband.protocol.events import AnyEvent, Progress, RunEnded

TABLES = """
create table progress (
    at_s real, batches_done integer, samples_done integer, loss real,
    samples_per_s real, staleness_mean real, staleness_max integer
);
create table workers (at_s real, worker integer, samples_per_s real, waited_s real);
create table results (name text, value real);
"""
CLOSE_TIMEOUT_S = 1.0  # to wait at the end for a reader that holds the lock


class Sqlite:
    """A sink that keeps rows in memory while a reader has locked the file, so that the run never waits for it."""

    def __init__(self, directory: Path) -> None:
        self.waiting: list[tuple[str, tuple[object, ...]]] = []
        self.connection = sqlite3.connect(directory / "metrics.sqlite", timeout=0, isolation_level=None)
        # No fsync: a killed process loses nothing by that, and events.jsonl has all events.
        self.connection.execute("pragma synchronous = off")
        self.connection.executescript(TABLES)

    def write(self, event: AnyEvent) -> None:
        rows = _rows(event)
        if rows:
            self.waiting += rows
            self._write_waiting()

    def close(self) -> None:
        self.connection.execute(f"pragma busy_timeout = {int(CLOSE_TIMEOUT_S * 1000)}")
        self._write_waiting()
        self.connection.close()

    def _write_waiting(self) -> None:
        try:
            self.connection.execute("begin immediate")
        except sqlite3.OperationalError:
            return  # locked: written with the next rows, or at the end
        for statement, rows in groupby(self.waiting, key=itemgetter(0)):  # one call for thousands of workers
            self.connection.executemany(statement, [values for _, values in rows])
        try:
            self.connection.execute("commit")
        except sqlite3.OperationalError:
            self.connection.execute("rollback")
            return
        self.waiting.clear()


def _rows(event: AnyEvent) -> list[tuple[str, tuple[object, ...]]]:
    match event:
        case Progress():
            return [_progress(event), *_workers(event)]
        case RunEnded():
            return [("insert into results values (?, ?)", pair) for pair in event.metrics.items()]
    return []


def _progress(event: Progress) -> tuple[str, tuple[object, ...]]:
    values = (
        event.at_s,
        event.batches_done,
        event.samples_done,
        event.loss,
        sum(event.samples_per_s.values()),
        event.staleness_mean,
        event.staleness_max,
    )
    return "insert into progress values (?, ?, ?, ?, ?, ?, ?)", values


def _workers(event: Progress) -> list[tuple[str, tuple[object, ...]]]:
    return [
        ("insert into workers values (?, ?, ?, ?)", (event.at_s, worker, rate, event.waited_s.get(worker)))
        for worker, rate in event.samples_per_s.items()
    ]
