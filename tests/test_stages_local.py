"""Stages as real processes: values cross between them, replicas lose stages, and the model is put together again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rainband.protocol import events
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation.run import run as simulate
from tests.processes import LR, RunLauncher
from tests.stage_tasks import Shaped, dealt, planned

pytestmark = pytest.mark.processes

STAGED = {"task": "tests.stage_tasks:Shaped", "optimizer": "sgd", "gated": False}


def simulated(
    folder: Path, strategy: str, name: str, workers: int, samples: int = 40, **options: object
) -> dict[str, torch.Tensor]:
    """The same in virtual time, by whole models where `team` is not given."""
    folder.mkdir()
    settings = {"lr": LR, "optimizer": "sgd"} | ({"batch_per_worker": True} if strategy == "sync" else {})
    config = RunConfig(
        task="tests.stage_tasks:Shaped",
        task_settings={"name": name, "samples": samples},
        strategy=strategy,
        strategy_settings=settings,
        num_workers=workers,
        num_servers=2 if strategy == "sync" else 0,
        runtime="sim",
        directory=str(folder),
        **options,  # type: ignore[arg-type]
    )
    assert simulate(config, lambda event: None).outcome == "finished"
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name, transport, stages_per_worker", [("skips", "shm", 1), ("tied", "tcp", 2)])
def test_stages_as_processes_train_as_whole_models_do(
    launcher: RunLauncher, tmp_path: Path, name: str, transport: str, stages_per_worker: int
) -> None:
    stage_plan = (
        planned(Shaped(name), 2)
        if stages_per_worker == 1
        else dealt(Shaped(name), 2, stages_per_worker, microbatches=2)
    )
    with launcher.run(
        tmp_path, "sync", workers=4, transport=transport, stage_plan=stage_plan, name=name, samples=40, **STAGED
    ) as run:
        result = run.result()
    assert (result.outcome, result.accounting["applied"]) == ("finished", 10), result.reason
    assert result.metrics["loss"] > 0
    expected = simulated(tmp_path / "whole", "sync", name, workers=2)
    found = load_file(tmp_path / "run" / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if not key.startswith("norm.running") and not key.startswith("norm.num"):  # of a replica's own batches
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
    assert not list((tmp_path / "run").glob("*.part"))


def test_a_pipeline_that_is_never_flushed_gives_the_same_in_processes(launcher: RunLauncher, tmp_path: Path) -> None:
    stage_plan = planned(Shaped("chain"), 2, replicas=[2, 1])
    with launcher.run(
        tmp_path, "pipedream", workers=3, servers=0, stage_plan=stage_plan, name="chain", samples=40, **STAGED
    ) as run:
        result = run.result()
    assert (result.outcome, result.accounting["applied"]) == ("finished", 10), result.reason
    expected = simulated(tmp_path / "sim", "pipedream", "chain", workers=3, stage_plan=stage_plan)
    found = load_file(tmp_path / "run" / "model.safetensors")
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)


def test_a_replica_whose_stage_is_killed_stops_and_the_other_does_its_work(
    launcher: RunLauncher, tmp_path: Path
) -> None:
    stage_plan = planned(Shaped("chain"), 2)
    with launcher.run(
        tmp_path,
        "downpour",
        workers=4,
        stage_plan=stage_plan,
        name="chain",
        samples=6000,  # the run must not be over before the kill
        timeout_s=2.0,
        eval_every_s=0.01,
        **STAGED,
    ) as run:
        run.first(events.FirstStep)
        run.first(events.Joined, node="worker 3")
        run.remember()
        run.worker(3).kill()
        result = run.result()
    assert result.outcome == "finished", result.reason
    assert any(progress.metrics for progress in run.all(events.Progress))  # it was measured on the way, too
    assert (result.accounting["applied"], result.accounting["lost"], result.accounting["applied_twice"]) == (1500, 0, 0)
    lost = {event.node: event.why for event in run.all(events.Lost)}
    assert lost.keys() == {"worker 2", "worker 3"}
    assert "worker 3 of the same replica was lost" in lost["worker 2"] or "PeerLost" in lost["worker 2"]


def test_the_only_replica_is_started_again(launcher: RunLauncher, tmp_path: Path) -> None:
    stage_plan = planned(Shaped("chain"), 2)
    with launcher.run(
        tmp_path, "downpour", workers=2, stage_plan=stage_plan, name="chain", samples=6000, timeout_s=2.0, **STAGED
    ) as run:
        run.first(events.FirstStep)
        run.remember()
        run.worker(1).kill()
        result = run.result()
    assert result.outcome == "finished", result.reason
    assert (result.accounting["applied"], result.accounting["lost"], result.accounting["applied_twice"]) == (1500, 0, 0)
    joined = [event.node for event in run.all(events.Joined)]
    assert (joined.count("worker 0"), joined.count("worker 1")) == (2, 2)
    lost = {event.node: event.why for event in run.all(events.Lost)}
    assert "killed by signal 9" in lost["worker 1"]


@pytest.mark.parametrize("strategy", ["pipedream", "single"])
def test_stages_without_servers_go_on_from_the_last_checkpoint(
    launcher: RunLauncher, tmp_path: Path, strategy: str
) -> None:
    stage_plan = planned(Shaped("chain"), 2)
    often = {"checkpoint_every_s": 0.1}
    with launcher.run(
        tmp_path, strategy, servers=0, stage_plan=stage_plan, name="chain", samples=12000, options=often, **STAGED
    ) as run:
        run.first(events.CheckpointWritten)
        run.remember()
        run.worker(1).kill()
        result = run.result()
    assert result.outcome == "finished", result.reason
    assert (result.accounting["applied"], result.accounting["lost"], result.accounting["applied_twice"]) == (3000, 0, 0)
    [restored] = run.all(events.Restored)
    assert (
        restored.step in {event.step for event in run.all(events.CheckpointWritten)} and restored.repeated is not None
    )
    if strategy == "single":  # whenever checkpoints are written, its model is that of a run without faults
        expected = simulated(tmp_path / "sim", "single", "chain", workers=2, stage_plan=stage_plan, samples=12000)
        for key, value in load_file(tmp_path / "run" / "model.safetensors").items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)
