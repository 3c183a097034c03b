"""One memory for all workers: its tables, what its keeper tells of them, and runs in virtual time and as processes."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rainband.cli.options.words import configured
from rainband.model.flat_parameters import Flat
from rainband.plugins import load_strategy
from rainband.protocol import events
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.layout import cut
from rainband.protocol.messages import (
    AcceptedBatches,
    AdjustRule,
    Assign,
    BlockReady,
    Flush,
    Forget,
    Message,
    Ready,
    Report,
    ReportRequest,
    Revoke,
)
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.configure import check_custom_loop
from rainband.runtimes.hogwild import saving
from rainband.runtimes.hogwild.memory import STALEST, SharedParameters, offsets_of
from rainband.runtimes.hogwild.saving import copy_paused
from rainband.runtimes.hogwild.server import HogwildServer
from rainband.runtimes.hogwild.worker import _rate, add_in_place
from rainband.runtimes.simulation import run as sim
from rainband.strategy import Batch
from rainband.tasks.clicks import Clicks
from rainband.tasks.linear import Linear
from rainband.tasks.quadratic import Quadratic
from rainband.tasks.task import TensorData
from rainband.views.summary import accounting as told
from rainband.worker.worker import Sampler
from tests.builders import make_plan
from tests.processes import LR, RunLauncher, exact

WORKERS = 3
PLAN = make_plan(num_samples=40, batch_size=2, epochs=1, portion_batches=8)  # portions of 8, 8 and 4 batches
BLOCKS = cut(Flat(nn.Linear(5, 3)).layout)


def assign(plan: DataPlan = PLAN) -> Assign:
    return Assign(plan, BLOCKS, ({},), WORKERS)


def kept() -> tuple[HogwildServer, SharedParameters]:
    hogwild_server = HogwildServer(bytearray)
    assert hogwild_server.receive(assign()) == []
    assert hogwild_server.memory is not None
    return hogwild_server, hogwild_server.memory


def reported(hogwild_server: HogwildServer, message: Message | None = None) -> Report:
    (report,) = hogwild_server.receive(message or ReportRequest())
    assert isinstance(report, Report)
    return report


def write(memory: SharedParameters, worker: int, batch: Batch, missed: int = 0) -> None:
    memory.begin(worker, batch)
    memory.wrote(worker, batch, missed)


# ---- the memory ----


def test_parameters_and_tables_lie_beside_each_other_on_lines_of_their_own() -> None:
    offsets = offsets_of(BLOCKS, PLAN, WORKERS)
    own, staleness, fences, done, skipped = offsets[:5]
    (((dtype, numel, vector),),) = offsets.models

    assert (own, staleness - own) == (64, 3 * 64)
    assert fences - staleness >= 3 * (STALEST + 1) * 8
    assert done - fences == skipped - done == vector - skipped == 64  # three words each
    assert (dtype, numel) == ("float32", 32) and offsets.num_bytes == vector + 128
    assert all(place % 64 == 0 for place in (*offsets[:5], vector))


def test_two_who_map_the_same_bytes_see_the_same() -> None:
    buffer = bytearray(offsets_of(BLOCKS, PLAN, WORKERS).num_bytes)
    mine, yours = (SharedParameters(buffer, BLOCKS, PLAN, WORKERS) for _ in range(2))

    mine.vectors[0][7] = 2.5
    write(mine, 1, Batch(0, 3, 1))
    assert yours.vectors[0][7] == 2.5
    assert yours.accepted_set(0) == 0b1000 and yours.version == 1


def test_the_version_is_what_all_workers_have_written_and_each_counts_for_itself() -> None:
    _, memory = kept()
    for number in range(5):
        write(memory, number % 2, Batch(0, number, 1), missed=number)

    assert memory.version == 5
    assert memory.staleness() == {0: Counter({0: 1, 2: 1, 4: 1}), 1: Counter({1: 1, 3: 1})}


def test_who_missed_more_than_can_be_counted_is_counted_with_the_most() -> None:
    _, memory = kept()
    write(memory, 2, Batch(0, 0, 1), missed=10**6)
    assert memory.staleness() == {2: Counter({STALEST: 1})}


def test_a_fence_holds_for_smaller_lease_numbers_and_never_falls() -> None:
    _, memory = kept()
    memory.fence(1, 3)
    memory.fence(1, 2)

    assert [memory.is_fenced(Batch(1, 0, lease)) for lease in (1, 2, 3, 4)] == [True, True, False, False]
    assert not memory.is_fenced(Batch(0, 0, 1))


def test_what_was_written_under_a_lease_that_was_taken_back_is_counted_and_not_marked() -> None:
    """The batch accounting say so: it was applied once more than it is marked."""
    hogwild_server, memory = kept()
    batch = Batch(1, 2, 1)
    memory.begin(0, batch)
    memory.fence(1, 2)
    memory.wrote(0, batch, 0)

    assert memory.accepted_set(1) == 0 and memory.version == 1
    (tally,) = reported(hogwild_server).blocks
    assert (tally.accepted, tally.applied) == (0, 1)


def test_a_copy_for_a_checkpoint_has_exactly_the_updates_that_are_marked() -> None:
    """Two threads add 1 to every element for each batch, while copies are made."""
    hogwild_server, memory = kept()
    batches = [Batch(portion, k, 1) for portion in range(memory.plan.num_portions) for k in range(4)]
    batches = [b for b in batches if memory.plan.full(b.portion) >> b.k & 1]

    def work(worker: int) -> None:
        for batch in batches[worker::2]:
            memory.begin(worker, batch)
            for vector in memory.vectors:
                for part in vector.split(3):
                    part += 1
            memory.wrote(worker, batch, 0)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in (0, 1)]
    for thread in threads:
        thread.start()
    copies = [copy_paused(hogwild_server) for _ in range(10)]
    for thread in threads:
        thread.join()
    for blocks in copies:
        for saved, tensors in blocks:
            marked = sum(mask.bit_count() for mask in saved.open.values())
            assert marked == saved.applied and bool((tensors["values"] == marked).all())
    assert not memory.paused and memory.version == len(batches)


def test_a_copy_does_not_wait_for_ever_for_a_worker_that_stands_still_but_not_at_all_for_a_lost_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saving, "PATIENCE_S", 0.0)
    hogwild_server, memory = kept()
    memory.begin(1, Batch(0, 0, 1))
    with pytest.raises(OSError, match="worker 1 was in the middle of an update"):
        copy_paused(hogwild_server)
    assert not memory.paused
    hogwild_server.receive(Forget(1))
    assert copy_paused(hogwild_server)


@pytest.mark.parametrize("finished", [False, True])
def test_whether_a_worker_was_writing_when_it_was_lost_is_seen(finished: bool) -> None:
    hogwild_server, memory = kept()
    memory.begin(2, Batch(1, 0, 1))
    if finished:
        memory.wrote(2, Batch(1, 0, 1), 0)

    assert memory.is_writing(2) is not finished and not memory.is_writing(0)
    hogwild_server.receive(Forget(2))
    write(memory, 0, Batch(1, 0, 2))  # another does it again
    assert reported(hogwild_server).cut_short == (0 if finished else 1)


# ---- its keeper ----


def test_the_run_may_begin_when_the_first_values_are_in() -> None:
    hogwild_server, _ = kept()
    assert hogwild_server.receive(BlockReady(0)) == [Ready()]


def test_before_the_size_is_known_there_is_nothing_to_say() -> None:
    assert HogwildServer(bytearray).receive(ReportRequest()) == []


def test_a_portion_taken_back_is_fenced_and_its_marks_are_reported() -> None:
    hogwild_server, memory = kept()
    write(memory, 0, Batch(2, 1, 1))
    memory.skip(Batch(2, 3, 1))

    assert hogwild_server.receive(Revoke(2, 2)) == [AcceptedBatches(2, 2, (0b1010,))]
    assert memory.is_fenced(Batch(2, 0, 1))


def test_the_guard_lowers_the_learning_rate_once_for_every_decision() -> None:
    hogwild_server, memory = kept()
    assert memory.lr_factor == 1.0
    for number in (1, 1, 2):
        hogwild_server.receive(AdjustRule(number, 0.5))
    assert memory.lr_factor == 0.25


def test_a_report_says_what_is_complete_what_is_skipped_and_what_was_missed() -> None:
    hogwild_server, memory = kept()
    for k in range(8):
        write(memory, 0, Batch(0, k, 1), missed=2)
    for k in range(3):
        write(memory, 1, Batch(2, k, 1), missed=0)
    memory.skip(Batch(2, 3, 1))
    memory.refuse(1)
    report = reported(hogwild_server, Flush())

    assert (report.first_open, report.full, report.accepted, report.updates) == (1, (2,), 12, 11)
    assert report.skipped == {"not finite": 1}
    assert report.refused == {"revoked": 1} and report.flushed
    (missed,) = report.missed
    assert (missed.pushes, missed.total, missed.most) == (11, 16, 2)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.booleans()), max_size=30))
def test_marks_are_a_set_however_often_and_by_whom_they_are_made(made: list[tuple[int, int, bool]]) -> None:
    hogwild_server, memory = kept()
    inside = [(p, k, skipped) for p, k, skipped in made if k < PLAN.batches_in(p)]
    for number, (portion, k, skipped) in enumerate(inside):
        if skipped:
            memory.skip(Batch(portion, k, 1))
        else:
            write(memory, number % WORKERS, Batch(portion, k, 1))
    report, done = reported(hogwild_server), {(p, k) for p, k, _ in inside}

    assert report.accepted == len(done)
    complete = [p for p in range(3) if all((p, k) in done for k in range(PLAN.batches_in(p)))]
    assert sorted({*range(report.first_open), *report.full}) == complete
    assert report.blocks[0].applied == sum(not skipped for *_, skipped in inside)


# ---- a step ----

SIGNALLING = 0x7FA00000  # a NaN that becomes another one when anything is added to it


def test_a_sparse_step_writes_the_rows_it_touches_and_no_others() -> None:
    """Reading a row and writing it back with nothing added would make a quiet NaN of a signalling one."""
    table = torch.full((6, 2), SIGNALLING, dtype=torch.int32).view(torch.float32)
    table[1] = table[4] = 10.0
    rows = torch.tensor([[1, 4]])
    gradient = torch.sparse_coo_tensor(rows, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (6, 2), check_invariants=True)

    add_in_place(table, gradient.coalesce(), -2.0)
    assert table[[1, 4]].tolist() == [[8.0, 6.0], [4.0, 2.0]]
    assert (table.view(torch.int32)[[0, 2, 3, 5]] == SIGNALLING).all()

    add_in_place(table, torch.zeros(6, 2), 1.0)  # as a dense one would
    assert not (table.view(torch.int32) == SIGNALLING).any()


def test_parameter_groups_may_have_a_rate_of_their_own_and_nothing_else() -> None:
    assert [_rate(0, {}, 0.5), _rate(1, {"lr": 0.25}, 0.5), _rate(2, {"weight_decay": 0.0}, 0.5)] == [0.5, 0.25, 0.5]
    with pytest.raises(ValueError, match="parameter group 1 has momentum=0.9"):
        _rate(1, {"momentum": 0.9}, 0.5)


# ---- the strategy ----


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_an_optimizer_that_remembers_is_refused_with_the_reason(optimizer: str) -> None:
    with pytest.raises(
        ValueError, match="each process would keep the state of its own gradients only: leave it at sgd"
    ):
        load_strategy("hogwild", {"optimizer": optimizer})


def test_it_needs_no_servers_and_takes_none() -> None:
    config = configured(["digits", "hogwild"], {"workers": 2})
    assert (config.num_workers, config.num_servers) == (2, 0)
    with pytest.raises(ValueError, match="hogwild has no servers: omit servers=2, or choose"):
        configured(["digits", "hogwild"], {"servers": 2})


def test_it_has_no_place_in_a_loop_of_ones_own() -> None:
    with pytest.raises(ValueError, match="in memory that all workers share"):
        check_custom_loop("hogwild", load_strategy("hogwild", {}).requires)


# ---- in virtual time ----


def simulated(path: Path, task: str = "linear", workers: int = 3, faults: str = "", **of_task: Any) -> Any:
    path.mkdir(exist_ok=True)
    seen: list[events.AnyEvent] = []
    config = RunConfig(
        task=task,
        task_settings=of_task,
        strategy="hogwild",
        strategy_settings={"lr": LR, "guard": False},
        num_workers=workers,
        num_servers=0,
        runtime="sim",
        directory=str(path),
        failure_timeout_s=0.1,
        sim=SimSettings(compute={"kind": "lognormal", "spread": 0.3}, faults=faults),
    )
    result = sim.run(config, seen.append)
    return result, seen


def weights(path: Path) -> Tensor:
    return safetensors.torch.load_file(path / "model.safetensors")["weight"].flatten()


BOWL: Any = {"dimension": 5, "samples": 50, "batch_size": 8, "epochs": 2}  # gradients depend on the parameters
SMALL: Any = {"dimension": 16, "samples": 256, "batch_size": 4, "epochs": 2}  # 128 batches
HALF: Any = {**SMALL, "epochs": 1}


def test_every_batch_is_added_once_and_what_a_gradient_missed_is_what_the_others_wrote(tmp_path: Path) -> None:
    result, _ = simulated(tmp_path, **SMALL)

    assert result.outcome == "finished" and (result.workers, result.servers) == (3, 0)
    assert torch.equal(weights(tmp_path), Linear(**SMALL).after(LR))
    accounting = result.accounting
    assert (
        accounting["applied"],
        accounting["lost"],
        accounting["applied_twice"],
        accounting["partially_applied"],
    ) == (128, 0, 0, 0)
    assert told(accounting) == [
        "128 of 128 applied, 0 applied twice",
        "hogwild takes no locks, so updates that overwrote each other cannot be counted",
    ]
    assert told({**accounting, "partially_applied": 1})[0].endswith(
        ", 1 partially applied, because their worker was lost"
    )
    assert result.staleness["mean"] == pytest.approx(2, abs=0.1)  # two others, at the same pace


def test_one_worker_alone_is_plain_sgd_to_the_last_bit(tmp_path: Path) -> None:
    simulated(tmp_path, "quadratic", workers=1, **BOWL)

    task = Quadratic(**BOWL)
    module, data = task.model(), task.data()
    plain = torch.optim.SGD(module.parameters(), lr=LR, foreach=False)
    plan = make_plan(num_samples=50, batch_size=8, epochs=2, portion_batches=1)
    sampler = Sampler(plan)
    for portion in range(plan.num_portions):
        plain.zero_grad()
        task.loss(module, data.batch(sampler.indices(Batch(portion, 0, 1)))).backward()  # type: ignore[no-untyped-call]
        plain.step()
    (trained,) = safetensors.torch.load_file(tmp_path / "model.safetensors").values()
    assert torch.equal(trained, next(module.parameters()))


def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    first, second = (simulated(tmp_path / name, "quadratic")[0] for name in ("a", "b"))
    assert first.trace_hash == second.trace_hash


@pytest.mark.parametrize("faults", ["0.120 kill worker 1", "0.120 kill worker 1\n0.300 start worker 1"])
def test_a_worker_killed_costs_nothing_but_time(tmp_path: Path, faults: str) -> None:
    result, seen = simulated(tmp_path, faults=faults, **SMALL)

    assert [event.node for event in seen if isinstance(event, events.Lost)] == ["worker 1"]
    assert any(isinstance(event, events.BatchesReassigned) and event.from_worker == 1 for event in seen)
    assert result.outcome == "finished"
    assert torch.equal(weights(tmp_path), Linear(**SMALL).after(LR))


def test_one_that_sleeps_through_the_loss_of_its_lease_does_not_write_when_it_wakes(tmp_path: Path) -> None:
    result, _ = simulated(tmp_path, faults="0.120 pause worker 1 for 0.150", **SMALL)

    assert result.accounting["refused"] == {"revoked": 2}  # the first batch of each portion that it had
    assert result.accounting["applied_twice"] == 0
    assert torch.equal(weights(tmp_path), Linear(**SMALL).after(LR))


TROUBLE = st.one_of(
    st.builds(lambda w: f"kill worker {w}", st.integers(1, 2)),
    st.builds(lambda w: f"start worker {w}", st.integers(1, 2)),
    st.builds(lambda w, s: f"pause worker {w} for {s:.3f}", st.integers(0, 2), st.floats(0.01, 0.3)),
    st.builds(lambda w, s: f"netsplit worker {w} > coordinator for {s:.3f}", st.integers(1, 2), st.floats(0.01, 0.3)),
)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), TROUBLE), max_size=5))
def test_whatever_happens_to_workers_every_batch_is_added_exactly_once(story: list[tuple[int, str]]) -> None:
    script = "\n".join(f"{at_ms / 1000:.3f} {what}" for at_ms, what in sorted(story))
    with tempfile.TemporaryDirectory() as folder:
        result, _ = simulated(Path(folder), faults=script, **HALF)
        assert result.outcome == "finished", (script, result.reason)
        assert torch.equal(weights(Path(folder)), Linear(**HALF).after(LR)), script
    assert (result.accounting["lost"], result.accounting["applied_twice"], result.accounting["not_processed"]) == (
        0,
        0,
        0,
    )


def test_nobody_joins_as_a_server(tmp_path: Path) -> None:
    _, seen = simulated(tmp_path, **SMALL)
    assert {event.node for event in seen if isinstance(event, events.Joined)} == {"worker 0", "worker 1", "worker 2"}


# ---- as processes ----


@dataclass(frozen=True)
class Rows:
    """Sample i adds i + 1 to row i: no two batches ever touch the same row."""

    samples: int = 4096
    batch_size: int = 4
    epochs: int = 1

    def model(self) -> nn.Module:
        table = nn.Embedding(self.samples, 16, sparse=True)
        nn.init.zeros_(table.weight)
        return table

    def data(self) -> TensorData:
        return TensorData(torch.arange(self.samples))

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        (rows,) = batch
        picked: Tensor = model(rows)
        return (picked * (rows + 1)[:, None]).sum()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


@pytest.mark.processes
def test_of_rows_that_no_two_workers_touch_no_addition_is_lost(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, "hogwild", workers=3, servers=0, task="tests.test_hogwild:Rows", gated=False) as run:
        assert run.ended() == 0
        wanted = -LR * torch.arange(1.0, 4097.0)[:, None].expand(4096, 16)
        assert torch.equal(run.parameters()["weight"], wanted)
        accounting = run.result().accounting
        assert (
            accounting["applied"],
            accounting["lost"],
            accounting["applied_twice"],
            accounting["partially_applied"],
        ) == (1024, 0, 0, 0)


@pytest.mark.processes
def test_a_worker_killed_at_work_is_not_missed(launcher: RunLauncher, tmp_path: Path) -> None:
    """Here one batch passes at a time, so that no addition can be lost to another."""
    with launcher.run(tmp_path, "hogwild", workers=2, servers=0, samples=256) as run:
        run.under_way()
        run.gate.let(1)
        run.worker(1).kill()
        run.first(events.Lost, node="worker 1")
        run.drip()
        assert run.result().outcome == "finished"
        assert run.result().accounting["partially_applied"] == 0
        assert exact(run)


@pytest.mark.processes
def test_ctrl_c_is_heard_between_two_steps(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, "hogwild", workers=2, servers=0) as run:
        run.under_way()
        run.signal(signal.SIGINT)
        run.first(events.PhaseChanged, phase="finishing", reason="interrupted")
        run.gate.open()
        assert run.ended() == 130
        assert run.result().accounting["lost"] == 0
        assert (run.directory / "model.safetensors").exists()


# ---- the sparse task ----


def test_the_gradient_of_a_click_has_rows_for_its_features_only() -> None:
    task = Clicks(features=50, active=3, samples=64)
    model = task.model()
    task.loss(model, task.data().batch([5, 6])).backward()  # type: ignore[no-untyped-call]
    gradient = model.of.weight.grad
    assert gradient is not None and gradient.is_sparse

    touched = set(gradient.coalesce().indices()[0].tolist())
    assert touched == set(task.data().tensors[0][5:7].flatten().tolist())


def test_clicks_are_learnt() -> None:
    torch.manual_seed(0)
    task = Clicks(features=200, active=5, samples=2048, epochs=1)
    model, data = task.model(), task.data()
    before = task.evaluate(model)["loss"]
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    for start in range(0, 2048, 32):
        optimizer.zero_grad()
        task.loss(model, data.batch(range(start, start + 32))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = task.evaluate(model)
    assert before == pytest.approx(0.693, abs=1e-3) and after["loss"] < 0.5 and after["accuracy"] > 0.75


@pytest.mark.parametrize("wrong", [{"features": 0}, {"active": 0}, {"samples": 0}, {"skew": -1.0}])
def test_clicks_of_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Clicks(**wrong)
