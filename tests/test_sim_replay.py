"""Record a real asynchronous run and repeat it bit for bit."""

from __future__ import annotations

import re
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from typer import Typer
from typer.testing import CliRunner

import rainband
from rainband.cli import replay as replay_command
from rainband.cli.main import build_app
from rainband.options import OptionError
from rainband.plugins import load_strategy
from rainband.protocol.messages import AdjustRule, Flush, Forget, Message, Peer
from rainband.record.record import (
    LONG,
    AnyNote,
    Applied,
    Began,
    Leased,
    Read,
    Recorder,
    RefusedPush,
    RuleChanged,
    read_notes,
)
from rainband.record.replay import replay, why_bits_may_differ
from rainband.runtimes.config import RunConfig
from rainband.runtimes.processes import launcher as local
from rainband.runtimes.run_directory import write_config
from rainband.runtimes.simulation import run as sim
from rainband.runtimes.simulation.cluster import Notes, SimulatedCluster
from rainband.runtimes.simulation.fault_injector import FaultInjector
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.runtimes.simulation.models.faults import parse
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.strategies.downpour import Downpour
from rainband.strategy import Worker
from tests.processes import RunLauncher, warmed


def config_of(directory: Path, **given: Any) -> RunConfig:
    directory.mkdir()
    settings = {
        "task": "quadratic",
        "strategy": "downpour",
        "num_workers": 3,
        "num_servers": 2,
        "epochs": 2,
        "directory": str(directory),
        "record": True,
        **given,
    }
    return RunConfig(**settings)


def write(directory: Path, peer: Peer, *notes: AnyNote) -> None:
    with closing(Recorder(str(directory), peer)) as recorder:
        for note in notes:
            recorder.write(note)


@pytest.fixture(scope="module")
def recorded(launcher: RunLauncher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "recorded"
    with warmed(launcher):
        config = config_of(directory, strategy_settings={"optimizer": "adam", "lr": 0.01})
        result = local.run(config, lambda event: None)
    assert result.outcome == "finished", result.reason
    return directory


@pytest.mark.processes
def test_a_recorded_run_is_repeated_bit_for_bit(recorded: Path) -> None:
    result = replay(recorded)
    assert (result.different, result.numbers, result.pushes) == (0, 32, 128)  # 64 batches on two blocks
    assert result.warning == ""


@pytest.mark.processes
def test_a_record_is_a_few_bytes_for_each_push_and_pull(recorded: Path) -> None:
    notes = [note for path in recorded.glob("record-*.bin") for note in read_notes(path)]
    counted = sum(isinstance(note, Read | Applied) for note in notes)
    size = sum(path.stat().st_size for path in recorded.glob("record-*.bin"))
    assert counted > 250 and size / counted < 25


@pytest.mark.processes
def test_another_order_gives_other_bits(recorded: Path, tmp_path: Path) -> None:
    """So it is the record that makes the bits equal, not chance."""
    for path in recorded.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "record-server-0.bin"
    notes = list(read_notes(path))
    at = [i for i, note in enumerate(notes) if isinstance(note, Applied)]
    swap = next(
        (i, j)
        for i, j in pairwise(at[-20:])
        if notes[i].worker != notes[j].worker  # type: ignore[union-attr]
    )
    notes[swap[0]], notes[swap[1]] = notes[swap[1]], notes[swap[0]]
    write(tmp_path, Peer("server", 0), *notes[1:])
    try:
        different = replay(tmp_path).different > 0
    except ValueError as error:
        different = "the record does not fit" in str(error)
    assert different


@pytest.mark.processes
def test_the_command_says_that_the_model_is_the_same(recorded: Path, tmp_path: Path) -> None:
    app = Typer()
    app.callback()(lambda: None)
    app.command("replay")(replay_command.command)
    result = CliRunner().invoke(app, ["replay", str(recorded), "--table"])
    assert result.exit_code == 0 and "bit for bit: 32 numbers" in result.output, result.output
    [said] = [line for line in result.output.splitlines() if "bit for bit" in line]
    assert len(re.findall("[0-9a-f]{16}", said)) == 1
    rows = [line.split() for line in result.output.splitlines() if line[:1].isdigit() and "updates" not in line]
    assert [int(row[0]) for row in rows] == list(range(1, 65))  # every update of the first block


@pytest.mark.processes
def test_a_repetition_can_stop_in_the_middle_and_save_what_is_there(recorded: Path, tmp_path: Path) -> None:
    app = Typer()
    app.callback()(lambda: None)
    app.command("replay")(replay_command.command)
    file = tmp_path / "at_10.safetensors"
    result = CliRunner().invoke(app, ["replay", str(recorded), "--until", "10", "--model", str(file), "--table"])
    assert result.exit_code == 0 and "20 updates of blocks repeated" in result.output, result.output
    then, end = load_file(file), load_file(recorded / "model.safetensors")
    assert then.keys() == end.keys() and not all(torch.equal(then[name], end[name]) for name in end)
    assert result.output.splitlines()[10].split()[0] == "10" and not result.output.splitlines()[11][0].isdigit()
    assert "not compared" in result.output and "no saved model" not in result.output


def test_a_simulated_run_is_repeated_from_its_seed(tmp_path: Path) -> None:
    sim.run(config_of(tmp_path / "run", epochs=1, record=False), lambda event: None)
    app = Typer()
    app.callback()(lambda: None)
    app.command("replay")(replay_command.command)
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "run")])
    assert result.exit_code == 0 and "equal bit for bit" in result.output, result.output
    saved = tmp_path / "run" / "simulation.json"
    saved.write_text(saved.read_text().replace('"cpu_capability": "', '"cpu_capability": "Z80 and '))
    assert "the CPU's capability was Z80 and" in CliRunner().invoke(app, ["replay", str(tmp_path / "run")]).output


def record_simulated(directory: Path, tick_s: float = 1.0, faults: str = "", **given: Any) -> SimulatedCluster:
    """Record in virtual time, where links to different servers may be as unequal as one likes."""
    config = config_of(directory, **given)
    model = ClusterModel(
        NetworkModel(latency_s=0.01, jitter_s=0.3), ComputeModel(kind="exponential", step_s=0.05), NodeModel()
    )
    recorders: list[Recorder] = []

    def observe(peer: Peer) -> Recorder:
        recorders.append(Recorder(config.directory, peer))
        return recorders[-1]

    settings = sim.settings_of(config, str(directory / "model.safetensors"))
    cluster = SimulatedCluster(sim.make_scenario(config), settings, model, Notes(observe=observe), tick_s)
    FaultInjector(cluster, parse(faults), seed=0)
    cluster.start()
    cluster.run()
    write_config(directory, config)
    for recorder in recorders:
        recorder.close()
    return cluster


@pytest.mark.parametrize("settings", [{}, {"n_push": 2, "overlap": False}, {"n_fetch": 3, "optimizer": "sgd"}])
def test_whatever_the_network_does_a_record_repeats_it(tmp_path: Path, settings: dict[str, Any]) -> None:
    cluster = record_simulated(tmp_path / "run", strategy_settings=settings)
    assert cluster.coordinator.reporting.staleness().max >= 3
    assert replay(tmp_path / "run").different == 0


def changes_of(directory: Path) -> list[Message]:
    return [note.message for note in read_notes(directory / "record-server-0.bin") if isinstance(note, RuleChanged)]


@pytest.mark.parametrize("until", [None, 2])
def test_the_last_update_of_fewer_gradients_is_repeated(tmp_path: Path, until: int | None) -> None:
    """64 gradients, three for an update: the 22nd is made of one, when the run ends."""
    record_simulated(tmp_path / "run", strategy="soft_sync", strategy_settings={"n": 1})
    result = replay(tmp_path / "run", until=until)
    assert result.different == 0 and changes_of(tmp_path / "run")[-1] == Flush()
    assert result.pushes == (128 if until is None else 2 * 2 * 3)


def test_updates_of_fewer_gradients_after_a_lost_worker_are_repeated(tmp_path: Path) -> None:
    """With the worker's last push, an update takes two gradients; a refused push of the lost worker cannot occur."""
    record_simulated(tmp_path / "run", faults="0.4 kill worker 2", strategy="soft_sync", strategy_settings={"n": 1})
    assert Forget(2) in changes_of(tmp_path / "run")
    assert replay(tmp_path / "run").different == 0


def test_the_changes_of_the_divergence_guard_are_repeated(tmp_path: Path) -> None:
    settings = {"optimizer": "sgd", "lr": 0.9, "momentum": 0.95}
    cluster = record_simulated(tmp_path / "run", tick_s=0.2, epochs=6, strategy_settings=settings)
    assert cluster.coordinator.guard.lr_factor < 1
    assert [message.lr_factor for message in changes_of(tmp_path / "run") if isinstance(message, AdjustRule)] == [
        0.5
    ] * cluster.coordinator.guard.decisions
    assert replay(tmp_path / "run").different == 0


@pytest.mark.parametrize("name", ["record-server-0.bin", "record-worker-1.bin"])
def test_a_damaged_record_is_reported_in_one_line(tmp_path: Path, name: str) -> None:
    record_simulated(tmp_path / "run")
    path = tmp_path / "run" / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1  # inside the last note
    path.write_bytes(data)
    result = CliRunner().invoke(build_app(), ["replay", str(tmp_path / "run")])
    assert (result.exit_code, result.exception.__class__) == (2, SystemExit)
    assert f"{name} is damaged at byte" in result.output and "cannot be repeated" in result.output


def test_a_record_that_is_empty_or_a_damaged_simulation_is_reported_in_one_line(tmp_path: Path) -> None:
    record_simulated(tmp_path / "run")
    for path in (tmp_path / "run").glob("record-worker-*.bin"):
        path.write_bytes(path.read_bytes()[:60])
    result = CliRunner().invoke(build_app(), ["replay", str(tmp_path / "run")])
    assert (result.exit_code, result.output) == (2, "rainband: run cannot be repeated: its record has no data plan.\n")
    (tmp_path / "run" / "simulation.json").write_text("{]")
    result = CliRunner().invoke(build_app(), ["replay", str(tmp_path / "run")])
    assert result.exit_code == 2 and "simulation.json is damaged (" in result.output


def test_a_run_that_was_not_recorded_says_how(tmp_path: Path) -> None:
    write_config(tmp_path, config_of(tmp_path / "run"))
    with pytest.raises(ValueError, match="start it with --record"):
        replay(tmp_path)


NOT_REPLAYABLE: list[tuple[str, dict[str, Any], str]] = [
    ("stale_sync", {}, "stale_sync makes workers wait for each other"),
    ("bounded_delay", {}, "bounded_delay makes workers wait for each other"),
    ("adaptive_bound", {}, "adaptive_bound makes workers wait for each other"),
    ("sync", {"batch_per_worker": True}, "sync makes workers wait for each other"),
    ("sync", {}, "sync has no servers"),
    ("single", {}, "single has no servers"),
    ("conjugate_gradient", {}, "conjugate_gradient goes by iterations"),
    ("downpour", {"compensation": 1.0}, "downpour with compensation=1 depends on copies"),
    ("soft_sync", {"compensation": 0.5}, "soft_sync with compensation=0.5 depends on copies"),
]


@pytest.mark.parametrize("strategy, settings, says", NOT_REPLAYABLE)
def test_a_run_that_cannot_be_replayed_is_not_recorded(
    strategy: str, settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Every interface refuses it before anything starts; a record that was made all the same is refused too."""
    with pytest.raises(OptionError) as raised:
        rainband.fit("linear", load_strategy(strategy, settings), record=True, runs=tmp_path / "runs")
    assert f"record=True: {says}" in str(raised.value)
    pairs = [f"{name}={value}" for name, value in settings.items()]
    options = ["--record", "--runs", str(tmp_path / "runs")]
    typed = CliRunner().invoke(build_app(), ["train", "linear", strategy, *pairs, *options])
    assert typed.exit_code == 2 and f"--record: {says}" in " ".join(typed.output.split())
    assert not (tmp_path / "runs").exists()

    config = config_of(tmp_path / "run", strategy=strategy, strategy_settings=settings)
    write_config(tmp_path / "run", config)
    for role in ("worker", "server"):
        write(tmp_path / "run", Peer(role, 0))
    with pytest.raises(ValueError, match=f"{says}.*"):
        replay(tmp_path / "run")


def test_an_error_of_the_strategy_is_raised_by_the_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_simulated(tmp_path / "run")

    async def broken(self: Downpour, worker: Worker) -> None:
        raise ValueError("not as recorded")

    monkeypatch.setattr(Downpour, "run", broken)
    with pytest.raises(ValueError, match="not as recorded"):
        replay(tmp_path / "run")


def test_refused_pushes_cannot_be_repeated(tmp_path: Path) -> None:
    write_config(tmp_path, config_of(tmp_path / "run"))
    write(tmp_path, Peer("worker", 0), Leased(0, 1, ((0, 1),)))
    write(tmp_path, Peer("server", 0), RefusedPush(0, "revoked"))
    with pytest.raises(ValueError, match=r"pushes were refused in it \(1 revoked\)"):
        replay(tmp_path)


def test_notes_are_read_back_and_a_torn_one_does_not_count(tmp_path: Path) -> None:
    long = Leased(7, 1, (tuple(range(LONG)),))
    write(tmp_path, Peer("worker", 3), Read(1, 2, 3), long, Applied(1, 2, 3))
    path = tmp_path / "record-worker-3.bin"
    assert list(read_notes(path))[1:] == [Read(1, 2, 3), long, Applied(1, 2, 3)]
    path.write_bytes(path.read_bytes()[:-1])
    assert list(read_notes(path))[1:] == [Read(1, 2, 3), long]


def test_another_torch_is_announced() -> None:
    told = why_bits_may_differ(Began("1.0", "none", 2))
    assert "torch was 1.0 and is 2" in told and "threads was 2 and is 1" in told


def test_a_configuration_travels_with_its_record_switch() -> None:
    config = RunConfig(task="x", strategy="y", num_workers=1, num_servers=1, record=True)
    assert msgspec.json.decode(msgspec.json.encode(config), type=RunConfig) == config
