"""Runs that run now: found on this machine, explained, stopped from another process."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from random import Random

import msgspec
import pytest
from typer.testing import CliRunner

from rainband.cli.main import build_app
from rainband.protocol import events
from rainband.runtimes.config import RunConfig
from rainband.runtimes.running.chaos import ChaosFault, Endurance, draw, endurance_of
from rainband.runtimes.running.processes import NodeProcess, RunningRun, find_running, processes_of, running_runs
from rainband.views.dashboard.fold import Folded
from rainband.views.running_text import top, why_it_waits
from tests.dashboard_runs import made_run, written
from tests.processes import RunLauncher, wait_for

A, B = RunningRun(Path("/a/20261119-digits"), 1), RunningRun(Path("/b/20261118-fashion"), 2)


def folded(made: list[events.AnyEvent]) -> Folded:
    one = Folded()
    for event in made:
        one.absorb(event)
    return one


def row_of(lines: list[str], first: str) -> list[str]:
    return next(line.split() for line in lines if line.startswith(f"{first} "))  # workers come before servers


def said(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(build_app(), list(map(str, words)), prog_name="rainband")
    return result.exit_code, result.stdout, result.stderr


# ---- names ----


def test_a_running_run_is_found_by_its_name_its_beginning_and_its_directory() -> None:
    older, other = RunningRun(Path("/a/20261118-fashion"), 3), RunningRun(Path("/a/20261118-digits"), 4)
    runs = [A, B, older, other]
    assert find_running("last", runs, Path("/a")) is find_running("20261119", runs, Path("/a")) is A
    assert find_running("20261118-fashion", runs, Path("/a")) is older
    assert find_running("/b/20261118-fashion", runs, Path("/a")) is B
    with pytest.raises(ValueError, match="20261118 is 2 running runs"):
        find_running("20261118", runs, Path("/a"))


def test_a_run_of_another_folder_is_found_by_its_directory_only() -> None:
    assert find_running("last", [B], Path("/a")) is find_running("20261118-fashion", [B], Path("/a")) is None
    assert find_running("last", [], Path("/a")) is find_running("2", [B], Path("/a")) is None


# ---- what the processes of a run do ----


def test_top_shows_the_share_the_bytes_and_the_longest_wait_of_each_worker() -> None:
    lines = top(folded(made_run(2, 4)), "finished", "mine", {})
    assert lines[0].startswith("mine: digits with digits: 2 workers and 2 servers")
    assert row_of(lines, "0")[:3] == ["0", "50", "%"]
    assert "waited longest for worker 0: 1.6 s" in "\n".join(lines)
    assert row_of(lines, "0").count("kB") == 2  # sent and received
    assert [line.split() for line in lines[-2:]] == [["0", "8"], ["1", "8"]]  # the servers' updates


def test_top_names_the_process_that_is_waited_for_and_why() -> None:
    made = made_run(2, 4)[:-3]  # it still runs, and worker 1 waits
    progress = next(event for event in reversed(made) if isinstance(event, events.Progress))
    bounded = msgspec.structs.replace(progress, waiting_for={1: 0}, staleness_bound=2.0, staleness_unit="clocks")
    lines = top(folded([bounded if event is progress else event for event in made]), "running", "mine", {})
    assert any(line.endswith("waits for worker 0: it is ahead by the bound of 2 clocks") for line in lines)
    assert any(line.endswith("; others have waited 1.6 s for it") for line in lines)


def test_top_shows_stopped_and_lost_processes() -> None:
    made = [*made_run(3, 8)[:-3], events.Lost(at_s=10.0, node="worker 2", why="killed by signal 9")]
    here = {"worker 1": NodeProcess("worker 1", 4711, 5_000_000, True, 0.0)}
    lines = top(folded(made), "running", "mine", here)
    assert "bad: Stopped by a signal: worker 1." in lines
    line = next(line for line in lines if line.startswith("1 "))
    assert "4711" in line and line.endswith("is stopped by a signal: kill -CONT continues it")
    assert any(line.startswith("2 ") and line.endswith("lost: killed by signal 9") for line in lines)


def test_top_of_many_workers_fits_on_the_screen_and_keeps_the_lost_ones() -> None:
    made = [*made_run(100, 8)[:-3], events.Lost(at_s=10.0, node="worker 77", why="gone")]
    lines = top(folded(made), "running", "mine", {}, height=24)
    assert len(lines) <= 24
    assert any(line.startswith("77 ") for line in lines) and any("other workers" in line for line in lines)


def test_top_shows_which_servers_have_a_copy() -> None:
    made = made_run(2, 4)
    started = msgspec.structs.replace(made[0], copies=2)  # type: ignore[type-var]
    copied = [events.ServerCopied(at_s=1.0, server=k) for k in (0, 1)]
    lost = events.Lost(at_s=2.0, node="copy of server 1", why="killed by signal 9")
    lines = top(folded([started, *made[1:3], *copied, lost, *made[3:]]), "finished", "mine", {})
    assert [line.split() for line in lines[-2:]] == [["0", "8", "complete"], ["1", "8", "none"]]


@pytest.mark.parametrize(
    ("phase", "changes", "why"),
    [
        ("flushing", {}, "the run is flushing"),
        ("running", {"disagreement": 0.5}, "a mean needs the models of all"),
        ("running", {"staleness_bound": 3.0, "staleness_unit": "tasks"}, "it is ahead by the bound of 3 tasks"),
        ("running", {}, "for parameters, or for batches to compute"),
    ],
)
def test_the_reason_of_a_wait_is_that_of_the_strategy(phase: str, changes: dict[str, object], why: str) -> None:
    so_far = folded(made_run(2, 4)[:-3]).so_far
    so_far.phase = phase
    assert so_far.last is not None
    so_far.progress.append(msgspec.structs.replace(so_far.last, **changes))
    assert why_it_waits(so_far) == why


def test_one_worker_that_does_nearly_all_is_a_warning() -> None:
    made = made_run(3, 12)
    nodes = next(event for event in reversed(made) if isinstance(event, events.NodesMeasured))
    uneven = msgspec.structs.replace(nodes, samples=(10, 85, 5))
    text = "warn: Worker 1 has done 85 % of the work; the 2 others have hardly helped."
    assert text in top(folded([uneven if event is nodes else event for event in made]), "finished", "mine", {})
    assert not [line for line in top(folded(made), "finished", "mine", {}) if "hardly" in line]


def test_top_reads_a_finished_run_and_says_the_same_to_programs(tmp_path: Path) -> None:
    written(tmp_path / "runs" / "one", made_run(2, 4))
    code, out, _ = said("top", "one", "--runs", tmp_path / "runs")
    assert code == 0 and "finished: " in out
    code, out, _ = said("top", "one", "--runs", tmp_path / "runs", "--json")
    record = json.loads(out)
    assert (record["state"], [row["worker"] for row in record["workers"]]) == ("finished", ["0", "1"])


def test_a_run_that_has_ended_cannot_be_stopped(tmp_path: Path) -> None:
    written(tmp_path / "runs" / "one", made_run(2, 4))
    code, _, err = said("stop", "one", "--runs", tmp_path / "runs")
    assert code == 2 and "one does not run: it is finished." in err


# ---- a real run ----


@pytest.mark.processes
def test_a_run_is_listed_explained_and_stopped_from_outside(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path) as run:
        run.under_way()
        (found,) = [one for one in running_runs() if one.directory == run.directory]
        assert found.pid == run.launcher
        nodes = processes_of(found)
        assert list(nodes) == ["server 0", "server 1", "worker 0", "worker 1"]
        assert all(node.memory_bytes > 1_000_000 and not node.is_stopped for node in nodes.values())
        os.kill(nodes["worker 1"].pid, signal.SIGSTOP)
        wait_for(lambda: processes_of(found)["worker 1"].is_stopped, "a stopped worker")
        _, out, _ = said("top", run.directory)
        assert "bad: Stopped by a signal: worker 1." in out
        os.kill(nodes["worker 1"].pid, signal.SIGCONT)
        record = next(one for one in json.loads(said("ps", "--json")[1]) if one["directory"] == str(run.directory))
        assert (record["pid"], len(record["processes"])) == (found.pid, 4)
        code, out, _ = said("stop", run.directory, "--no-wait")
        assert code == 0
        run.first(events.PhaseChanged, phase="finishing", reason="interrupted")
        run.gate.open()
        assert run.ended() == 130
        assert not [one for one in running_runs() if one.directory == run.directory]


# ---- chaos ----


def nodes(*names: str) -> dict[str, NodeProcess]:
    return {name: NodeProcess(name, 100 + k, 1, False, 0.0) for k, name in enumerate(names)}


DATA_PARALLEL = Endurance(failure_timeout_s=5.0, restarts=False, needs_all=False)


def drawn(there: dict[str, NodeProcess], lost: tuple[str, ...] = (), fatal: bool = False) -> list[ChaosFault]:
    faults = [draw(Random(seed), there, lost, DATA_PARALLEL, fatal) for seed in range(200)]
    return [fault for fault in faults if isinstance(fault, ChaosFault)]


def test_chaos_kills_workers_but_neither_the_last_one_nor_a_server() -> None:
    faults = drawn(nodes("worker 0", "worker 1", "server 0"))
    assert {fault.node for fault in faults if fault.what == "kill"} == {"worker 0", "worker 1"}
    assert {fault.node for fault in faults if fault.what == "pause"} == {"worker 0", "worker 1", "server 0"}
    assert {fault.for_s for fault in faults} == {0.0, 1.0, 2.5, 7.5}
    assert not [fault for fault in drawn(nodes("worker 0", "worker 1"), ("worker 1",)) if fault.what == "kill"]
    assert {fault.node for fault in drawn(nodes("worker 0", "server 0"), fatal=True) if fault.what == "kill"} == {
        "worker 0",
        "server 0",
    }


def test_the_same_seed_draws_the_same_faults() -> None:
    there = nodes("worker 0", "worker 1", "worker 2")
    assert draw(Random("7"), there, (), DATA_PARALLEL) == draw(Random("7"), there, (), DATA_PARALLEL)
    assert draw(Random("7"), {}, (), DATA_PARALLEL) == "no worker or server of the run is on this machine"


def test_a_pipeline_without_servers_loses_no_stage() -> None:
    config = RunConfig(task="digits", strategy="downpour", num_workers=2, num_servers=1)
    assert endurance_of(config) == DATA_PARALLEL
    pipeline = Endurance(failure_timeout_s=5.0, restarts=False, needs_all=True)
    assert pipeline.why_fatal("worker 0", nodes("worker 0", "worker 1")) == "worker 0 has the only copy of its stage"


def test_chaos_needs_a_run_that_runs(tmp_path: Path) -> None:
    written(tmp_path / "runs" / "one", made_run(2, 4))
    code, _, err = said("chaos", "one", "--runs", tmp_path / "runs")
    assert code == 2 and "one does not run on this machine: it is finished." in err


@pytest.mark.processes
def test_chaos_says_what_it_did_and_the_run_survives(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, workers=3, timeout_s=0.5) as run:
        run.under_way()
        code, out, _ = said("chaos", run.directory, "--seed", "3", "--every", "0.05", "--limit", "4")
        assert code == 0 and "the run is running" in out
        assert len([line for line in out.splitlines() if "kill worker" in line or "pause " in line]) == 4
        assert not [node for node in processes_of(running_runs()[0]).values() if node.is_stopped]
        run.gate.open()
        accounting = run.result().accounting
        assert (accounting["lost"], accounting["applied_twice"]) == (0, 0)
        assert accounting["applied"] == accounting["batches"]
