"""Workers of a task that share each batch: the updates of one process, whatever happens to them."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rainband
import rainband.worker.shared_batches as shared_batches
from rainband.plugins import load_strategy
from rainband.protocol import events
from rainband.rounds.current_round import CurrentRound
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation import run as sim
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.runtimes.simulation.oracle.check import check
from rainband.runtimes.simulation.oracle.scenarios import random_case
from rainband.runtimes.simulation.rounds import SimulatedRounds, exchange_s
from rainband.strategies.single import Single
from rainband.strategies.sync import Sync
from rainband.tasks.quadratic import Quadratic

SETTINGS: dict[str, Any] = {"momentum": 0.9, "lr_schedule": "cosine", "lr": 0.02}
TASK = Quadratic(dimension=9, samples=103, batch_size=16, epochs=2)  # the last batch of an epoch has 7 samples


# ---- in virtual time ----


def simulated(
    folder: Path, workers: int, faults: str = "", strategy: str = "sync", **given: Any
) -> tuple[sim.SimulatedResult, torch.Tensor]:
    folder.mkdir()
    config = RunConfig(
        task="quadratic",
        task_settings={"dimension": 9, "samples": 103, "batch_size": 16, "epochs": 2},
        strategy=strategy,
        strategy_settings=SETTINGS,
        num_workers=workers,
        num_servers=0,
        runtime="sim",
        directory=str(folder),
        failure_timeout_s=0.3,
        sim=SimSettings(faults=faults),
        **given,
    )
    result = sim.run(config, lambda event: None)
    found = load_file(folder / "model.safetensors")
    return result, torch.cat([found[name].reshape(-1).double() for name in sorted(found)])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return simulated(tmp_path_factory.mktemp("alone") / "run", 1, strategy="single")[1]


def test_one_worker_is_single_to_the_last_bit(alone: torch.Tensor, tmp_path: Path) -> None:
    assert torch.equal(simulated(tmp_path / "run", 1)[1], alone)


@pytest.mark.parametrize("workers", [2, 3, 8, 20])  # of 20, some get no samples
def test_workers_that_share_each_batch_make_the_updates_of_one(
    workers: int, alone: torch.Tensor, tmp_path: Path
) -> None:
    result, parameters = simulated(tmp_path / "run", workers)
    torch.testing.assert_close(parameters, alone, rtol=0.0, atol=1e-6)
    assert (result.accounting["applied"], result.accounting["batches"], result.samples) == (14, 14, 206)


@pytest.mark.parametrize(
    "faults",
    [
        "0.03 kill worker 1",
        "0.03 kill worker 0\n0.04 kill worker 2",
        "0.03 crash worker 0",
        "0.03 pause worker 1 for 1",  # beyond the failure timeout: it is left out, and returns
        "0.03 pause worker 0 for 0.1",
        "0.02 kill worker 1\n0.05 start worker 1",
        "0.02 netsplit worker 1 > worker 2 for 0.2",
        "0.02 netsplit worker 1 > coordinator for 1",
        "0 kill worker 1",
        "0.02 start worker 4",
    ],
)
def test_lost_and_late_workers_change_no_update(faults: str, alone: torch.Tensor, tmp_path: Path) -> None:
    result, parameters = simulated(tmp_path / "run", 4, faults)
    torch.testing.assert_close(parameters, alone, rtol=0.0, atol=1e-6)
    assert (result.outcome, result.accounting["applied"], result.accounting["lost"]) == ("finished", 14, 0)


def test_one_sample_with_nan_costs_its_batch_and_no_statistics(tmp_path: Path) -> None:
    inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    inputs[5, 1] = float("nan")
    data = torch.utils.data.TensorDataset(inputs, torch.zeros(32, dtype=torch.long))
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    task = rainband.ModuleTask(lambda: model, data, torch.nn.functional.cross_entropy)
    with pytest.warns(UserWarning, match="1 of 4 batches were skipped"):
        fitted = rainband.fit(task, "sync", workers=2, runtime="sim", batch_size=8, epochs=1, runs=tmp_path)
    assert fitted.accounting.skipped == {"not finite": 1}
    assert all(torch.isfinite(value).all() for value in fitted.module.state_dict().values())


def test_a_slow_worker_gets_smaller_parts(tmp_path: Path) -> None:
    """One of four workers is 5 times slower: equal parts take 5 / 4 s a round, parts by speed 1 / 3.2 s."""

    def seconds(parts: str) -> float:
        config = RunConfig(
            task="quadratic",
            task_settings={"dimension": 2, "batch_size": 64},
            strategy="sync",
            num_workers=4,
            num_servers=0,
            runtime="sim",
            directory=str(tmp_path / parts),
            parts=parts,
            sim=SimSettings(
                compute={"kind": "constant", "step_s": 1.0, "slow_workers": [3], "slow_factor": 5.0},
                time_only=True,
                steps=400,
            ),
        )
        (tmp_path / parts).mkdir()
        return sim.run(config, lambda event: None).seconds

    equal = seconds("equal")
    assert equal == pytest.approx(400 * 5 / 4, rel=0.02)
    assert seconds("speed") < 0.35 * equal


def test_an_exchange_costs_what_passes_the_link_of_the_first_machine() -> None:
    """With four machines, it sends three gradients to each of the other three, and receives three."""
    network = NetworkModel(latency_s=0.001, bytes_per_s=1e6)
    assert exchange_s(ClusterModel(network), 1_000_000, 4) == pytest.approx(2 * 0.001 + 9)
    assert exchange_s(ClusterModel(replace(network, duplex=False)), 1_000_000, 4) == pytest.approx(2 * 0.001 + 9 + 3)
    assert exchange_s(ClusterModel(network), 1_000_000, 1) == 0.0
    nodes = NodeModel(shared_memory=True, push_bytes_per_s=1e6, pull_bytes_per_s=2e6)
    assert exchange_s(ClusterModel(network, nodes=nodes), 1_000_000, 3) == pytest.approx(1.0 + 2 * 0.5)


def test_time_alone_is_simulated_too(tmp_path: Path) -> None:
    config = RunConfig(
        task="quadratic",
        strategy="sync",
        num_workers=4,
        num_servers=0,
        directory=str(tmp_path),
        sim=SimSettings(time_only=True, steps=10, compute={"kind": "constant", "step_s": 1.0}),
    )
    result = sim.run(config, lambda event: None)
    assert result.accounting["applied"] == 10 and result.seconds == pytest.approx(10 / 4, rel=0.01)


# ---- fuzzed ----


def test_random_faults_change_no_update() -> None:
    for seed in range(30):
        assert check(random_case(seed, "sync")).violations == []


def nothing_is_missing(round_: CurrentRound, headers: object) -> None:
    round_.missing = ()


def everyone_computes_all_that_is_missing(round_: CurrentRound) -> tuple[int, ...]:
    return round_.missing


def nobody_is_excluded(rounds: SimulatedRounds, rank: int) -> None:
    """Leave the worker in, and let the others wait for it."""


def the_state_is_not_taken(state: shared_batches.TrainingState, received: Any) -> None:
    state.rounds.done = received["done"]


BROKEN: dict[str, tuple[Any, str, Callable[..., Any], int, str]] = {
    "nothing is missing": (CurrentRound, "divide_missing", nothing_is_missing, 8, "samples, not 8"),
    "all compute it": (CurrentRound, "own_missing", everyone_computes_all_that_is_missing, 8, "samples, not 8"),
    "nobody is excluded": (SimulatedRounds, "exclude", nobody_is_excluded, 9, "deadlock"),
    "no state": (shared_batches.TrainingState, "apply", the_state_is_not_taken, 15, "parameters differ"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_checks_notice_what_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, broken, seed, told = BROKEN[name]
    monkeypatch.setattr(owner, attribute, broken)
    violations = [text for s in (*range(seed, seed + 20),) for text in check(random_case(s, "sync")).violations]
    assert any(told in text for text in violations), violations


# ---- the task's own optimizer ----


class Rows(torch.utils.data.Dataset[Any]):
    """Samples of a small regression."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x, x[:3].sum().reshape(1)


def trained(strategy: rainband.Strategy, folder: Path, workers: int, **given: Any) -> torch.Tensor:
    task = rainband.ModuleTask(
        lambda: torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1)),
        Rows(),
        torch.nn.functional.mse_loss,
        batch_size=8,
        epochs=3,
        **given,
    )
    return parameters(rainband.fit(task, strategy, workers, runtime="sim", runs=folder))


@pytest.mark.parametrize("strategy", [Single(), Sync()])
def test_drop_last_leaves_out_the_short_last_batch_of_each_epoch(strategy: rainband.Strategy, tmp_path: Path) -> None:
    """33 samples in batches of 16: without the last one, BatchNorm never gets a single sample."""
    data = torch.utils.data.TensorDataset(torch.randn(33, 6), torch.zeros(33, 1))

    def task(drop_last: bool) -> rainband.ModuleTask:
        return rainband.ModuleTask(
            lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)),
            data,
            torch.nn.functional.mse_loss,
            batch_size=16,
            epochs=3,
            drop_last=drop_last,
        )

    result = rainband.fit(task(True), strategy, 1, runtime="sim", runs=tmp_path)
    assert (result.accounting.applied, result.module[0].num_batches_tracked.item()) == (6, 6)
    with pytest.raises(Exception, match="more than 1 value per channel") as caught:
        rainband.fit(task(False), strategy, 1, runtime="sim", runs=tmp_path)
    assert "drop_last=True" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.AdamW(params, 1e-2),
        lambda params: torch.optim.Adafactor(params, 1e-2),  # its steps depend on whole matrices
    ],
    ids=["AdamW", "Adafactor"],
)
def test_the_tasks_own_optimizer_and_scheduler_step_on_every_worker(optimizer: Any, tmp_path: Path) -> None:
    given = {"optimizer": optimizer, "scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.5)}
    alone = trained(Single(), tmp_path, 1, **given)
    assert torch.equal(trained(Sync(), tmp_path, 1, **given), alone)
    torch.testing.assert_close(trained(Sync(), tmp_path, 3, **given), alone, rtol=0.0, atol=1e-5)
    assert not torch.allclose(trained(Sync(), tmp_path, 3), alone, atol=1e-3)


def test_an_optimizer_of_the_task_that_nobody_uses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the task has its own optimizer, and downpour makes updates in another way"):
        trained(rainband.Downpour(), tmp_path, 2, optimizer=lambda params: torch.optim.SGD(params, 0.1))
    with pytest.raises(ValueError, match="a scheduler needs the task's own optimizer"):
        trained(Sync(), tmp_path, 2, scheduler=lambda optimizer: None)


# ---- settings ----


def test_settings_of_batches_per_worker_say_what_they_need() -> None:
    for setting in ({"scaling": "linear"}, {"backup_workers": 1}):
        with pytest.raises(ValueError, match="needs batch_per_worker=true"):
            load_strategy("sync", setting)
        assert load_strategy("sync", {**setting, "batch_per_worker": True}).requires.servers
    assert not Sync().requires.servers and Sync().lr_factor(4) == 1.0


# ---- in processes ----


def parameters(result: rainband.FitResult) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in result.module.parameters()])


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 3])
def test_processes_that_share_each_batch_make_the_updates_of_one(workers: int, tmp_path: Path) -> None:
    alone = rainband.fit(TASK, Single(**SETTINGS), runs=tmp_path)
    shared = rainband.fit(TASK, Sync(**SETTINGS), workers=workers, runs=tmp_path)
    if workers == 1:
        assert torch.equal(parameters(shared), parameters(alone))
    torch.testing.assert_close(parameters(shared), parameters(alone), rtol=0.0, atol=1e-6)
    assert (shared.accounting.applied, shared.accounting.batches) == (14, 14)


class Dying(Quadratic):
    """Kills the process of worker 1 in the middle of its fifth batch."""

    calls = 0

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        Dying.calls += 1
        if Dying.calls == 5 and "worker 1" in Path("/proc/self/cmdline").read_text():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


@pytest.mark.processes
def test_a_killed_process_changes_no_update(tmp_path: Path) -> None:
    lost: list[events.Lost] = []
    task = Dying(dimension=9, samples=103, batch_size=16, epochs=2)
    alone = rainband.fit(TASK, Single(**SETTINGS), runs=tmp_path)
    shared = rainband.fit(
        task,
        Sync(**SETTINGS),
        workers=3,
        runs=tmp_path,
        on_event=lambda event: lost.append(event) if isinstance(event, events.Lost) else None,
    )
    assert [event.node for event in lost] == ["worker 1"]
    torch.testing.assert_close(parameters(shared), parameters(alone), rtol=0.0, atol=1e-6)
    assert (shared.accounting.applied, shared.accounting.lost, shared.accounting.applied_twice) == (14, 0, 0)
