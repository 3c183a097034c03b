"""Strategies whose workers train models of their own: the laws of their means, and what failures change."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import rainband
import rainband.worker.model_rounds as model_rounds
from rainband.plugins import load_strategy
from rainband.protocol import events
from rainband.runtimes.simulation.models.faults import parse
from rainband.runtimes.simulation.oracle.check import check
from rainband.runtimes.simulation.oracle.scenarios import Case, random_case
from rainband.strategies.averaging.adaptive_period import AdaptivePeriod
from rainband.strategies.averaging.averaging import Averaging
from rainband.strategies.averaging.block_momentum import BlockMomentum
from rainband.strategies.averaging.diloco import Diloco
from rainband.strategies.averaging.one_shot import OneShot
from rainband.strategies.single import Single
from rainband.strategies.sync import Sync
from rainband.strategy import Requirements, Strategy, Worker
from rainband.tasks.quadratic import Quadratic
from rainband.tasks.task import TensorData

NAMES = ["adaptive_period", "averaging", "block_momentum", "diloco", "one_shot"]
TASK = Quadratic(dimension=5, samples=96, batch_size=4, epochs=2)  # 48 batches
SHORT = {"adaptive_period": {"period": 4, "interval": 4}, "averaging": {"period": 3, "state": "average"}} | {
    name: {"period": 3} for name in ("block_momentum", "diloco")
}


def fitted(
    task: Any, strategy: Strategy, folder: Path, workers: int = 4, faults: str = "", **given: Any
) -> rainband.FitResult:
    if faults:
        (folder / "faults.txt").write_text(faults)
        given = {**given, "faults": folder / "faults.txt", "failure_timeout_s": 0.3}
    return rainband.fit(task, strategy, workers, runtime="sim", runs=folder, **given)


def weights(result: rainband.FitResult) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in result.module.parameters()])


@dataclass(frozen=True)
class OneHot:
    """A linear loss in which batch b moves only number b: the result shows what became of each batch."""

    batches: int = 24

    batch_size = 1
    epochs = 1

    def model(self) -> torch.nn.Linear:
        model = torch.nn.Linear(self.batches, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        return model

    def data(self) -> TensorData:
        return TensorData(torch.eye(self.batches))

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor]) -> Tensor:
        return -model(batch[0]).mean()

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        return {}


# ---- averaging ----


@pytest.mark.parametrize("samples", [96, 103])  # of 103, an epoch ends with a shorter round and a shorter batch
@pytest.mark.parametrize("workers", [2, 4])
def test_a_period_of_one_is_sync_with_a_batch_for_each_worker(workers: int, samples: int, tmp_path: Path) -> None:
    task = Quadratic(dimension=5, samples=samples, batch_size=4, epochs=2)
    averaged = fitted(task, Averaging(period=1, lr=0.3), tmp_path, workers)
    synchronous = fitted(task, Sync(batch_per_worker=True, lr=0.3), tmp_path, workers, servers=1)
    torch.testing.assert_close(weights(averaged), weights(synchronous), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_one_worker_is_single_where_the_mean_changes_nothing(name: str, tmp_path: Path) -> None:
    plain = {"diloco": {"outer_lr": 1.0, "outer_momentum": 0.0, "optimizer": "sgd"}}.get(name, {})
    alone = fitted(TASK, load_strategy(name, {**SHORT.get(name, {}), **plain, "lr": 0.1}), tmp_path, 1)
    torch.testing.assert_close(weights(alone), weights(fitted(TASK, Single(lr=0.1), tmp_path, 1)), atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_each_batch_moves_one_model_once(period: int, tmp_path: Path) -> None:
    """With 4 workers, each change counts a quarter, also in a last, shorter round."""
    result = fitted(OneHot(24), Averaging(period=period, lr=1.0), tmp_path)
    torch.testing.assert_close(weights(result), torch.full((24,), 0.25, dtype=torch.float64))
    assert result.accounting.applied == 24


def test_the_averaged_iterate_in_closed_form(tmp_path: Path) -> None:
    """All batches are equal: a step shrinks the distance from the optimum by 1 - lr h on each worker."""
    task = Quadratic(dimension=4, samples=64, batch_size=4, epochs=3, noise=0.0, condition=8.0)
    steps = 48 // 4
    found = weights(fitted(task, Averaging(period=3, lr=0.5), tmp_path))
    distance = (1 - 0.5 * task._curvature.double()) ** steps
    torch.testing.assert_close(found, task.optimum().double() * (1 - distance), rtol=1e-5, atol=1e-6)


def test_the_averaged_iterate_with_different_data_in_closed_form(tmp_path: Path) -> None:
    """Steps are affine, so the mean of the models is the mean of each worker's own product of steps."""
    task = Quadratic(dimension=3, samples=48, batch_size=2, epochs=1, condition=4.0)
    found = weights(fitted(task, Watched(period=6, lr=0.25), tmp_path))
    shrink = 1 - 0.25 * task._curvature.double()
    w = torch.zeros(3, dtype=torch.float64)
    order = torch.tensor(Watched.order)
    assert sorted(order.flatten().tolist()) == list(range(48))
    for worker_batches in order.view(1, 4, 6, 2):
        models = []
        for batches in worker_batches:
            own = w.clone()
            for batch in batches:
                mean = task._x[batch].double().mean(0)
                own = mean + shrink * (own - mean)
            models.append(own)
        w = torch.stack(models).mean(0)
    torch.testing.assert_close(found, w, rtol=1e-5, atol=1e-6)


class Watched(Averaging):
    """Averaging that notes the samples of each batch, in the order of the data."""

    order: ClassVar[list[list[int]]] = []

    async def run(self, worker: Worker) -> None:
        from rainband.worker.shared_batches import batch_at

        plan = worker.plan  # type: ignore[attr-defined]
        sampler = worker.sampler  # type: ignore[attr-defined]
        Watched.order = [sampler.indices(batch_at(plan, b)).tolist() for b in range(plan.num_batches)]
        await super().run(worker)


@pytest.mark.parametrize("optimizer", [{"momentum": 0.9}, {"optimizer": "adam"}, {"optimizer": "adagrad"}])
@pytest.mark.parametrize("period", [1, 3, 7])
def test_averaging_models_is_averaging_updates(optimizer: dict[str, Any], period: int, tmp_path: Path) -> None:
    """mean(w_i) = w_0 + mean(w_i - w_0), for every optimizer."""
    by_updates = fitted(TASK, ByUpdates(period=period, lr=0.05, **optimizer), tmp_path, 3)
    by_models = fitted(TASK, Averaging(period=period, lr=0.05, **optimizer), tmp_path, 3)
    torch.testing.assert_close(weights(by_updates), weights(by_models), rtol=0.0, atol=1e-5)


class ByUpdates(Averaging):
    """Averages updates in place of models."""

    async def run(self, worker: Worker) -> None:
        models, optimizer = worker.models, worker.optimizer(self.spec(), self.schedule())
        while await models.begin():
            start = worker.params.copy()
            for batch in models.batches(self.period):
                optimizer.step(await worker.gradient(batch))
            worker.params.replace(start + await models.mean(worker.params.copy() - start))


def exchanged(strategy: Strategy, folder: Path) -> int:
    history = fitted(TASK, strategy, folder).history
    return max(sum(progress.sent_bytes.values()) for progress in history)


@pytest.mark.parametrize("given, vectors", [({}, 0), ({"momentum": 0.9}, 1), ({"optimizer": "adam"}, 2)])
def test_bytes_follow_the_period_and_the_vectors_of_the_optimizer(
    given: dict[str, Any], vectors: int, tmp_path: Path
) -> None:
    of_model = 4 * 5  # bytes
    for period, rounds in ((1, 12), (2, 6), (4, 3)):
        sent = exchanged(Averaging(period=period, lr=0.01, state="average", **given), tmp_path)
        assert sent == 4 * rounds * of_model * (1 + vectors)
        assert exchanged(Averaging(period=period, lr=0.01, **given), tmp_path) == 4 * rounds * of_model


def test_averaged_momentum_is_that_of_the_mean_gradient(tmp_path: Path) -> None:
    """With a period of 1, models and momentum stay equal: it is sync with momentum."""
    averaged = fitted(TASK, Averaging(period=1, lr=0.1, momentum=0.5, state="average"), tmp_path)
    synchronous = fitted(TASK, Sync(batch_per_worker=True, lr=0.1, momentum=0.5), tmp_path, servers=1)
    torch.testing.assert_close(weights(averaged), weights(synchronous), rtol=0.0, atol=1e-6)


def test_the_disagreement_is_the_distance_from_the_mean(tmp_path: Path) -> None:
    """In each round of one step, each worker moves another number by 1: distance sqrt(3/4) from the mean."""
    history = fitted(OneHot(24), Averaging(period=1, lr=1.0), tmp_path).history
    assert history[-1].disagreement == pytest.approx(math.sqrt(0.75), rel=1e-5)


# ---- what else is made of means ----


def test_block_momentum_follows_its_equations(tmp_path: Path) -> None:
    """Each round moves W_g by lr / 4 for each of its batches: G is known."""
    for nesterov in (False, True):
        strategy = BlockMomentum(period=2, lr=1.0, block_momentum=0.5, block_lr=0.8, nesterov=nesterov)
        found = weights(fitted(OneHot(24), strategy, tmp_path)).sum().item()
        model = change = start = 0.0
        for _ in range(3):
            gradient = start + 8 * 0.25 - start
            change = 0.5 * change + 0.8 * gradient
            model += change
            start = model + 0.5 * change if nesterov else model
        assert found == pytest.approx(model, rel=1e-5)


def test_block_momentum_of_zero_is_averaging(tmp_path: Path) -> None:
    plain = fitted(TASK, Averaging(period=3, lr=0.1), tmp_path)
    block = fitted(TASK, BlockMomentum(period=3, lr=0.1, block_momentum=0.0), tmp_path)
    torch.testing.assert_close(weights(block), weights(plain), rtol=0.0, atol=1e-6)


def test_diloco_is_torchs_nesterov_with_the_mean_change(tmp_path: Path) -> None:
    strategy = Diloco(period=2, optimizer="sgd", lr=1.0, outer_lr=0.7, outer_momentum=0.9)
    found = weights(fitted(OneHot(24), strategy, tmp_path)).sum().item()
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    outer = torch.optim.SGD([w], 0.7, momentum=0.9, nesterov=True)
    for _ in range(3):
        w.grad = torch.full((1,), -8 * 0.25, dtype=torch.float64)
        outer.step()
    assert found == pytest.approx(w.item(), rel=1e-5)


def test_diloco_that_takes_the_mean_is_averaging(tmp_path: Path) -> None:
    plain = fitted(TASK, Averaging(period=4, lr=0.1), tmp_path)
    for fragments in (1, 2):  # of one parameter: one of the two fragments is empty
        strategy = Diloco(
            period=4 * fragments, optimizer="sgd", lr=0.1, outer_lr=1.0, outer_momentum=0.0, fragments=fragments
        )
        if fragments == 1:
            assert torch.allclose(weights(fitted(TASK, strategy, tmp_path)), weights(plain), atol=1e-6)


class Layers:
    """Four parameters of one number each: a linear loss whose gradient is 1 for each of them."""

    batch_size, epochs = 1, 1

    def model(self) -> torch.nn.Module:
        return torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1)) for _ in range(4)])

    def data(self) -> TensorData:
        return TensorData(torch.ones(48, 1))

    def loss(self, model: Any, batch: tuple[Tensor]) -> Tensor:
        return -sum(parameter.sum() for parameter in model.parameters())  # type: ignore[return-value]

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        return {}


def test_fragments_are_exchanged_in_turn_and_all_of_them_in_the_last_round(tmp_path: Path) -> None:
    """48 steps on 4 workers: 12 each, in 6 rounds of 2; the last one exchanges all four numbers."""
    strategy = Diloco(period=4, fragments=2, optimizer="sgd", lr=1.0, outer_lr=1.0, outer_momentum=0.0)
    result = fitted(Layers(), strategy, tmp_path)
    assert weights(result).tolist() == [12.0] * 4
    assert max(sum(progress.sent_bytes.values()) for progress in result.history) == 4 * 4 * (5 * 2 + 4)


def test_adacomms_rule() -> None:
    strategy = AdaptivePeriod(period=16)
    assert strategy.next_period(16, loss=0.25, first_loss=1.0) == 8  # sqrt(0.25) * 16
    assert strategy.next_period(16, loss=0.26, first_loss=1.0) == math.ceil(math.sqrt(0.26) * 16)
    assert strategy.next_period(16, loss=1.0, first_loss=1.0) == 8  # it must shrink: half of it
    assert strategy.next_period(1, loss=2.0, first_loss=1.0) == 1
    assert strategy.next_period(16, loss=0.0625, first_loss=1.0, lr_scale=0.25) == 8  # eta_0 / eta = 4
    assert strategy.next_period(16, loss=math.nan, first_loss=1.0) == 8


def test_the_period_falls_while_the_loss_does(tmp_path: Path) -> None:
    """With a loss that is constant, the period is halved after every interval: 8, 4, 2, 1."""
    result = fitted(Layers(), AdaptivePeriod(period=4, interval=4, lr=0.0), tmp_path)
    assert max(sum(progress.sent_bytes.values()) for progress in result.history) == 4 * 16 * (1 + 2 + 4)


def test_one_shot_averages_once(tmp_path: Path) -> None:
    result = fitted(OneHot(24), OneShot(lr=1.0), tmp_path)
    assert weights(result).tolist() == [0.25] * 24
    assert max(sum(progress.sent_bytes.values()) for progress in result.history) == 4 * 24 * 4


# ---- failures ----

FAULTS = {  # -> numbers of workers that a mean may have
    "0.03 kill worker 1": (4, 3),
    "0.03 kill worker 0\n0.04 kill worker 2": (4, 3, 2),
    "0.03 crash worker 0": (4, 3),
    "0.03 pause worker 1 for 1": (4, 3),  # beyond the failure timeout: it is left out, and returns
    "0.02 kill worker 1\n0.05 start worker 1": (4, 3),
    "0.02 netsplit worker 1 > worker 2 for 0.2": (4,),
    "0 kill worker 1": (4, 3),
    "0.02 start worker 4": (4, 5),
    "0.02 kill worker 1\n0.03 kill worker 2\n0.04 kill worker 3": (4, 3, 2, 1),
}


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("period", [1, 3])
def test_whatever_fails_each_batch_is_in_one_mean_once(faults: str, period: int, tmp_path: Path) -> None:
    """A batch counts 1/K in a mean of K workers; in a last, shorter round they count by their samples."""
    result = fitted(OneHot(64), Averaging(period=period, lr=1.0), tmp_path, faults=faults)
    accounting = result.accounting
    assert (accounting.applied, accounting.lost, accounting.applied_twice) == (64, 0, 0)
    shares = {size / total for k in FAULTS[faults] for total in range(1, k * period) for size in cut(total, k)}
    shares |= {1 / k for k in FAULTS[faults]}
    assert all(any(math.isclose(value, share, rel_tol=1e-5) for share in shares) for value in weights(result).tolist())
    whole = [
        value
        for value in weights(result).tolist()
        if any(math.isclose(value, 1 / k, rel_tol=1e-5) for k in FAULTS[faults])
    ]
    assert len(whole) >= 64 - 5 * period


def cut(total: int, parts: int) -> set[int]:
    return {total // parts, total // parts + 1} - {0}


@pytest.mark.parametrize("faults", list(FAULTS)[:6])
@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_goes_on_without_a_lost_worker(name: str, faults: str, tmp_path: Path) -> None:
    strategy = load_strategy(name, {**SHORT.get(name, {}), "lr": 0.05})
    result = fitted(TASK, strategy, tmp_path, faults=faults)
    assert (result.accounting.applied, result.accounting.lost) == (48, 0)
    assert weights(result).isfinite().all()


def test_a_worker_that_joins_later_trains_with_the_others(tmp_path: Path) -> None:
    joined: list[float] = []

    def note(event: events.AnyEvent) -> None:
        if isinstance(event, events.Progress):
            joined.append(event.samples_per_s.get(4, 0.0))

    result = fitted(OneHot(400), Averaging(period=2, lr=1.0), tmp_path, faults="0.02 start worker 4", on_event=note)
    assert result.accounting.applied == 400
    assert any(math.isclose(value, 0.2, rel_tol=1e-5) for value in weights(result).tolist())  # a mean of five


def nothing_is_lost(rounds: model_rounds.ModelRounds) -> None:
    lost: list[int] = []
    close(rounds)
    rounds.lost = lost


close = model_rounds.ModelRounds.close


def test_the_checks_notice_lost_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_rounds.ModelRounds, "close", nothing_is_lost)
    with pytest.raises(rainband.errors.RainbandError):
        fitted(OneHot(64), Averaging(period=3, lr=1.0), tmp_path, faults="0.03 kill worker 1")


# ---- settings ----


@dataclass(frozen=True)
class Undeclared(Strategy):
    """Asks for models without declaring local_steps."""

    lr: float = 0.1

    @property
    def requires(self) -> Requirements:
        return Requirements(servers=False, optimizer="workers", max_replicas=1)

    async def run(self, worker: Worker) -> None:
        await worker.models.begin()


def test_what_is_not_declared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rainband.errors.RainbandError, match="declares local_steps=True"):
        rainband.fit(TASK, Undeclared(), 1, runtime="sim", runs=tmp_path)


@pytest.mark.parametrize(
    "name, settings, told",
    [
        ("averaging", {"period": 0}, "period=0: choose 1 or more steps"),
        ("adaptive_period", {"period": 8, "interval": 4}, "interval=4: choose at least the period, 8 steps"),
        ("block_momentum", {"block_momentum": 1.0}, "block_momentum=1: choose 0 or more, and less than 1"),
        ("diloco", {"period": 4, "fragments": 5}, "choose a period of 1 or more steps, and 1 to 4 fragments"),
    ],
)
def test_wrong_settings_are_refused(name: str, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load_strategy(name, settings)


# ---- in processes ----


@pytest.mark.processes
def test_processes_average_like_simulated_workers(tmp_path: Path) -> None:
    strategy = Averaging(period=3, lr=0.1, momentum=0.9, state="average")
    virtual = weights(fitted(TASK, strategy, tmp_path, 3))
    real = rainband.fit(TASK, strategy, workers=3, runs=tmp_path)
    torch.testing.assert_close(weights(real), virtual, rtol=0.0, atol=1e-6)
    assert real.accounting.applied == 48


class Dying(OneHot):
    """Kills the process of worker 1 in the middle of its fifth batch."""

    calls = 0

    def loss(self, model: torch.nn.Module, batch: Any) -> Tensor:
        Dying.calls += 1
        if Dying.calls == 5 and "worker 1" in Path("/proc/self/cmdline").read_text():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


@pytest.mark.processes
def test_a_killed_process_loses_its_steps_since_the_last_mean_and_no_batch(tmp_path: Path) -> None:
    result = rainband.fit(Dying(24), Averaging(period=2, lr=1.0), workers=3, runs=tmp_path)
    assert (result.accounting.applied, result.accounting.lost) == (24, 0)
    values = sorted(round(value, 3) for value in weights(result).tolist())
    assert values == [0.333] * 12 + [0.5] * 12  # two rounds of three workers, then rounds of two


class TooEarly(Averaging):
    """Takes the mean before the batches are processed."""

    async def run(self, worker: Worker) -> None:
        worker.optimizer(self.spec(), self.schedule())
        while await worker.models.begin():
            worker.models.batches(1)
            await worker.models.mean()


def test_a_mean_before_the_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rainband.errors.RainbandError, match="process the batches of a round before its first"):
        fitted(TASK, TooEarly(), tmp_path)


# ---- fuzzed ----


@pytest.mark.parametrize("kind", ["averaging", "gossip"])
def test_random_faults_lose_no_batch(kind: str) -> None:
    for seed in range(12):
        assert check(random_case(seed, kind)).violations == []


def test_a_batch_in_a_model_that_another_worker_has_received_is_not_repeated() -> None:
    """The first worker is lost before it has published the batch in its model, of which another one has a copy."""
    faults = parse("0.105 start worker 2\n0.167 kill worker 0")
    assert check(Case(30010266, "gossip", num_workers=1, num_servers=0, script=faults)).violations == []


def lost_batches_are_done(rounds: model_rounds.ModelRounds) -> None:
    close(rounds)
    rounds.done += len(rounds.lost)
    rounds.lost = []


def test_the_fuzzer_notices_batches_that_count_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_rounds.ModelRounds, "close", lost_batches_are_done)
    assert any(check(random_case(seed, "averaging")).violations for seed in range(20))


def test_optimizers_of_whole_matrices_work_and_closures_are_refused(tmp_path: Path) -> None:
    matrices = Averaging(optimizer="torch.optim:Adafactor", lr=0.1, period=2)
    result = fitted(TASK, matrices, tmp_path, 2)
    assert result.accounting.applied == 48
    with pytest.raises(ValueError, match="LBFGS cannot run with averaging"):
        fitted(TASK, Averaging(optimizer="torch.optim:LBFGS", lr=0.1), tmp_path, 2)
    with pytest.raises(ValueError, match="or a strategy whose workers run it, such as sync or averaging"):
        fitted(TASK, rainband.Downpour(optimizer="torch.optim:Adafactor"), tmp_path, 2)


def test_the_run_shows_the_disagreement(tmp_path: Path) -> None:
    from rainband.views.event_text import staleness
    from rainband.views.history import RunSoFar
    from rainband.views.sinks.tensorboard import _curves
    from rainband.views.summary import models

    last = fitted(OneHot(24), Averaging(period=1, lr=1.0), tmp_path).history[-1]
    so_far = RunSoFar()
    so_far.absorb(last)
    assert staleness(so_far) == "disagreement 0.866"
    assert _curves(last)["disagreement"] == pytest.approx(math.sqrt(0.75), rel=1e-5)
    assert models(last) == "2.3 kB exchanged; disagreement 0.866, their distance from the mean"
