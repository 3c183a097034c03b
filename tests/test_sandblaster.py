"""Sandblaster and conjugate gradient: the same iterates as one process, whichever worker computes, dies or is slow."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rainband.bench.cases.lbfgs import FullBatchTraffic
from rainband.coordinator.full_batch import EvaluationWorkers, FullBatchRun
from rainband.coordinator.state import FailureCause
from rainband.coordinator_api import CoordinatorApi
from rainband.full_batch.descent import Limits, Sampling, SearchPoint
from rainband.protocol.events import IterationDone
from rainband.protocol.messages import Answer, AssignItems, Command, Peer
from rainband.protocol.vectors import PARAMS, norm, scale
from rainband.runtimes.simulation.cluster import who_waits
from rainband.runtimes.simulation.models.faults import Chances, random_script
from rainband.strategies.conjugate_gradient import ConjugateGradient
from rainband.strategies.sandblaster import Sandblaster
from rainband.views import event_text
from rainband.views.formatting import short
from rainband.views.history import RunSoFar
from tests.builders import make_plan
from tests.full_batch_runs import (
    EXACT,
    MODEL,
    TIMEOUT_S,
    Logistic,
    Rosenbrock,
    SmallNet,
    led,
    objective,
    parameters,
    plain_lbfgs,
    with_compute,
)

TASKS = [pytest.param(Logistic(), id="logistic"), pytest.param(SmallNet(), id="net")]
IN_TWO_ITEMS = [pytest.param(Logistic(batch_size=30), id="logistic"), pytest.param(SmallNet(batch_size=30), id="net")]


def same_iterates(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain)
    for iteration, (a, b) in enumerate(zip(ours, plain, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8, msg=lambda m, n=iteration: f"iteration {n}: {m}")


# ---- equal to one process ----


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("line_search", ["strong_wolfe", "armijo"])
def test_the_iterates_are_those_of_a_textbook_in_one_process(task: Any, line_search: Any) -> None:
    strategy = Sandblaster(iterations=12, history=4, line_search=line_search, n_push=2, **EXACT)
    ran = led(strategy, task)
    same_iterates(ran.iterates, plain_lbfgs(strategy, *objective(task)))


@pytest.mark.parametrize("num_workers, num_servers", [(1, 1), (3, 1), (1, 3), (5, 2)])
def test_the_numbers_of_workers_and_servers_do_not_matter(num_workers: int, num_servers: int) -> None:
    strategy = Sandblaster(iterations=10, history=3, n_push=2, weight_decay=0.01, **EXACT)
    ran = led(strategy, Logistic(), num_workers, num_servers)
    same_iterates(ran.iterates, plain_lbfgs(strategy, *objective(Logistic(), weight_decay=0.01)))


def test_on_a_small_problem_it_goes_where_torchs_own_lbfgs_goes() -> None:
    f, w = objective(Logistic())
    first = min(1.0, 1.0 / float(f(w)[1].abs().sum()))  # as torch takes it
    ours = led(Sandblaster(iterations=8, first_step=first * float(f(w)[1].norm()), **EXACT), Logistic()).iterates

    at_version = w.clone().requires_grad_()
    torchs = torch.optim.LBFGS(
        [at_version], max_iter=1, line_search_fn="strong_wolfe", tolerance_grad=0, tolerance_change=0
    )

    def closure() -> float:
        loss, at_version.grad = f(at_version.detach())
        return loss

    for ours_now in ours[1:]:
        torchs.step(closure)
        torch.testing.assert_close(at_version.detach(), ours_now, rtol=1e-6, atol=1e-7)


THOROUGH = {"iterations": 1500, "weight_decay": 0.01, "loss_tolerance": 1e-12, "n_push": 1}


@pytest.mark.parametrize("task", IN_TWO_ITEMS)
@pytest.mark.parametrize("strategy", [Sandblaster(**THOROUGH), ConjugateGradient(**THOROUGH)], ids=["lbfgs", "cg"])
def test_the_final_loss_is_scipys(task: Any, strategy: Any) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    f, w = objective(task, weight_decay=0.01)

    def as_scipy_wants(v: Any) -> tuple[float, Any]:
        loss, gradient = f(torch.from_numpy(v))
        return loss, gradient.numpy()

    options = {"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-9}
    scipys = optimize.minimize(as_scipy_wants, w.numpy(), jac=True, method="L-BFGS-B", options=options)
    ran = led(strategy, task)
    assert ran.iterated[-1].loss == pytest.approx(scipys.fun, abs=1e-6)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (1e3, 1e-2)], ids=["plain", "badly scaled"])
def test_rosenbrocks_valleys_are_followed_to_their_end(scales: tuple[float, float]) -> None:
    task = Rosenbrock(scales=scales)
    ran = led(Sandblaster(iterations=500, gradient_tolerance=1e-9, loss_tolerance=0.0, n_push=1), task)
    ends = parameters(ran.cluster).view(-1, 2) * torch.tensor(scales, dtype=torch.float64)
    torch.testing.assert_close(ends, torch.ones_like(ends), rtol=0, atol=1e-5)


def test_conjugate_gradient_follows_rosenbrocks_valley_too() -> None:
    ran = led(ConjugateGradient(iterations=500, gradient_tolerance=1e-7, loss_tolerance=0.0, n_push=1), Rosenbrock())
    torch.testing.assert_close(parameters(ran.cluster), torch.ones(18, dtype=torch.float64), rtol=0, atol=1e-4)


def test_conjugate_gradient_ends_on_a_quadratic_of_n_dimensions_after_about_n_iterations() -> None:
    """The least squares of a line through points: two parameters, two directions, and a search that is not perfect."""

    class Line(Logistic):
        def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss: Tensor = ((model(batch[0])[:, 0] - batch[1]) ** 2).mean()
            return loss

    ran = led(ConjugateGradient(gradient_tolerance=1e-8, loss_tolerance=0.0), Line(dimension=1))
    x, y = Line(dimension=1).data().tensors
    slope, at_0 = np.polyfit(x[:, 0].numpy(), y.numpy(), 1)
    torch.testing.assert_close(parameters(ran.cluster), torch.tensor([slope, at_0]), rtol=0, atol=1e-7)
    assert ran.iterated[-1].iteration <= 8


# ---- whatever happens to the workers ----

FAULTS = {
    "a worker dies": "0.150 kill worker 1",
    "its machine dies": "0.150 crash worker 1",
    "it dies and comes back": "0.150 kill worker 1\n0.400 start worker 1",
    "it sleeps": "0.150 pause worker 1 for 3.000",
    "pushes come twice and overtake each other": "0.000 duplicate worker 0 > server 1 for 99.000\n"
    "0.000 reorder worker 0 > server 1 for 99.000 by 0.050",
    "who was thought to be late idles, and the other dies": "0.442 netsplit worker 1 > server 0 for 1.500\n"
    "0.759 pause coordinator for 0.900\n1.433 slow worker 2 > server 1 for 0.200 by 0.826\n1.883 kill worker 2",
    "a server sleeps": "0.150 pause server 0 for 0.700",
    "commands and answers come twice": "0.000 duplicate coordinator > server 0 for 99.000\n"
    "0.000 duplicate server 0 > coordinator for 99.000\n0.000 duplicate worker 1 > coordinator for 99.000",
    "answers come late": "0.000 slow server 1 > coordinator for 99.000 by 0.300",
    "the coordinator is started again": "0.150 kill coordinator\n0.200 start coordinator",
    "the coordinator is started again and again": "0.100 kill coordinator\n0.200 start coordinator\n"
    "0.230 kill coordinator\n0.400 start coordinator\n0.700 crash coordinator\n0.750 start coordinator",
    "a worker dies while there is no coordinator": "0.150 kill coordinator\n0.160 kill worker 1\n"
    "0.400 start coordinator\n0.600 start worker 1",
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("seed", [1, 2])
def test_the_iterates_do_not_depend_on_what_happens(faults: str, seed: int) -> None:
    strategy = Sandblaster(iterations=4, n_push=1, **EXACT)
    ran = led(strategy, Logistic(), num_workers=3, faults=faults, seed=seed)

    assert ran.cluster.coordinator.state.outcome == "finished", ran.cluster.coordinator.state.reason
    same_iterates(ran.iterates, plain_lbfgs(strategy, *objective(Logistic())))
    accounting = ran.cluster.coordinator.reporting.accounting()
    assert (
        accounting is not None
        and accounting.balanced
        and accounting.applied == accounting.batches
        and not accounting.not_processed
    )


@pytest.mark.parametrize("ms", range(60, 460, 25))
def test_the_coordinator_may_be_lost_at_any_moment(ms: int) -> None:
    """Some of what it said last is lost with it. Iterates, searches and the history are what they would have been."""
    strategy = Sandblaster(iterations=3, n_push=2, **EXACT)
    faults = f"{ms / 1000:.3f} kill coordinator\n{ms / 1000 + 0.1:.3f} start coordinator"
    ran, undisturbed = led(strategy, Logistic(), faults=faults, seed=ms), led(strategy, Logistic())

    assert ran.cluster.coordinator.state.outcome == "finished", ran.cluster.coordinator.state.reason
    coordinator_node = ran.cluster.coordinator.state.full_batch
    assert coordinator_node is not None and coordinator_node.journal.term == 2
    assert ran.cluster.coordinator.reporting.samples_done() == 58 * coordinator_node.requested.evaluations
    same_iterates(ran.iterates, undisturbed.iterates)
    assert [(e.iteration, e.evaluations, e.work_items) for e in ran.iterated] == [
        (e.iteration, e.evaluations, e.work_items) for e in undisturbed.iterated
    ]
    accounting = ran.cluster.coordinator.reporting.accounting()
    assert (
        accounting is not None
        and accounting.balanced
        and accounting.applied == accounting.batches
        and not accounting.not_processed
    )


def test_a_lead_that_asks_for_something_else_the_second_time_is_reported() -> None:
    times = iter((1.0, 2.0))

    async def coordinate(coordinator: CoordinatorApi) -> None:
        await coordinator.compute(scale(PARAMS, next(times)))
        await coordinator.compute(norm(PARAMS))

    server = Peer("server", 0)
    evaluation_workers = EvaluationWorkers(make_plan(coordinated=True), (server,), server, 0)
    first = FullBatchRun(coordinate)
    first.start(evaluation_workers, now=0.0)
    first.receive(server, Answer(1, 1, (), version=1), now=0.0)
    second = FullBatchRun(coordinate, journal=first.journal.resumed())
    second.start(evaluation_workers, now=0.0)
    assert second.over and "coordinate() gave another command 1 than before" in second.error


def test_without_its_servers_or_before_it_has_begun_a_run_does_not_outlive_its_coordinator() -> None:
    early = led(Sandblaster(), Logistic(), faults="0.001 kill coordinator\n0.100 start coordinator")
    assert early.cluster.coordinator.state.reason == "the coordinator was lost: no other can continue this run."
    faults = "0.150 kill coordinator\n0.160 kill server 1\n0.300 start coordinator"
    lost = led(Sandblaster(), Logistic(), faults=faults)
    assert (
        "server 1 was lost" in lost.cluster.coordinator.state.reason
        and "parameters are lost" in lost.cluster.coordinator.state.reason
    )


def test_who_is_only_late_gets_its_turn_without_asking_again() -> None:
    coordinator_node = FullBatchRun(Sandblaster().coordinate)
    server, slow = Peer("server", 0), Peer("worker", 0)
    [(_, command)] = coordinator_node.start(
        EvaluationWorkers(make_plan(coordinated=True), (server,), server, 0), now=0.0
    )
    coordinator_node.want(slow, now=0.0)
    coordinator_node.forget(0, gone=False, died=False)
    assert isinstance(command, Command)
    [(to, work_items)] = coordinator_node.receive(server, Answer(1, command.number, (), version=1), now=1.0)
    assert to == slow and isinstance(work_items, AssignItems)


@pytest.mark.parametrize("seed", range(15))
def test_in_a_storm_it_is_the_same_result_or_there_is_a_reason(seed: int) -> None:
    """Kills, pauses, lost lines, late messages, new coordinators, drawn from a seed; servers live."""
    strategy = Sandblaster(iterations=4, n_push=1, **EXACT)
    chances = Chances(length_s=1.5, timeout_s=TIMEOUT_S, coordinator_returns=True)
    script = random_script(Random(f"storm {seed}"), 3, 2, chances)
    ran = led(strategy, Logistic(), num_workers=3, faults="\n".join(map(str, script)), seed=seed + 1)
    coordinator = ran.cluster.coordinator

    assert coordinator.state.phase == "over", who_waits(ran.cluster)
    same_iterates(ran.iterates, plain_lbfgs(strategy, *objective(Logistic()))[: len(ran.iterates)])
    if coordinator.state.outcome != "finished":
        expected = FailureCause.NO_WORKER_LEFT, FailureCause.WORKERS_DIED, FailureCause.SERVER_LOST
        assert coordinator.state.cause in (*expected, FailureCause.COORDINATOR_LOST)


def test_a_worker_that_is_five_times_slower_hardly_matters() -> None:
    """Three equal workers and one that does a fifth: 15 work items take at least 4.7 s, in a static split 20 s."""
    even: dict[str, Any] = {"kind": "constant", "step_s": 1.0}
    strategy = Sandblaster(iterations=1, n_push=1, **EXACT)
    slow = led(strategy, Logistic(), 4, 1, with_compute(**even, slow_workers=(3,), slow_factor=5.0))
    per_evaluation = slow.iterated[-1].at_s / slow.iterated[-1].evaluations

    assert per_evaluation < 7.0
    assert slow.iterated[-1].backups > 0
    same_iterates(slow.iterates, plain_lbfgs(strategy, *objective(Logistic())))


def test_who_computes_what_another_has_delivered_leaves_off_between_two_batches() -> None:
    """Two work items of four batches. Worker 1 takes 10 s for a batch, 40 s in all; at 8 s the other begins a copy."""
    steps = with_compute(kind="constant", step_s=1.0, slow_workers=(1,), slow_factor=10.0)
    ran = led(Sandblaster(n_push=4, **EXACT), Logistic(samples=32), 2, 1, steps, run=False)
    ran.cluster.run(until_s=12.5)
    assert ran.iterated[0].backups == 1 and ran.iterated[0].at_s == pytest.approx(12.0, abs=0.2)
    ran.cluster.run(until_s=45.0)
    assert ran.cluster.workers[1].stats.steps == 4 and ran.cluster.workers[1].stats.pushed_bytes == 0


def test_equal_workers_do_no_copies() -> None:
    ran = led(Sandblaster(iterations=3, n_push=1), Logistic(), 3, 1, with_compute(kind="constant", step_s=1.0))
    assert ran.iterated[-1].backups == 0


def test_every_worker_pulls_once_in_an_evaluation_and_every_work_item_is_pushed_once() -> None:
    ran = led(Sandblaster(iterations=3, n_push=2), Logistic(), 2, 2, with_compute(kind="constant", step_s=1.0))
    evaluations, model_bytes = ran.iterated[-1].evaluations, 8 * 48  # 20 weights and a bias, each on its boundary
    pulled = [worker.stats.pulled_bytes for worker in ran.cluster.workers.values()]
    assert pulled[1] == evaluations * model_bytes
    assert pulled[0] == (evaluations + 1) * model_bytes  # and once more to save the model
    assert sum(w.stats.pushed_bytes for w in ran.cluster.workers.values()) == evaluations * 8 * model_bytes


def test_three_deaths_at_one_work_item_end_the_run() -> None:
    kills = "\n".join(f"{at:.3f} kill worker {worker}" for worker, at in enumerate((1.5, 3.5, 5.5)))
    ran = led(Sandblaster(n_push=64), Logistic(), 4, 1, with_compute(kind="constant", step_s=1.0), kills)
    assert ran.cluster.coordinator.state.outcome == "failed"
    assert ran.cluster.coordinator.state.reason == "3 workers died on the same batches (work item 0)"


@pytest.mark.parametrize("ms", [*range(600, 616), 1000])
def test_a_run_that_is_stopped_in_an_iteration_goes_back_to_where_it_began(ms: int) -> None:
    """In the middle of a search, or while a direction is made."""
    instant = with_compute(kind="constant", step_s=0.001)
    ran = led(Sandblaster(iterations=50, n_push=1, **EXACT), Logistic(), model=instant, run=False)
    ran.cluster.run(until_s=ms / 1000)
    ran.cluster.coordinator_node.send(ran.cluster.coordinator.shutdown.stop("stopped", "enough"))
    ran.cluster.run()

    assert ran.cluster.coordinator.state.outcome == "stopped" and len(ran.iterates) > 2
    assert torch.equal(parameters(ran.cluster), ran.iterates[-1])
    assert ran.cluster.coordinator.state.full_batch is not None and ran.cluster.coordinator.state.full_batch.error == ""


def test_a_lead_may_only_await_what_its_coordinator_gave() -> None:
    async def coordinate(coordinator: CoordinatorApi) -> None:
        await asyncio.sleep(0)

    server = Peer("server", 0)
    coordinator_node = FullBatchRun(coordinate)
    coordinator_node.start(EvaluationWorkers(make_plan(coordinated=True), (server,), server, 0), now=0.0)
    assert coordinator_node.over and "coordinate() may await only the last command it gave" in coordinator_node.error


def test_a_lead_that_would_calculate_for_ever_ends_soon_after_it_should() -> None:
    async def coordinate(coordinator: CoordinatorApi) -> None:
        while True:
            await coordinator.compute(norm(PARAMS))

    server = Peer("server", 0)
    coordinator_node = FullBatchRun(coordinate)
    coordinator_node.start(EvaluationWorkers(make_plan(coordinated=True), (server,), server, 0), now=0.0)
    coordinator_node.stop()
    for number in range(1, 200):
        coordinator_node.receive(server, Answer(1, number, (1.0,), version=0), now=0.0)
    assert coordinator_node.over and coordinator_node.number == 101


# ---- what it needs ----


@pytest.mark.parametrize("history", [1, 2, 5])
def test_memory_is_at_most_2m_plus_4_vectors(history: int) -> None:
    ran = led(Sandblaster(iterations=12, history=history, **EXACT), SmallNet())
    assert 2 * history + 3 <= ran.vectors <= 2 * history + 4


@pytest.mark.parametrize("dimension", [20, 2000])
def test_an_iteration_takes_less_than_ten_kilobytes_to_and_from_the_coordinator(dimension: int) -> None:
    """With ten pairs and two servers, whatever the model's size."""
    traffic = FullBatchTraffic()
    ran = led(Sandblaster(iterations=14, n_push=1, **EXACT), Logistic(dimension=dimension), run=False, traffic=traffic)
    after: list[int] = []
    note = ran.cluster.coordinator_node.show

    def show(event: Any) -> None:
        note(event)
        if isinstance(event, IterationDone):
            after.append(traffic.num_bytes)

    ran.cluster.coordinator_node.show = show
    ran.cluster.run()
    assert len(after) == 15 and max(later - before for before, later in pairwise(after)) < 10_000


def test_losses_are_means_over_exactly_the_samples() -> None:
    """58 samples in batches of 4: the last one has 2, which count as 2."""
    f, w = objective(Logistic())
    ran = led(Sandblaster(iterations=1, n_push=3), Logistic())
    assert ran.iterated[0].loss == pytest.approx(f(w)[0], abs=1e-14)
    assert ran.iterated[0].gradient_norm == pytest.approx(float(f(w)[1].norm()), abs=1e-14)


def test_a_step_into_infinity_is_taken_back() -> None:
    """The loss is exp(w) - 10 w, from -5: a first step of a thousand overflows."""

    class Steep(Rosenbrock):
        def model(self) -> Any:
            model = torch.nn.Linear(1, 1, bias=False).double()
            torch.nn.init.constant_(model.weight, -5.0)
            return model

        def loss(self, model: Any, batch: tuple[Tensor, ...]) -> Tensor:
            w = model.weight[0, 0]
            loss: Tensor = torch.exp(w) - 10 * w + 0.0 * batch[0].sum()
            return loss

    ran = led(Sandblaster(first_step=9e9, gradient_tolerance=1e-9, loss_tolerance=0.0), Steep())
    assert float(parameters(ran.cluster)) == pytest.approx(np.log(10), abs=1e-8)


@pytest.mark.parametrize("start, kept", [(0.1, False), (3.0, True)], ids=["bent down", "bent up"])
def test_a_pair_counts_only_if_the_curvature_is_positive(start: float, kept: bool) -> None:
    """The loss is cos(w): around 0 it is bent down, and a short step there tells nothing of a valley."""

    class Hills(Rosenbrock):
        def model(self) -> Any:
            model = torch.nn.Linear(1, 1, bias=False).double()
            torch.nn.init.constant_(model.weight, start)
            return model

        def loss(self, model: Any, batch: tuple[Tensor, ...]) -> Tensor:
            loss: Tensor = torch.cos(model.weight[0, 0]) + 0.0 * batch[0].sum()
            return loss

    ran = led(Sandblaster(iterations=1, line_search="armijo", first_step=0.01, **EXACT), Hills(), num_servers=1)
    [block] = ran.cluster.servers[0].server.blocks.values()
    assert ("s0" in block.parameters.vectors.named and "y0" in block.parameters.vectors.named) is kept
    assert ran.iterated[-1].step > 0


# ---- a part of the data in each iteration ----


def test_a_part_of_the_data_lowers_the_loss_of_all_of_it() -> None:
    task = Logistic(samples=200, batch_size=20)
    f, w = objective(task, weight_decay=0.01)
    ran = led(Sandblaster(iterations=12, data_fraction=0.6, n_push=1, weight_decay=0.01, **EXACT), task)
    best = f(plain_lbfgs(Sandblaster(iterations=30), *objective(task, weight_decay=0.01))[-1])[0]
    assert f(parameters(ran.cluster))[0] - best < 0.2 * (f(w)[0] - best)
    assert ran.iterated[-1].work_items == 6 * ran.iterated[-1].evaluations


def test_a_part_keeps_half_of_the_one_before() -> None:
    sampling = Sampling(fraction=0.4, overlap=0.5)
    first = sampling.draw(0, 7, 50, ())
    second = sampling.draw(1, 7, 50, first)
    assert len(first) == len(second) == 20
    assert len(set(first) & set(second)) >= 10
    assert second == sampling.draw(1, 7, 50, first) != sampling.draw(1, 8, 50, first)


# ---- when to stop, and what is wrong ----


@pytest.mark.parametrize(
    "iteration, before, now, why",
    [
        (3, 2.0, SearchPoint(1.0, 0.5), ""),
        (3, 2.0, SearchPoint(1.0, 0.1), "the gradient norm is at most 0.1"),
        (3, 2.0, SearchPoint(1.99, 0.5), "the loss changed by at most a fraction of 0.01"),
        (3, 2e-6, SearchPoint(1e-6, 0.5), ""),  # half of it, however small it is
        (9, 2.0, SearchPoint(1.0, 0.5), "9 iterations are done"),
        (0, float("inf"), SearchPoint(1.0, 0.5), ""),
        (3, 2.0, SearchPoint(float("nan"), 0.5), "the loss is not finite"),
    ],
)
def test_when_it_stops(iteration: int, before: float, now: SearchPoint, why: str) -> None:
    end = Limits(iterations=9, gradient_tolerance=0.1, loss_tolerance=0.01).reached(iteration, before, now)
    assert (end.text if end else "") == why


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"n_push": 65}, "n_push=65: choose from 1 to 64"),
        ({"history": 0}, "choose at least 1"),
        ({"c1": 0.9, "c2": 0.1}, "0 < c1 < c2 < 1"),
        ({"data_fraction": 0.0}, "both must be from 0 to 1"),
        ({"weight_decay": -1.0}, "choose 0 or more for each"),
    ],
)
def test_wrong_settings_are_reported_at_once(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sandblaster(**settings)


def test_it_ends_at_once_where_the_gradient_is_zero() -> None:
    class Flat(Rosenbrock):
        def loss(self, model: Any, batch: tuple[Tensor, ...]) -> Tensor:
            loss: Tensor = 0.0 * model.w.sum()
            return loss

    for strategy in (Sandblaster(), ConjugateGradient()):
        ran = led(strategy, Flat(), model=MODEL)
        assert (len(ran.iterated), ran.end) == (1, "the gradient norm is at most 1e-05")


# ---- what the screen says ----


def test_the_screen_tells_iteration_loss_gradient_step_evaluations_work_items_and_copies() -> None:
    ran = led(Sandblaster(iterations=2, n_push=1), Logistic())
    so_far = RunSoFar()
    for event in ran.iterated:
        so_far.absorb(event)
    now = ran.iterated[-1]

    assert event_text.iteration(so_far) == (
        f"iteration 2  loss {short(now.loss)}  |gradient| {short(now.gradient_norm)}  step {short(now.step)}"
    )
    assert f"{now.evaluations} evaluations, {15 * now.evaluations} work items" in event_text.evaluations(so_far)
    assert so_far.loss == now.loss
    assert event_text.lasting_lines(now, so_far) == ["done at iteration 2: 2 iterations are done"]
