"""Sinks read events only, and never harm the run."""

from __future__ import annotations

import csv
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rainband.protocol.events import AnyEvent
from rainband.views.sinks import SafeSink
from rainband.views.sinks.csv import COLUMNS, Csv
from rainband.views.sinks.sqlite import Sqlite
from rainband.views.sinks.tensorboard import TensorBoard, check_installed
from tests.synthetic_runs import ended, progress, started, whole_run


def ask(directory: Path, question: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(directory / "metrics.sqlite")) as connection:
        return connection.execute(question).fetchall()


def test_the_table_has_a_row_for_each_progress_event_with_sums_over_the_workers(tmp_path: Path) -> None:
    sink = Csv(tmp_path)
    for event in (started(), progress(1.5, 64, waited=(0.25, 0.5)), progress(2.5, 128, loss=None), ended()):
        sink.write(event)
    sink.close()
    rows = list(csv.reader((tmp_path / "progress.csv").read_text().splitlines()))
    assert rows == [
        list(COLUMNS),
        ["1.5", "2", "64", "1.0", "100.0", "0.5", "2", "0.75"],
        ["2.5", "4", "128", "", "100.0", "0.5", "2", "0.0"],
    ]


def test_a_row_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    sink = Csv(tmp_path)
    sink.write(progress(1.0, 64))
    assert len((tmp_path / "progress.csv").read_text().splitlines()) == 2
    sink.close()


def test_the_database_answers_for_the_run_and_for_each_worker(tmp_path: Path) -> None:
    sink = Sqlite(tmp_path)
    for event in (progress(1.0, 64, loss=None), progress(2.0, 128, waited=(0.5, 1.0)), ended(accuracy=0.9)):
        sink.write(event)
    sink.close()
    assert ask(tmp_path, "select at_s, samples_done, loss, samples_per_s from progress") == [
        (1.0, 64, None, 100.0),
        (2.0, 128, 1.0, 100.0),
    ]
    assert ask(tmp_path, "select worker, max(waited_s) from workers group by worker") == [(0, 0.5), (1, 1.0)]
    assert ask(tmp_path, "select * from results") == [("accuracy", 0.9)]


def test_someone_who_reads_for_long_does_not_hold_up_the_run_and_nothing_is_missing_later(
    tmp_path: Path,
) -> None:
    sink = Sqlite(tmp_path)
    with closing(sqlite3.connect(tmp_path / "metrics.sqlite", isolation_level=None)) as reader:
        reader.execute("begin immediate")
        sink.write(progress(1.0, 64))
        reader.execute("rollback")
        reader.execute("begin")
        reader.execute("select * from progress").fetchall()  # a shared lock: writing may begin, not end
        sink.write(progress(2.0, 128))
    sink.write(progress(3.0, 192))
    sink.close()
    assert ask(tmp_path, "select at_s from progress") == [(1.0,), (2.0,), (3.0,)]


class Failing:
    """A sink on a full disk."""

    def __init__(self) -> None:
        self.tried = 0

    def write(self, event: AnyEvent) -> None:
        self.tried += 1
        raise OSError("no space left")

    def close(self) -> None:
        self.tried += 1


def test_a_sink_that_fails_is_reported_once_and_left_out() -> None:
    sink, told = Failing(), list[str]()
    guarded = SafeSink(lambda: sink, told.append)
    for event in whole_run():
        guarded.write(event)
    guarded.close()
    assert sink.tried == 1
    assert told == ["Failing stopped writing (OSError: no space left); the run continues."]


def test_a_sink_that_cannot_be_opened_is_reported_once() -> None:
    told: list[str] = []

    def open_sink() -> Failing:
        raise PermissionError("not allowed")

    guarded = SafeSink(open_sink, told.append)
    guarded.write(started())
    guarded.write(ended())
    guarded.close()
    assert told == ["a sink stopped writing (PermissionError: not allowed); the run continues."]


def test_where_tensorboard_is_missing_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rainband.views.sinks.tensorboard.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'rainband\[tensorboard\]'"):
        check_installed()


def test_tensorboard_gets_curves_over_the_samples_done(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path)
    for event in (started(), progress(1.5, 64, loss=0.5), ended(accuracy=0.5, broken=None)):
        sink.write(event)
    sink.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    [loss] = read.Scalars("loss")
    assert (loss.step, loss.value) == (64, 0.5)
    assert [point.value for point in read.Scalars("worker_1/samples_per_s")] == [40.0]
    assert [point.value for point in read.Scalars("result/accuracy")] == [0.5]
