"""A model of this machine, from measurements."""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import msgspec
import pytest
from typer import Typer
from typer.testing import CliRunner

from rainband.cli import calibrate as calibrate_command
from rainband.cli import fuzz
from rainband.record.calibrate import Measurements, Stopwatch, assemble
from rainband.record.message_cost import (
    ALL,
    COMPUTE,
    MESSAGE,
    WARM_UP,
    WORK,
    MessageCost,
    ServerCost,
    WorkerCost,
    message_cost,
)
from rainband.record.wakeup_latency import WakeupLatency, core_here, echo_main, pinned, read_all, sleeper_main
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation.models.cluster_model import load_model
from rainband.runtimes.simulation.oracle.scenarios import KINDS

ALONE = Measurements(
    compute_s=[0.010, 0.012, 0.014],
    push_s=[0.003],
    step_s=[0.001],
    apply_s=[0.0005],
    gather_s=[0.0002],
    read_s=[0.00025],
    model_bytes=4_000_000,
    num_blocks=4,
)
TOGETHER = Measurements([0.018], [1.0], [1.0], [1.0], [1.0], [1.0], 4_000_000, 4)
WAKEUP = WakeupLatency(wake_s=5e-5, moves=0.25)


def app() -> Typer:
    app = Typer()
    app.callback()(lambda: None)
    app.command("calibrate")(calibrate_command.command)
    app.command("fuzz")(fuzz.command)
    return app


def test_pieces_become_speeds() -> None:
    model = assemble(ALONE, [TOGETHER, TOGETHER], 2, 2, WAKEUP, MessageCost(1e-5, 4e-5, compute_s=0.024))
    assert model.compute.trace_s == (0.010, 0.012, 0.014) and model.compute.step_s == pytest.approx(0.012)
    assert model.nodes.push_bytes_per_s == 4_000_000 / 0.004
    assert model.nodes.apply_bytes_per_s == 1_000_000 / 0.0005
    assert model.nodes.gather_bytes_per_s == 1_000_000 / 0.0002
    assert model.nodes.pull_bytes_per_s == 1_000_000 / 0.00025
    assert model.nodes.crowding == pytest.approx(0.5)  # 18 ms instead of 12 when both cores are busy
    assert (model.nodes.cores, model.nodes.shared_memory) == (2, True)
    assert (model.nodes.wake_s, model.nodes.moves) == (5e-5, 0.25)
    # While messages were measured the machine was half as fast: a gradient took 24 ms.
    assert (model.nodes.worker_message_s, model.nodes.message_s) == pytest.approx((0.5e-5, 2e-5))


def test_the_cost_of_busy_cores_follows_from_steps_while_they_were_busy() -> None:
    """Three processes at once, on a machine with 16 cores: each of the other two costs a quarter."""
    model = assemble(ALONE, [TOGETHER] * 3, 3, 16, WAKEUP, MessageCost(0.0, 0.0, 0.012))
    assert model.nodes.crowding == pytest.approx(0.25) and model.nodes.cores == 16


def test_a_machine_with_one_core_has_no_crowd() -> None:
    assert assemble(ALONE, [ALONE], 1, 1, WAKEUP, MessageCost(0.0, 0.0, 0.012)).nodes.crowding == 0.0


def test_a_server_that_makes_a_step_with_every_push_gathers_nothing() -> None:
    every = msgspec.structs.replace(ALONE, gather_s=[])
    assert assemble(every, [ALONE], 1, 1, WAKEUP, MessageCost(0.0, 0.0, 0.012)).nodes.gather_bytes_per_s == 0.0


def test_where_pushes_make_no_step_gathering_is_all_that_they_take() -> None:
    coordinated = msgspec.structs.replace(ALONE, apply_s=[])
    nodes = assemble(coordinated, [ALONE], 1, 1, WAKEUP, MessageCost(0.0, 0.0, 0.012)).nodes
    assert (nodes.apply_bytes_per_s, nodes.gather_bytes_per_s) == (1_000_000 / 0.0002, 0.0)


def test_a_piece_that_never_came_says_what_to_type() -> None:
    without = msgspec.structs.replace(ALONE, read_s=[])
    with pytest.raises(ValueError, match="too few steps to measure read: try twice as many with --steps"):
        assemble(without, [ALONE], 1, 1, WAKEUP, MessageCost(0.0, 0.0, 0.012))


def test_what_is_in_no_piece_is_what_messages_cost(tmp_path: Path) -> None:
    """A step of a worker: 10 ms of computing, 2 of copying, three messages, 15 ms in all. A server: 4 of 5 ms."""
    worker, server, moment_s = WorkerCost(str(tmp_path), "worker-0"), ServerCost(str(tmp_path), "server-0"), 0.0
    for step in range(2 * WARM_UP):
        is_warm = step >= WARM_UP
        worker.note(ALL, moment_s)
        worker.note(COMPUTE, 10e-3 if is_warm else 0.1)
        for kind, seconds in [(WORK, 2e-3), (MESSAGE, 0.0), (MESSAGE, 0.0), (MESSAGE, 0.0)]:
            worker.note(kind, seconds)
        moment_s += 15e-3 if is_warm else 0.2  # the first steps take longer, and do not count
        for kind, seconds in [(MESSAGE, 0.0), (ALL, 5e-3 * step), (WORK, 4e-3)]:
            server.note(kind, seconds)
    assert message_cost(str(tmp_path)) == pytest.approx((1e-3, 1e-3, 10e-3))


def test_a_run_that_was_too_short_is_not_measured(tmp_path: Path) -> None:
    WorkerCost(str(tmp_path), "worker-0").note(ALL, 1.0)
    ServerCost(str(tmp_path), "server-0")
    with pytest.raises(ValueError, match="made only 1 steps .* with --steps"):
        message_cost(str(tmp_path))


@pytest.mark.parametrize("strategy", ["downpour", "sync"])
def test_every_piece_of_a_step_is_timed(strategy: str) -> None:
    own_step = {"overlap": True, "local_lr": 0.1} if strategy == "downpour" else {"batch_per_worker": True}
    config = RunConfig(task="linear", strategy=strategy, strategy_settings=own_step, num_workers=2, num_servers=1)
    stopwatch = Stopwatch(config)
    stopwatch.measure(steps=8)
    measured = stopwatch.measure(steps=8)  # as often as one likes
    assert 8 <= len(measured.compute_s) <= 12
    assert all(s > 0 for s in measured.compute_s + measured.push_s + measured.apply_s + measured.read_s)
    assert bool(measured.step_s) == (strategy == "downpour")  # its worker's own step
    # Of the two pushes of a round the second makes the step.
    assert abs(len(measured.gather_s) - len(measured.apply_s)) <= 1 if strategy == "sync" else not measured.gather_s
    assert (measured.model_bytes, measured.num_blocks) == (64, 1)


# ---- waking ----


def asked(main: Callable[[bytes, list[int]], None], core: int, answer_bytes: int) -> bytes:
    """Wake it once, in a thread of its own; it ends when nobody can ask it any more."""
    ours, theirs = socket.socketpair()
    with ours:
        thread = Thread(target=main, args=(b"%d" % core, [theirs.detach()]))
        thread.start()
        ours.sendall(b"!")
        answer = ours.recv(answer_bytes)
    thread.join()
    return answer


def test_a_process_knows_on_which_core_it_runs() -> None:
    before = os.sched_getaffinity(0)
    for core in before:
        with pinned(core):
            assert core_here() == core
    assert os.sched_getaffinity(0) == before


def test_who_wakes_up_says_whether_it_is_where_it_went_to_sleep() -> None:
    for core in os.sched_getaffinity(0):
        with pinned(core):  # its thread inherits that: it can be nowhere else
            assert asked(sleeper_main, core, 1) == b"="


def test_who_wakes_up_says_when_by_the_same_clock() -> None:
    began = time.perf_counter()
    (woke,) = struct.unpack("<d", asked(echo_main, min(os.sched_getaffinity(0)), 8))
    assert began < woke < time.perf_counter()


def test_a_measuring_process_that_ends_is_reported_and_not_waited_for() -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"ab")
    os.close(theirs)
    assert read_all(ours, 1) == b"a"
    with pytest.raises(RuntimeError, match="ended without a result"):
        read_all(ours, 2)
    os.close(ours)


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_the_command_writes_a_model_that_can_be_used(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    result = CliRunner().invoke(app(), ["calibrate", "linear", "downpour", "--out", str(file), "--steps", "5"])
    assert result.exit_code == 0, result.output
    model = load_model(str(file))
    assert model.compute.kind == "trace" and len(model.compute.trace_s) >= 5
    assert model.nodes.shared_memory and model.nodes.apply_bytes_per_s > 0
    assert 0 <= model.nodes.wake_s < 0.1 and 0 <= model.nodes.moves <= 1


def test_a_strategy_without_messages_to_measure_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app(), ["calibrate", "linear", "sync", "--out", str(tmp_path / "x.toml")])
    assert result.exit_code == 2 and "sync has no servers" in result.output and "--servers" not in result.output


def test_the_help_and_the_guide_name_every_case_of_fuzz() -> None:
    shown = " ".join(CliRunner().invoke(app(), ["fuzz", "--help"]).output.split())
    guide = (Path(__file__).parents[1] / "docs" / "guides" / "simulation.md").read_text(encoding="utf-8")
    table = guide.split("| drawn |")[1].split("\n\n")[0] + "`downpour2`"  # "with one or two batches in a push"
    for name in KINDS:
        assert re.search(rf"\b{name}\b", shown) and f"`{name}`" in table


def test_fuzz_shows_a_run_and_its_script() -> None:
    result = CliRunner().invoke(app(), ["fuzz", "3", "--strategy", "per_worker", "--trace"])
    assert result.exit_code == 0 and "seed 3: per_worker" in result.output, result.output
    assert "push 2 block 0" in result.output and "all correct" in result.output


def test_fuzz_takes_a_script(tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text("0.1 kill server 0\n")
    result = CliRunner().invoke(app(), ["fuzz", "1", "--faults", str(file)])
    assert result.exit_code == 0 and "failed after" in result.output  # cleanly, as it should


@pytest.mark.parametrize("args", [["x"], ["5-1"], ["1", "--strategy", "hogwild"]])
def test_fuzz_says_what_can_be_typed(args: list[str]) -> None:
    result = CliRunner().invoke(app(), ["fuzz", *args])
    assert result.exit_code == 2 and any(
        hint in result.output for hint in ("such as 17", "has no seeds: the second number", "choose from downpour")
    )
