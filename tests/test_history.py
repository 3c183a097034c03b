"""A run as its events tell it, and its directory read back, whatever happened to it."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rainband.coordinator.reporting import _rate
from rainband.protocol import events
from rainband.protocol.events import AnyEvent
from rainband.runtimes.config import RunConfig
from rainband.runtimes.run_directory import EventLog, OutputLog, new_directory, read_config, write_config
from rainband.views.history import RunSoFar, _middle_without, find_run, list_runs, loss_curve, read_run
from tests.synthetic_runs import a_config, ended, planned, progress, started, whole_run, write_run


def running(*story: AnyEvent) -> RunSoFar:
    return RunSoFar.from_events([started(), planned(), events.PhaseChanged(at_s=1.0, phase="running"), *story])


# ---- what is known so far ----


def test_before_any_event_nothing_is_known_and_nothing_fails() -> None:
    so_far = RunSoFar()
    assert (so_far.samples, so_far.samples_done, so_far.per_s) == (0, 0, 0.0)
    assert so_far.left_s is None and so_far.loss is None and so_far.workers() == []


def test_the_rate_is_what_all_did_in_the_last_seconds_and_gives_the_time_left() -> None:
    so_far = running(progress(10, 100), progress(11, 200), progress(12, 300))
    assert so_far.per_s == 100.0
    assert so_far.left_s == 17.0  # 1,700 of 2,000 samples are left


def test_two_looks_that_follow_at_once_make_no_absurd_rate() -> None:
    so_far = running(progress(10.999, 0), progress(11, 500))
    assert so_far.per_s == 50.0  # it began after 1 s
    assert running(progress(1, 0)).per_s == 0.0


def test_a_run_trains_from_its_first_step_to_its_last() -> None:
    phases = [(2.0, "running"), (17.0, "flushing"), (19.0, "concluding")]
    so_far = RunSoFar.from_events(
        [started(), *(events.PhaseChanged(at_s=t, phase=phase) for t, phase in phases), ended()]
    )
    assert (so_far.training.seconds, so_far.at_s) == (15.0, 20.0)
    assert running().training.seconds == 0.0


def test_loops_with_loaders_of_their_own_count_steps() -> None:
    own = [msgspec.structs.replace(progress(t, 0, samples=0), batches_done=30 * t) for t in (4, 5, 6)]
    so_far = RunSoFar.from_events([started(), events.PhaseChanged(at_s=1.0, phase="running"), *own])
    assert (so_far.unit, so_far.done, so_far.per_s) == ("step", 180, 30.0)
    assert (RunSoFar.from_events(whole_run()).unit, RunSoFar.from_events(whole_run()).done) == ("sample", 2000)


def test_only_the_last_six_progress_events_make_the_rate() -> None:
    so_far = running(progress(0, 0), *(progress(10 + s, 1000 + 10 * s) for s in range(6)))
    assert so_far.per_s == 10.0


def test_the_loss_is_the_newest_one_known() -> None:
    assert running(progress(1, 1, loss=3.0), progress(2, 2, loss=None)).loss == 3.0


def test_waiting_is_the_share_of_the_last_seconds() -> None:
    so_far = running(progress(10, 0, waited=(1.0, 0.0)), progress(14, 100, waited=(2.0, 4.0)))
    assert [worker.waiting for worker in so_far.workers()] == [0.25, 1.0]
    assert [worker.waited_s for worker in so_far.workers()] == [2.0, 4.0]


def test_a_worker_that_does_half_of_what_the_others_do_is_slow() -> None:
    so_far = running(*(progress(s, s, rates=(100.0, 100.0, 50.0)) for s in (2, 3, 4)))
    assert [worker.index for worker in so_far.workers() if worker.slow] == [2]


def test_in_lock_step_the_one_for_whom_the_others_wait_is_slow() -> None:
    story = [progress(s, s, rates=(10.0, 10.0, 10.0), waited=(0.5 * s, 0.5 * s, 0.05 * s)) for s in (2, 3, 4)]
    assert [worker.index for worker in running(*story).workers() if worker.slow] == [2]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=9), st.data())
def test_the_middle_of_the_others_is_their_median(values: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(values) - 1))
    others = values[:place] + values[place + 1 :]
    assert _middle_without(values[place], sorted(values)) == median(others)


def test_nobody_is_slow_in_the_first_two_looks_or_alone() -> None:
    assert not any(w.slow for w in running(*(progress(s, s, rates=(9.0, 1.0)) for s in (2, 3))).workers())
    assert not any(w.slow for w in running(*(progress(s, s, rates=(9.0,)) for s in (2, 3, 4))).workers())


def test_a_lost_worker_counts_as_lost_until_it_returns() -> None:
    lost = running(progress(2, 100), events.Lost(at_s=3.0, node="worker 1", why="killed by signal 9"))
    assert [worker.lost.why if worker.lost else "" for worker in lost.workers()] == ["", "killed by signal 9"]
    lost.absorb(events.Returned(at_s=4.0, node="worker 1"))
    assert [worker.lost for worker in lost.workers()] == [None, None]


def test_the_first_error_of_the_users_code_is_the_one_that_counts() -> None:
    errors = [events.UserError(at_s=1.0, worker=i, step=5, error="E", traceback="") for i in (2, 0)]
    assert running(*errors).error == errors[0]


def test_the_curve_leaves_out_what_is_not_known() -> None:
    points = [progress(1, 10, loss=2.0), progress(2, 20, loss=None), progress(3, 30, loss=1.0)]
    assert loss_curve(points) == [(10, 2.0), (30, 1.0)]


# ---- a directory read back ----


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", whole_run()))
    assert run.events == whole_run()
    assert (run.state, run.unreadable, run.so_far.samples_done) == ("finished", 0, 2000)
    assert run.config == a_config()


@given(cut=st.integers(min_value=0))
def test_wherever_a_crash_cut_the_file_every_whole_line_before_is_read(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = write_run(tmp_path_factory.mktemp("crash") / "run", whole_run())
    file = directory / "events.jsonl"
    data = file.read_bytes()
    data = data[: cut % len(data)]
    file.write_bytes(data)
    run = read_run(directory)
    complete = data.count(b"\n")
    assert run.events[:complete] == whole_run()[:complete]
    assert len(run.events) + run.unreadable == complete + (not data.endswith(b"\n") and bool(data))
    assert run.state == "killed"


def test_a_line_of_another_version_is_counted_and_passed_over(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [started()], tail=b'{"event":"Invented","at_s":1.0}\n'))
    assert (len(run.events), run.unreadable) == (1, 1)


def test_a_measure_that_was_not_finite_is_read_back_as_unknown(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [ended(loss=float("nan"))]))
    assert run.so_far.ended is not None and run.so_far.ended.metrics == {"loss": None}


def test_a_directory_with_nothing_readable_is_still_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    run = read_run(tmp_path)
    assert (run.config, run.events, run.state, run.model) == ({}, [], "killed", None)


def test_a_run_without_an_end_is_running_while_its_launcher_holds_the_lock(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "a", whole_run()[:-1])
    with (directory / "events.jsonl").open("rb") as launcher:
        fcntl.flock(launcher, fcntl.LOCK_EX)
        assert read_run(directory).state == "running"
    assert read_run(directory).state == "killed"


# ---- finding runs ----


def test_runs_are_listed_newest_first_by_when_they_started(tmp_path: Path) -> None:
    for name, hour in (("b", "10"), ("a", "12"), ("c", "11")):
        write_run(tmp_path / name, [started(at=f"2026-11-16T{hour}:00:00.000+00:00")])
    (tmp_path / "notes").mkdir()
    assert [path.name for path in list_runs(tmp_path)] == ["a", "c", "b"]


def test_a_run_in_virtual_time_is_as_old_as_its_files(tmp_path: Path) -> None:
    write_run(tmp_path / "old", [started(at="2026-11-16T10:00:00.000+00:00")])
    write_run(tmp_path / "simulated", [started(at="")])
    for name in ("config.json", "events.jsonl"):
        os.utime(tmp_path / "simulated" / name, (0, 0))
    assert [path.name for path in list_runs(tmp_path)] == ["old", "simulated"]


@pytest.mark.parametrize("word", ["20261116-1000-digits", "20261116-10", "last"])
def test_a_run_is_found_by_its_name_the_beginning_of_it_or_as_the_last(tmp_path: Path, word: str) -> None:
    write_run(tmp_path / "20261116-0900-digits", [started(at="2026-11-16T09:00:00.000+00:00")])
    write_run(tmp_path / "20261116-1000-digits", [started(at="2026-11-16T10:00:00.000+00:00")])
    assert find_run(tmp_path, word) == tmp_path / "20261116-1000-digits"


def test_a_run_is_found_by_its_directory_wherever_it_is(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "elsewhere" / "mine", [started()])
    assert find_run(tmp_path / "runs", str(directory)) == directory


def test_a_beginning_that_two_runs_share_is_reported_with_their_names(tmp_path: Path) -> None:
    for name in ("ab1", "ab2"):
        write_run(tmp_path / name, [started()])
    with pytest.raises(ValueError, match=r"ab is the beginning of 2 runs \(ab2, ab1\): type more of it."):
        find_run(tmp_path, "ab")
    with pytest.raises(ValueError, match="no run named x in .*: choose from ab2, ab1, or type last."):
        find_run(tmp_path, "x")


def test_where_there_are_no_runs_it_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no runs in .*rainband train"):
        find_run(tmp_path / "runs", "last")


# ---- writing it ----


def a_run_config() -> RunConfig:
    return msgspec.convert(a_config(), RunConfig)


def test_what_is_written_reproduces_the_configuration(tmp_path: Path) -> None:
    write_config(tmp_path, a_run_config())
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == a_run_config()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("{", "is not the configuration of a run"), ('{"task": 3}', "is not the configuration of a run")],
)
def test_a_file_that_is_no_configuration_is_reported(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=complaint):
        read_config(tmp_path)
    with pytest.raises(ValueError, match="cannot read .*missing.json: No such file"):
        read_config(tmp_path / "missing.json")


def test_two_runs_never_share_a_directory(tmp_path: Path) -> None:
    first = new_directory(tmp_path, "digits", "my.module:Mine")
    assert first.name.endswith("-digits-Mine") and new_directory(tmp_path, "digits", "Mine") != first
    EventLog(first).close()
    with pytest.raises(ValueError, match="already holds a run"):
        EventLog(first)


def test_the_log_of_events_is_whole_at_every_moment_and_locked(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for number, event in enumerate(whole_run()[:-1], 1):
        log.write(event)
        assert len(read_run(tmp_path).events) == number
    assert read_run(tmp_path).state == "running"
    log.write(ended())
    log.close()
    assert read_run(tmp_path).state == "finished"


class FullDisk:
    """A file on a disk with room for some bytes more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(data[: self.room])
        self.room -= written
        return int(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_leaves_out_events_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(tmp_path)
    first, *lost, last = whole_run()
    log.write(first)
    file, log.file = log.file, FullDisk(log.file, 10)  # type: ignore[assignment]
    for event in lost:
        log.write(event)
    assert caplog.text.count("events.jsonl lacks events (no room for a whole line); the run continues.") == 1
    log.file = file  # there is room again
    log.write(last)
    log.close()
    run = read_run(tmp_path)
    assert (run.events, run.unreadable) == ([first, last], 0)


def test_the_metrics_are_kept_beside_the_events_as_a_table(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for event in whole_run():
        log.write(event)
    log.close()
    with closing(sqlite3.connect(tmp_path / "metrics.sqlite")) as metrics:
        rows = list(metrics.execute("select samples_done, loss, samples_per_s from progress order by at_s"))
    assert [row[0] for row in rows] == [100 * s for s in range(18)]
    assert rows[1][1:] == (1.0, 100.0)


# ---- what processes print ----


def test_what_is_printed_comes_as_lines(tmp_path: Path) -> None:
    output = OutputLog(tmp_path)
    os.write(output.file.fileno(), b"to stdout\n")
    os.write(output.file.fileno(), b"to stderr\nunfini")
    assert output.new_lines() == (["to stdout", "to stderr"], 0)
    assert output.new_lines() == ([], 0)
    assert output.new_lines(to_the_end=True) == (["unfini"], 0)
    output.close()
    assert (tmp_path / "output.log").read_bytes() == b"to stdout\nto stderr\nunfini"


def test_of_a_flood_the_last_twenty_lines_are_shown_and_the_rest_is_counted(tmp_path: Path) -> None:
    output = OutputLog(tmp_path)
    output.file.write(b"".join(b"%d\n" % number for number in range(25)))
    assert output.new_lines() == ([str(number) for number in range(5, 25)], 5)
    output.close()


def test_at_the_end_the_last_line_is_shown_however_much_was_printed(tmp_path: Path) -> None:
    output = OutputLog(tmp_path)
    output.file.write(b"x" * 99 + b"\n")
    output.file.write((b"y" * 99 + b"\n") * 30_000 + b"the exception itself")  # 3 MB
    assert output.new_lines(to_the_end=True)[0][-1] == "the exception itself"
    output.close()


def test_a_run_whose_processes_print_nothing_leaves_no_empty_file(tmp_path: Path) -> None:
    OutputLog(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_two_beats_that_came_at_once_make_no_rate() -> None:
    assert _rate([(10.0, 0), (12.0, 300)], now=12.0) == 150.0
    assert _rate([(4.0, 0), (4.001, 32)], now=4.0) == 0.0  # it would be 32,000 a second
    assert _rate([(0.004, 0), (0.005, 32)], now=0.005) == pytest.approx(32_000)  # in virtual time that is long
    assert _rate([(1.0, 0), (1.0, 32)], now=1.0) == _rate([(1.0, 5)], now=1.0) == 0.0
