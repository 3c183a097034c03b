"""Averaging in pairs: what it does to the mean of the models, and what failures change."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import rainband
from rainband.model.flat_parameters import Flat
from rainband.model.gradient import Gradient
from rainband.protocol import events
from rainband.protocol.layout import cut
from rainband.protocol.messages import Assign, Report, ReportRequest
from rainband.protocol.worker_stats import Stats
from rainband.runtimes.hogwild import pairs
from rainband.runtimes.hogwild.memory import SharedParameters
from rainband.runtimes.hogwild.pairs import ModelLocks, PairParameters, copy_into
from rainband.runtimes.hogwild.server import HogwildServer
from rainband.strategies.neighbors.async_gossip import AsyncGossip
from rainband.strategies.neighbors.gossip import Gossip
from rainband.strategies.single import Single
from rainband.strategy import Batch, Worker
from rainband.tasks.quadratic import Quadratic
from rainband.transports.shared_memory import SharedSegment
from rainband.views.summary import accounting as told
from tests.builders import make_plan
from tests.test_local_steps import OneHot, fitted, weights

TASK = Quadratic(dimension=5, samples=96, batch_size=4, epochs=2)  # 48 batches
PLAN = make_plan(num_samples=40, batch_size=2, epochs=1, portion_batches=8)


# ---- the laws of the paper ----


@pytest.mark.parametrize("graph", ["ring", "torus", "exponential", "complete"])
def test_each_gradient_moves_the_mean_of_the_models_by_its_part(graph: str, tmp_path: Path) -> None:
    """A batch moves one number of one model of four by 1. Averaging moves no mean, so it ends at a quarter."""
    result = fitted(OneHot(64), AsyncGossip(lr=1.0, graph=graph), tmp_path)
    torch.testing.assert_close(weights(result), torch.full((64,), 0.25, dtype=torch.float64))
    assert (result.accounting.applied, result.accounting.lost, result.accounting.applied_twice) == (64, 0, 0)


def test_one_worker_is_single(tmp_path: Path) -> None:
    alone = fitted(TASK, AsyncGossip(lr=0.1, momentum=0.9), tmp_path, 1)
    assert torch.equal(weights(alone), weights(fitted(TASK, Single(lr=0.1, momentum=0.9), tmp_path, 1)))


def memory(number: int = 4) -> SharedParameters:
    server = HogwildServer(bytearray, in_pairs=True)
    server.receive(Assign(PLAN, cut(Flat(torch.nn.Linear(5, 3)).layout), ({},), number))
    assert server.memory is not None
    return server.memory


def spread(models: list[list[Tensor]]) -> float:
    values = torch.stack([vector for (vector,) in models]).double()
    return float((values - values.mean(0)).square().sum())


def test_without_gradients_a_pair_keeps_the_mean_and_loses_half_its_squared_distance() -> None:
    """The squared distances from the mean fall by |x_i - x_j|^2 / 2, which is the law of a pairwise mean."""
    shared = memory()
    for number, (vector,) in enumerate(shared.models):
        vector.copy_(torch.randn(len(vector), generator=torch.Generator().manual_seed(number)))
    flat, stats = Flat(torch.nn.Linear(5, 3)), Stats()
    client: Any = SimpleNamespace(memory=shared, stats=stats, flat=flat, observer=None)
    params = PairParameters(1, client, locks=None)
    mean, before = shared.mean()[0], spread(shared.models)
    apart = float((shared.models[1][0] - shared.models[3][0]).double().square().sum())
    params._average(3)
    torch.testing.assert_close(shared.mean()[0], mean)
    assert torch.equal(shared.models[1][0], shared.models[3][0])
    assert spread(shared.models) == pytest.approx(before - apart / 2, rel=1e-5)
    assert stats.disagreement == pytest.approx(math.sqrt(apart * 3 / 8), rel=1e-5)
    assert (shared.meetings(3), shared.meetings(1)) == (1, 0)


def test_partners_are_neighbors_and_all_of_them_alike() -> None:
    ring = AsyncGossip(graph="ring")
    partners = Counter(ring.partner(2, 8, Batch(portion, k, 0)) for portion in range(50) for k in range(20))
    assert set(partners) == {1, 3} and min(partners.values()) > 400
    assert ring.partner(0, 1, Batch(0, 0, 0)) == 0


def sent(graph: str, workers: int, folder: Path) -> dict[int, int]:
    history = fitted(TASK, AsyncGossip(lr=0.01, graph=graph), folder, workers).history
    return {rank: progress.sent_bytes[rank] for progress in history for rank in progress.sent_bytes}


@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_a_step_sends_one_model_however_many_workers_there_are(graph: str, tmp_path: Path) -> None:
    for workers in (2, 4, 8):
        assert sum(sent(graph, workers, tmp_path).values()) == 48 * 5 * 4


def test_a_slow_worker_makes_fewer_steps_and_holds_nobody_back(tmp_path: Path) -> None:
    network, steps = tmp_path / "machines.toml", {}
    for strategy in (AsyncGossip(lr=1.0), Gossip(lr=1.0)):
        network.write_text("[compute]\nslow_workers = [3]\nslow_factor = 10.0\n")
        history = fitted(OneHot(1600), strategy, tmp_path, network=str(network)).history
        middle = history[len(history) // 3]
        steps[type(strategy)] = [middle.samples_per_s[rank] for rank in range(4)]
    assert max(steps[AsyncGossip]) > 8 * steps[AsyncGossip][3] and max(steps[Gossip]) < 1.5 * steps[Gossip][3]


def test_staleness_is_how_often_others_changed_the_model_meanwhile(tmp_path: Path) -> None:
    result = fitted(OneHot(400), AsyncGossip(lr=1.0, graph="complete"), tmp_path)
    assert 0.8 < result.staleness.mean < 1.2  # three others, each of which meets one of three in a step
    assert fitted(OneHot(24), AsyncGossip(lr=1.0), tmp_path, 1).staleness.max == 0


# ---- failures ----

FAULTS = (
    "0.03 kill worker 1",
    "0.03 kill worker 0\n0.04 kill worker 2",
    "0.03 crash worker 0",
    "0.03 pause worker 1 for 1",
    "0.02 kill worker 1\n0.05 start worker 1",
    "0 kill worker 1",
    "0.02 kill worker 1\n0.03 kill worker 2\n0.04 kill worker 3",
)


@pytest.mark.parametrize("faults", FAULTS)
def test_whatever_fails_each_batch_counts_once(faults: str, tmp_path: Path) -> None:
    result = fitted(OneHot(64), AsyncGossip(lr=1.0), tmp_path, faults=faults)
    torch.testing.assert_close(weights(result), torch.full((64,), 0.25, dtype=torch.float64))
    assert (result.accounting.applied, result.accounting.lost) == (64, 0)


def test_a_worker_that_slept_while_its_batches_were_reassigned_adds_none_of_them(tmp_path: Path) -> None:
    result = fitted(OneHot(400), AsyncGossip(lr=1.0), tmp_path, faults="0.1 pause worker 1 for 0.5")
    assert result.accounting.refused["revoked"] and result.accounting.applied_twice == 0
    torch.testing.assert_close(weights(result), torch.full((400,), 0.25, dtype=torch.float64))


class Twice(AsyncGossip):
    """Adds each step twice."""

    async def run(self, worker: Worker) -> None:
        add = worker.params.average_with
        worker.params.average_with = lambda partner, step, gradient: add(partner, step + step, gradient)  # type: ignore[method-assign]
        await super().run(worker)


def test_the_check_notices_a_step_that_is_added_twice(tmp_path: Path) -> None:
    assert weights(fitted(OneHot(64), Twice(lr=1.0), tmp_path)).tolist() != [0.25] * 64


class NotFinite(OneHot):
    """Has one batch whose loss is not finite."""

    def loss(self, model: torch.nn.Module, batch: Any) -> Tensor:
        loss: Tensor = super().loss(model, batch)
        return loss * math.nan if batch[0][0, 3] else loss


def test_a_gradient_that_is_not_finite_is_skipped(tmp_path: Path) -> None:
    result = fitted(NotFinite(24), AsyncGossip(lr=1.0), tmp_path)
    assert (result.accounting.applied, result.accounting.skipped) == (23, {"not finite": 1})
    assert sorted(weights(result).tolist()) == [0.0] + [0.25] * 23


def test_the_summary_has_no_word_of_missing_locks(tmp_path: Path) -> None:
    server = HogwildServer(bytearray, in_pairs=True)
    server.receive(Assign(PLAN, cut(Flat(torch.nn.Linear(5, 3)).layout), ({},), 2))
    (report,) = server.receive(ReportRequest())
    assert isinstance(report, Report) and report.in_pairs and not report.lock_free
    counts = {"applied": 3, "batches": 3, "applied_twice": 0, "in_pairs": True}
    assert told(counts) == ["3 of 3 applied, 0 applied twice"]


def test_strategies_that_do_not_declare_pairs_are_refused(tmp_path: Path) -> None:
    class Undeclared(Single):
        async def run(self, worker: Worker) -> None:
            await worker.params.average_with(0, worker.params.copy(), Gradient([], (), 0, 0.0))

    with pytest.raises(rainband.errors.RainbandError, match="declares in_pairs=True"):
        fitted(TASK, Undeclared(), tmp_path, 1)


# ---- locks, and processes ----


def lock_and(fd: int, rank: int, locked: Any, then: Any) -> None:
    with ModelLocks(fd).of(rank):
        locked.set()
        then.wait(20)


@pytest.mark.processes
def test_a_lock_is_waited_for_and_one_of_a_dead_process_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = SharedSegment.create("locks", 4096).fd
    forking = multiprocessing.get_context("fork")
    locked, then = forking.Event(), forking.Event()
    other = forking.Process(target=lock_and, args=(fd, 2, locked, then))
    other.start()
    assert locked.wait(10)
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            os.kill(other.pid or 0, signal.SIGKILL)
            other.join()

    monkeypatch.setattr(pairs.time, "sleep", look)
    with ModelLocks(fd).of(2, 1):
        assert len(looks) == 3
    os.close(fd)


@pytest.mark.processes
def test_a_lock_that_a_stopped_worker_keeps_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = SharedSegment.create("locks", 4096).fd
    forking = multiprocessing.get_context("fork")
    locked, then = forking.Event(), forking.Event()
    other = forking.Process(target=lock_and, args=(fd, 1, locked, then))
    other.start()
    assert locked.wait(10)
    monkeypatch.setattr(pairs, "PATIENCE_S", 0.0)
    with ModelLocks(fd).of(1):
        pass
    then.set()
    other.join()
    os.close(fd)


class Dying(OneHot):
    """Kills the process of worker 1 in its second batch."""

    calls = 0

    def loss(self, model: torch.nn.Module, batch: Any) -> Tensor:
        Dying.calls += 1
        if Dying.calls == 2 and "worker 1" in Path("/proc/self/cmdline").read_text():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


@pytest.mark.processes
def test_the_steps_of_a_killed_process_stay_and_the_rest_is_reassigned(tmp_path: Path) -> None:
    lost: list[str] = []

    def note(event: events.AnyEvent) -> None:
        if isinstance(event, events.Lost):
            lost.append(str(event.node))

    result = rainband.fit(Dying(512), AsyncGossip(lr=1.0), workers=4, runs=tmp_path, on_event=note)
    assert lost == ["worker 1"] and result.accounting.applied == 512
    torch.testing.assert_close(weights(result), torch.full((512,), 0.25, dtype=torch.float64))


def test_a_copy_is_a_copy() -> None:
    ones, zeros = [torch.ones(3)], [torch.zeros(3)]
    copy_into(zeros, ones)
    ones[0].add_(1)
    assert zeros[0].tolist() == [1.0] * 3
