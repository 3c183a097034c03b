"""A run that continues from a checkpoint, in simulations."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from rainband.checkpoints import commit
from rainband.checkpoints.read import all_names
from rainband.checkpoints.store import LocalStore, open_store
from rainband.coordinator.reporting import Reporting
from rainband.coordinator.saving.checkpoints import Checkpoints, Collected
from rainband.coordinator.state import RunSettings, RunState, WorkerState
from rainband.protocol import events
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.layout import arrange
from rainband.protocol.messages import Heartbeat, Peer, SampleAccount
from rainband.protocol.saved_state import Restore
from rainband.runtimes.checkpoints.place import find, opened
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.run_directory import write_config
from rainband.strategy import Requirements
from rainband.tasks.linear import Linear
from rainband.tasks.quadratic import Quadratic
from tests.checkpoint_runs import TASK, train

ASYNCHRONOUS: list[tuple[str, dict[str, Any]]] = [
    ("downpour", {"optimizer": "sgd", "lr": 0.5}),
    ("downpour", {"optimizer": "sgd", "lr": 0.5, "n_push": 4}),
    ("soft_sync", {"optimizer": "sgd", "lr": 0.5, "n": 1, "scaling": "none"}),
    ("stale_sync", {"optimizer": "sgd", "lr": 0.5, "bound": 1}),
    ("bounded_delay", {"optimizer": "sgd", "lr": 0.5}),
    ("adaptive_bound", {"optimizer": "sgd", "lr": 0.5}),
]


@pytest.mark.parametrize(("strategy", "settings"), ASYNCHRONOUS, ids=str)
@pytest.mark.parametrize(("workers", "servers"), [(3, 2), (1, 1), (5, 7)])
def test_each_batch_is_applied_once_with_other_numbers_of_workers_and_servers(
    tmp_path: Path, strategy: str, settings: dict[str, Any], workers: int, servers: int
) -> None:
    before = train(tmp_path / "a", strategy, settings, checkpoint_every_s=4.0, keep=100)
    assert before.result.outcome == "finished", before.result.reason
    assert len(before.checkpoints) >= 3
    for number, checkpoint in enumerate(before.checkpoints[1::4]):
        directory = tmp_path / f"b{number}"
        after = train(directory, strategy, settings, workers=workers, servers=servers, resume_from=checkpoint)
        assert after.result.outcome == "finished", after.result.reason
        [restored] = after.events(events.Restored)
        assert 0 < restored.step < 96
        assert after.result.accounting["applied"] == 96
        if strategy != "soft_sync":  # there, what a run's end applies has the weight of a full update
            assert torch.equal(after.parameters["weight"].view(-1), TASK.after(0.5))


@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        ({"optimizer": "adam", "lr": 0.1, "lr_schedule": "cosine", "warmup_fraction": 0.2}, True),
        ({"momentum": 0.9, "lr": 0.05, "scaling": "linear"}, True),
        ({"lr": 0.05, "backup_workers": 1}, False),  # which gradients come first depends on the times
    ],
    ids=str,
)
@pytest.mark.parametrize(("workers", "servers"), [(4, 2), (1, 3), (7, 1)])
def test_sync_with_servers_continues_bit_for_bit_with_any_number_of_workers_and_servers(
    tmp_path: Path, settings: dict[str, Any], exact: bool, workers: int, servers: int
) -> None:
    settings = {**settings, "batch_per_worker": True}
    task = Quadratic(dimension=96, samples=120, batch_size=4, epochs=4)
    before = train(tmp_path / "a", "sync", settings, task, workers=4, checkpoint_every_s=6.0, keep=100)
    assert len(before.checkpoints) >= 3
    for number, checkpoint in enumerate(before.checkpoints[::2]):
        directory = tmp_path / f"b{number}"
        after = train(directory, "sync", settings, task, workers=workers, servers=servers, resume_from=checkpoint)
        assert after.result.outcome == "finished", after.result.reason
        assert after.result.accounting["applied"] + sum(after.result.accounting["skipped"].values()) == 120
        if exact:
            assert torch.equal(after.parameters["w"], before.parameters["w"])


@pytest.mark.parametrize("stop_s", [3.3, 7.1, 12.6, 18.2])
@pytest.mark.parametrize(("workers", "servers"), [(4, 2), (3, 1)])
def test_sync_with_servers_that_was_stopped_within_a_round_repeats_that_round(
    tmp_path: Path, stop_s: float, workers: int, servers: int
) -> None:
    settings = {"optimizer": "adam", "lr": 0.1, "batch_per_worker": True}
    task = Quadratic(dimension=96, samples=120, batch_size=4, epochs=4)
    whole = train(tmp_path / "whole", "sync", settings, task, workers=4)
    faults = SimSettings(faults=f"{stop_s} stop coordinator")
    before = train(tmp_path / "a", "sync", settings, task, workers=4, checkpoint_every_s=1e6, sim=faults)
    [checkpoint] = before.checkpoints
    after = train(tmp_path / "b", "sync", settings, task, workers=workers, servers=servers, resume_from=checkpoint)
    assert after.result.outcome == "finished", after.result.reason
    assert after.result.accounting["applied"] == 120
    assert torch.equal(after.parameters["w"], whole.parameters["w"])


class BatchNormTask(Quadratic):
    """A task with buffers, an optimizer and a scheduler of its own."""

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(self.dimension, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        return (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


class OwnOptimizer(BatchNormTask):
    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)


SHARED_TASK = {"dimension": 24, "samples": 120, "batch_size": 12, "epochs": 3}


@pytest.mark.parametrize("strategy", ["sync", "single"])
@pytest.mark.parametrize(
    ("task", "settings"),
    [
        (BatchNormTask(**SHARED_TASK), {"momentum": 0.9, "lr": 0.05, "lr_schedule": "cosine"}),  # type: ignore[arg-type]
        (OwnOptimizer(**SHARED_TASK), {}),  # type: ignore[arg-type]
    ],
    ids=["strategy's optimizer", "task's optimizer"],
)
def test_strategies_whose_workers_step_continue_bit_for_bit(
    tmp_path: Path, strategy: str, task: Quadratic, settings: dict[str, Any]
) -> None:
    workers = 1 if strategy == "single" else 3
    more: dict[str, Any] = {"workers": workers, "servers": 0, "parts": "equal"}
    before = train(tmp_path / "a", strategy, settings, task, checkpoint_every_s=7.0 / workers, keep=100, **more)
    assert before.result.outcome == "finished", before.result.reason
    assert len(before.checkpoints) >= 3
    for number, checkpoint in enumerate(before.checkpoints):
        after = train(tmp_path / f"b{number}", strategy, settings, task, resume_from=checkpoint, **more)
        assert after.result.outcome == "finished", after.result.reason
        assert after.result.accounting["applied"] == 30
        assert after.parameters.keys() == before.parameters.keys()
        assert all(torch.equal(after.parameters[name], value) for name, value in before.parameters.items())


def test_shared_batches_continue_with_another_number_of_workers_up_to_rounding(tmp_path: Path) -> None:
    task = Quadratic(**SHARED_TASK)  # type: ignore[arg-type]
    settings = {"optimizer": "adam", "lr": 0.05}
    before = train(tmp_path / "a", "sync", settings, task, servers=0, checkpoint_every_s=3.0, keep=100)
    for workers in (1, 2, 5):
        after = train(
            tmp_path / f"b{workers}", "sync", settings, task, workers, servers=0, resume_from=before.checkpoints[1]
        )
        assert after.result.accounting["applied"] == 30
        assert torch.allclose(after.parameters["w"], before.parameters["w"], atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "settings", "servers"),
    [
        ("averaging", {"period": 2}, 0),
        ("block_momentum", {"period": 2}, 0),
        ("diloco", {"period": 2}, 0),
        ("adaptive_period", {"period": 2}, 0),
        ("gossip", {}, 0),
        ("elastic", {"period": 2}, 2),
    ],
)
def test_strategies_whose_workers_have_models_of_their_own_continue_with_other_workers(
    tmp_path: Path, strategy: str, settings: dict[str, Any], servers: int
) -> None:
    task = Quadratic(**SHARED_TASK)  # type: ignore[arg-type]
    before = train(tmp_path / "a", strategy, settings, task, servers=servers, checkpoint_every_s=3.0, keep=100)
    assert before.result.outcome == "finished", before.result.reason
    assert before.checkpoints
    for workers in (1, 3, 4):
        directory = tmp_path / f"b{workers}"
        after = train(directory, strategy, settings, task, workers, servers=servers, resume_from=before.checkpoints[0])
        assert after.result.outcome == "finished", after.result.reason
        assert after.result.accounting["applied"] == 30 and not after.result.accounting["lost"]


def test_a_batch_in_a_model_that_was_saved_before_neighbors_have_averaged_it_is_not_repeated(tmp_path: Path) -> None:
    settings = {"optimizer": "sgd", "lr": 0.5}
    before = train(tmp_path / "a", "gossip", settings, workers=1, servers=0, checkpoint_every_s=4.0, keep=100)
    after = train(tmp_path / "b", "gossip", settings, workers=1, servers=0, resume_from=before.checkpoints[0])
    assert torch.equal(after.parameters["weight"].view(-1), TASK.after(0.5))
    [restored] = after.events(events.Restored)
    assert 0 < restored.step < 96 and after.result.accounting["applied"] == 96


# ---- disks and faults ----


class FullDisk:
    """Lets some writes fail, from the n-th on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: int, number: int) -> None:
        self.calls, self.bad = 0, range(first, first + number)
        write = LocalStore.write

        def maybe(store: LocalStore, path: str, chunks: Any) -> None:
            self.calls += 1
            if self.calls in self.bad:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(store, path, chunks)

        monkeypatch.setattr(LocalStore, "write", maybe)


LARGER_BATCHES = Linear(dimension=128, samples=16 * 32, batch_size=16, epochs=3)  # to share; 96 of them, too


@pytest.mark.parametrize(
    ("strategy", "servers", "task"), [("downpour", 2, TASK), ("sync", 0, LARGER_BATCHES)], ids=["downpour", "sync"]
)
def test_a_full_disk_costs_a_warning_and_the_earlier_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, servers: int, task: Linear
) -> None:
    FullDisk(monkeypatch, 5, 4)
    settings = {"optimizer": "sgd", "lr": 0.5}
    run = train(tmp_path / "a", strategy, settings, task, servers=servers, checkpoint_every_s=4.0)
    assert run.result.outcome == "finished" and run.result.accounting["applied"] == 96
    texts = [event.text for event in run.events(events.Warned)]
    assert texts and all("a checkpoint was not written" in text and "No space left" in text for text in texts)
    assert "The last one is that of step" in texts[0]
    assert len(run.checkpoints) == 3 and not any(name.endswith(".partial") for name in run.checkpoints)
    for checkpoint in run.checkpoints:
        opened(checkpoint).verify()


def test_what_a_full_disk_has_cut_does_not_stay_and_fill_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch, 2, 1000)
    train(tmp_path / "a", "downpour", {"optimizer": "sgd", "lr": 0.5}, TASK, servers=2, checkpoint_every_s=4.0)
    assert disk.calls > 6
    assert not list((tmp_path / "a").rglob("*.partial"))


@pytest.mark.parametrize("fault", ["kill worker 0", "pause worker 0 for 3"])
@pytest.mark.parametrize(
    ("strategy", "settings", "servers"),
    [
        ("downpour", {"optimizer": "sgd", "lr": 0.5}, 2),
        ("soft_sync", {"optimizer": "sgd", "lr": 0.5}, 2),
        ("sync", {"optimizer": "sgd", "lr": 0.5, "batch_per_worker": True}, 2),
        ("sync", {"optimizer": "sgd", "lr": 0.5}, 0),
    ],
    ids=str,
)
def test_lost_workers_damage_no_checkpoint(
    tmp_path: Path, strategy: str, settings: dict[str, Any], servers: int, fault: str
) -> None:
    faults = "\n".join(f"{at} {fault}" for at in ((8.005,) if "kill" in fault else (4.005, 12.005)))
    task = TASK if servers else LARGER_BATCHES
    before = train(
        tmp_path / "a",
        strategy,
        settings,
        task,
        servers=servers,
        checkpoint_every_s=2.0,
        keep=100,
        sim=SimSettings(faults=faults),
    )
    assert before.result.outcome == "finished", before.result.reason
    assert len(before.checkpoints) >= 3
    for number, checkpoint in enumerate(before.checkpoints[2::8]):
        after = train(tmp_path / f"b{number}", strategy, settings, task, servers=servers, resume_from=checkpoint)
        assert after.result.outcome == "finished", after.result.reason
        assert after.result.accounting["applied"] == 96
        if strategy == "downpour":
            assert torch.equal(after.parameters["weight"].view(-1), TASK.after(0.5))


def test_checkpoints_may_be_behind_a_url(tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}/folder"
    settings = {"optimizer": "sgd", "lr": 0.5}
    train(tmp_path / "a", "downpour", settings, checkpoint_every_s=4.0, keep=2, checkpoints=place)
    store = open_store(f"{place}/a")
    assert len(all_names(store)) == 2
    checkpoint = find(f"{place}/a", pytest.fail)
    assert checkpoint.name == all_names(store)[0]
    after = train(tmp_path / "b", "downpour", settings, workers=2, servers=3, resume_from=checkpoint.place)
    assert torch.equal(after.parameters["weight"].view(-1), TASK.after(0.5))


@pytest.mark.parametrize("place", ["", "elsewhere"])
def test_the_directory_of_a_run_may_be_renamed(tmp_path: Path, place: str) -> None:
    settings = {"optimizer": "sgd", "lr": 0.5}
    checkpoints = str(tmp_path / place) if place else ""
    run = train(tmp_path / "a", "downpour", settings, checkpoint_every_s=4.0, checkpoints=checkpoints)
    config = RunConfig(task="given", strategy="downpour", num_workers=3, num_servers=2, checkpoints=checkpoints)
    write_config(run.directory, msgspec.structs.replace(config, directory=str(run.directory)))
    renamed = run.directory.rename(tmp_path / "renamed")
    found = find(str(renamed), pytest.fail)
    assert found.manifest.step > 0 and found.place.startswith(str(tmp_path / (place or "renamed")))


def test_a_run_that_ended_before_its_first_checkpoint_continues_from_where_it_began(tmp_path: Path) -> None:
    first = train(tmp_path / "a", "downpour", {"optimizer": "sgd", "lr": 0.5}, checkpoint_every_s=4.0)
    config = RunConfig(task="given", strategy="downpour", num_workers=3, num_servers=2)
    second = tmp_path / "b"
    second.mkdir()
    write_config(second, msgspec.structs.replace(config, directory=str(second), resume_from=first.checkpoints[-1]))
    said: list[str] = []
    assert find(str(second), said.append).place == first.checkpoints[-1]
    assert "has no checkpoint of its own yet" in said[0]


# ---- refusals ----


@pytest.mark.parametrize(
    ("task", "what"),
    [
        (Linear(dimension=64, samples=64, batch_size=2, epochs=3), "weight is [1, 64], there it was [1, 128]"),
        (Linear(dimension=128, samples=128, batch_size=2, epochs=3), "the number of samples is 128, there it was 64"),
        (Linear(dimension=128, samples=64, batch_size=4, epochs=3), "the batch size is 4, there it was 2"),
        (Linear(dimension=128, samples=64, batch_size=2, epochs=3, seed=1), "the data is"),
    ],
    ids=["model", "samples", "batch size", "data"],
)
def test_another_task_is_refused_with_both_sides_named(tmp_path: Path, task: Linear, what: str) -> None:
    settings = {"optimizer": "sgd", "lr": 0.5}
    before = train(tmp_path / "a", "downpour", settings, checkpoint_every_s=4.0)
    after = train(tmp_path / "b", "downpour", settings, task, resume_from=before.checkpoints[0])
    assert after.result.outcome == "failed"
    assert "cannot continue from its checkpoint" in after.result.reason and what in after.result.reason


def test_other_data_are_used_with_force(tmp_path: Path) -> None:
    settings = {"optimizer": "sgd", "lr": 0.5}
    before = train(tmp_path / "a", "downpour", settings, checkpoint_every_s=4.0)
    other = Linear(dimension=128, samples=64, batch_size=2, epochs=3, seed=1)
    after = train(tmp_path / "b", "downpour", settings, other, resume_from=before.checkpoints[0], force=True)
    assert after.result.outcome == "finished" and after.result.accounting["applied"] == 96
    assert any("continuing although the data is" in event.text for event in after.events(events.Warned))


def test_a_run_may_be_made_longer(tmp_path: Path) -> None:
    settings = {"optimizer": "sgd", "lr": 0.5}
    before = train(tmp_path / "a", "downpour", settings, checkpoint_every_s=4.0)
    after = train(tmp_path / "b", "downpour", settings, resume_from=before.checkpoints[-1], epochs=5)
    assert after.result.accounting["applied"] == 160
    assert torch.equal(after.parameters["weight"].view(-1), TASK.after(0.5, epochs=5))


@pytest.mark.parametrize(
    ("strategy", "servers"),
    [("downpour", 2), ("sync", 0), ("averaging", 0), ("single", 0)],
    ids=lambda value: str(value),
)
def test_a_run_cannot_end_before_the_batches_that_are_done(tmp_path: Path, strategy: str, servers: int) -> None:
    settings, workers = {"optimizer": "sgd", "lr": 0.5}, 1 if strategy == "single" else 3
    more: dict[str, Any] = {"task": LARGER_BATCHES, "workers": workers, "servers": servers}
    before = train(tmp_path / "a", strategy, settings, checkpoint_every_s=4.0, keep=99, **more)
    late = next(c for c in before.checkpoints if opened(c).manifest.step > 33)
    after = train(tmp_path / "b", strategy, settings, resume_from=late, epochs=1, **more)
    assert after.result.outcome == "failed"
    assert "and this run is to end after epoch 1: train for" in after.result.reason


def test_files_that_are_on_another_machine_make_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = LocalStore.write

    def elsewhere(store: LocalStore, path: str, chunks: Any) -> None:
        target = LocalStore(tmp_path / "other machine") if "server-1" in path else store
        target.make_folder(path.rpartition("/")[0])
        write(target, path, chunks)

    monkeypatch.setattr(LocalStore, "write", elsewhere)
    monkeypatch.setattr(LocalStore, "sync", lambda store, path: None)
    run = train(tmp_path / "a", "downpour", {"optimizer": "sgd", "lr": 0.5}, checkpoint_every_s=10.0)
    texts = [event.text for event in run.events(events.Warned)]
    assert texts and all(
        "lacks server-1-0000.safetensors" in text and "all machines must reach" in text for text in texts
    )
    assert not [name for name in run.checkpoints if not name.endswith(".partial")]


def test_a_loop_that_continues_counts_from_its_checkpoint_before_its_workers_do() -> None:
    """Their first heartbeats have counted nothing: the first rate of the run was negative."""
    plan = DataPlan(fingerprint="", layout="", num_samples=64, batch_size=8, epochs=9, seed=0, portion_batches=8)
    restore = Restore(place="", step=20, plan=plan, layout=arrange([]), num_replicas=2, samples=160)
    state = RunState(RunSettings(num_workers=2, num_servers=0, restore=restore))
    reporting = Reporting(state)
    assert reporting.sample_account().applied == 160 and reporting.sample_account().rounds == 20
    for rounds, applied, shown in [(0, 0, 160), (20, 159, 159), (21, 168, 168)]:
        heartbeat = Heartbeat(account=SampleAccount(rounds=rounds, applied=applied))
        state.workers[0] = WorkerState(Peer("worker", 0), heartbeat=heartbeat)
        assert reporting.sample_account().applied == shown


def test_the_end_of_one_checkpoint_does_not_drop_the_next() -> None:
    """A run may be stopped while a checkpoint is being made of what the nodes have written."""
    checkpoints = Checkpoints(RunState(RunSettings(num_workers=1, num_servers=1)), Requirements())
    first, last = (Collected(number, "step-0000000001", 0.0, number == 2, set()) for number in (1, 2))
    checkpoints.complete = last
    checkpoints.committed(first, "step-0000000001", now=1.0)
    assert checkpoints.complete is last
    checkpoints.committed(last, "step-0000000002", now=2.0)
    assert checkpoints.complete is None and checkpoints.over and checkpoints.last_name == "step-0000000002"


def test_what_is_being_written_is_not_cleaned_up(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for name in ("step-0000000004.partial", "step-0000000008.partial"):
        store.make_folder(name)
    commit.prune(store, keep=1, busy="step-0000000008")
    assert store.names() == ["step-0000000008.partial"]


@pytest.mark.parametrize(
    ("strategy", "settings", "servers", "exact"),
    [
        ("downpour", {"optimizer": "sgd", "lr": 0.5}, 2, True),
        (
            "soft_sync",
            {"optimizer": "sgd", "lr": 0.5},
            2,
            False,
        ),  # the last gradients before the stop weigh differently
        ("sync", {"optimizer": "adam", "batch_per_worker": True}, 2, True),
        ("sync", {"optimizer": "adam"}, 0, True),
        ("single", {"optimizer": "adam"}, 0, True),
        ("averaging", {"optimizer": "sgd", "period": 2}, 0, False),
    ],
    ids=str,
)
def test_a_run_that_was_stopped_has_a_checkpoint_of_that_moment(
    tmp_path: Path, strategy: str, settings: dict[str, Any], servers: int, exact: bool
) -> None:
    workers = 1 if strategy == "single" else 3
    more: dict[str, Any] = {"workers": workers, "servers": servers, "parts": "equal"}
    whole = train(tmp_path / "whole", strategy, settings, LARGER_BATCHES, **more)
    before = train(tmp_path / "a", strategy, settings, LARGER_BATCHES, stop_at_s=9.0, checkpoint_every_s=1e6, **more)
    assert (before.result.outcome, before.result.exit_code) == ("stopped", 75)
    [checkpoint] = before.checkpoints
    done = before.result.accounting["applied"]
    assert 0 < done < 96 and done - opened(checkpoint).manifest.step in range(3)  # of an open round
    after = train(tmp_path / "b", strategy, settings, LARGER_BATCHES, resume_from=checkpoint, **more)
    assert after.result.outcome == "finished" and after.result.accounting["applied"] == 96
    if exact:
        assert torch.equal(after.parameters["weight"], whole.parameters["weight"])
