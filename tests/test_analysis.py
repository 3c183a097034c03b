"""Work and depth, greedy schedules, costs of updates, predicted steps, and the recommendation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from rainband.analysis.count import GradientWork, TensorOp, count_gradient
from rainband.analysis.greedy import bounds, greedy_time
from rainband.analysis.measure import GradientTimes, MeasuredTask
from rainband.analysis.predict import CANDIDATES, AnalyzedCluster, Kind, StepPrediction, predict_steps
from rainband.analysis.recommend import recommend
from rainband.analysis.work import each, products, softmax, summed, together
from rainband.cli.main import build_app
from rainband.collectives.algorithm import algorithm_names, load_algorithm
from rainband.collectives.cost import LinkCosts, predict_s
from rainband.collectives.table import MoveTable
from rainband.collectives.updates import (
    LogP,
    bound_s,
    broadcast_s,
    logp_of,
    lower_bound_s,
    server_tree,
    star,
    update_costs,
)
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.runtimes.simulation.rounds import exchange_s
from rainband.tasks.linear import Linear
from rainband.tasks.load import load_task

NONE = ClusterModel()


# ---- work and depth ----


def test_the_levels_of_a_sum_are_a_tree() -> None:
    assert summed(8, 1) == (4, 2, 1)
    assert summed(5, 1) == (2, 1, 1)
    assert summed(6, 2) == (2, 2)  # two groups of three
    assert summed(4, 4) == summed(0, 1) == ()


@given(st.integers(1, 3000), st.integers(1, 60))
def test_a_sum_needs_an_addition_less_than_it_has_values(number: int, results: int) -> None:
    results = min(number, results)
    levels = summed(number, results)
    assert sum(levels) == number - results
    assert len(levels) == (-(-number // results) - 1).bit_length()


def test_a_matrix_product_has_its_known_work_and_depth() -> None:
    assert products(2 * 3 * 4, 6) == (24, 12, 6)  # 2 x 4 by 4 x 3: W = 2 * 24 - 6, D = 1 + log2 4
    assert softmax(8, 2) == (4, 2, 8, 8, 4, 2, 8)
    assert together([(4, 2, 1), each(5)]) == (9, 2, 1)


class Two(nn.Module):
    """A linear layer of 4 to 3 values, and its squares."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.linear(x).square()
        return answer


class SquareTask(Linear):
    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        total: torch.Tensor = model(batch[0]).sum()
        return total


def counted() -> GradientWork:
    return count_gradient(SquareTask(), Two(), (torch.ones(2, 4),), 2)


def test_the_work_of_a_small_model_is_counted_by_layer() -> None:
    """Forward: 24 products and 18 additions, 6 of a bias. Backward of the weights: 24 and 12; of the bias: 3."""
    work = counted()
    (layer,) = [one for one in work.layers if one.name == "linear"]
    assert layer.work == 24 + 18 + 6 + 24 + 12 + 3
    assert layer.depth == (1 + 2 + 1) + (1 + 1)  # the tree of four, the bias; the tree of two
    assert (layer.parameters, layer.what) == (15, "Linear")
    assert work.work == sum(one.work for one in work.layers)
    assert layer.depth < work.depth < sum(one.depth for one in work.layers) + 1


def test_activations_are_what_the_backward_pass_needs() -> None:
    """The answer of the linear layer, 2 x 3 floats, is kept for the square; the batch and the weights do not count."""
    assert counted().activation_bytes == 2 * 3 * 4


def test_counting_leaves_random_numbers_and_gradients_alone() -> None:
    model, before = Two(), torch.get_rng_state()
    count_gradient(SquareTask(), model, (torch.ones(2, 4),), 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- greedy schedules ----


def test_a_schedule_by_hand() -> None:
    """Two operations of 3 scalar operations each, and one of 1 that needs both."""
    operations = [TensorOp("", (3,)), TensorOp("", (3,)), TensorOp("", (1,), (0, 1))]
    assert [greedy_time(operations, p) for p in (1, 2, 3, 4, 6)] == [7, 4, 3, 3, 2]
    assert bounds(7, 2, 2) == (3.5, 5.5)


def test_operations_without_work_pass_on_what_they_wait_for() -> None:
    operations = [TensorOp("", (2,)), TensorOp("", (), (0,)), TensorOp("", (1,), (1,))]
    assert greedy_time(operations, 4) == 2
    assert greedy_time([], 4) == 0


@st.composite
def graphs(draw: st.DrawFn) -> list[TensorOp]:
    operations: list[TensorOp] = []
    for number in range(draw(st.integers(1, 12))):
        levels = tuple(draw(st.lists(st.integers(1, 40), max_size=4)))
        needs = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        operations.append(TensorOp("", levels, tuple(needs)))
    return operations


@given(graphs(), st.integers(1, 200))
def test_a_greedy_schedule_obeys_the_bounds(operations: list[TensorOp], processors: int) -> None:
    work = GradientWork(tuple(operations), 1, ())
    low, high = bounds(work.work, work.depth, processors)
    assert low <= greedy_time(operations, processors) <= high
    assert greedy_time(operations, 1) == work.work
    assert greedy_time(operations, max(1, work.work)) == work.depth


def test_the_schedule_of_a_real_model_obeys_the_bounds_for_every_number_of_processors() -> None:
    work = counted()
    for processors in range(1, work.work + 1):
        low, high = bounds(work.work, work.depth, processors)
        assert low <= greedy_time(work.operations, processors) <= high


def test_no_processors_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        bounds(1, 1, 0)


# ---- the cost of an update ----


def played(table: MoveTable, num_workers: int) -> list[list[int]]:
    """Return the parts that each worker has at the end; worker k begins with 10^k, and servers with 0."""
    values = [[10**k if k < num_workers else 0] * table.num_parts for k in range(table.num_ranks)]
    for moves in table.steps():
        before = [list(parts) for parts in values]
        for move in moves:
            for part in range(move.first, move.last):
                own = values[move.target][part] if move.add else 0
                values[move.target][part] = own + before[move.source][part]
    return values[:num_workers]


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("servers", [1, 2, 3, 4, 5, 13])
def test_servers_give_every_worker_the_sum_of_all(workers: int, servers: int) -> None:
    total = sum(10**k for k in range(workers))
    for table in (star(workers, servers), server_tree(workers, servers, 3), server_tree(workers, servers, 2)):
        assert {value for parts in played(table, workers) for value in parts} == {total}


def test_costs_in_messages_and_bytes_are_those_of_the_textbook() -> None:
    rows = {row.name: (row.alphas, row.betas) for row in update_costs(1000, 8, 2, 3, LinkCosts(1e-4, 1e-9, 0.0, 8))}
    assert rows["ring"] == pytest.approx((14, 2 * 7 / 8))
    assert rows["recursive_doubling"] == pytest.approx((3, 3))
    assert rows["star of 2 servers"] == pytest.approx((16, 8))  # each server: 8 messages of N / 2, in each direction
    assert rows["single_master"] == pytest.approx((14, 14))
    assert rows["tree of 4 servers"] == pytest.approx((3 + 3 + 3 + 3, 12))


def test_the_optimal_broadcast_of_logp_is_that_of_its_paper() -> None:
    """Karp et al.: P = 8, L = 6, g = 4, o = 2 take 24."""
    assert broadcast_s(8, LogP(6, 2, 4, 0.0)) == 24
    assert [broadcast_s(p, LogP(1, 0, 1, 0.0)) for p in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


COSTS = st.builds(
    LinkCosts,
    st.floats(0, 1e-2),
    st.floats(1e-12, 1e-6),
    st.one_of(st.just(0.0), st.floats(0, 1e-6)),
    st.integers(1, 64),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 17), st.integers(1, 1 << 27), COSTS)
def test_no_all_reduce_beats_the_lower_bound(ranks: int, num_bytes: int, costs: LinkCosts) -> None:
    limit = lower_bound_s(ranks, num_bytes, logp_of(costs))
    for name in algorithm_names():
        assert predict_s(load_algorithm(name).table(ranks), num_bytes, costs) >= limit * (1 - 1e-9)


@given(st.integers(2, 64), st.integers(1, 1 << 28), st.floats(0, 0.1), st.floats(1e6, 1e11), st.booleans())
def test_no_simulated_exchange_beats_the_lower_bound(
    ranks: int, num_bytes: int, latency_s: float, speed: float, in_memory: bool
) -> None:
    nodes = NodeModel(shared_memory=in_memory, push_bytes_per_s=speed, pull_bytes_per_s=speed)
    model = ClusterModel(NetworkModel(latency_s=latency_s, bytes_per_s=speed), nodes=nodes)
    limit = lower_bound_s(ranks, num_bytes, LogP(0.0 if in_memory else latency_s, 0.0, 0.0, 1 / speed))
    assert exchange_s(model, num_bytes, ranks) >= limit * (1 - 1e-9)


# ---- predicted steps ----

STEP_S = 0.01
SLOW_NETWORK = ClusterModel(NetworkModel(latency_s=1e-3, bytes_per_s=1e8))


def measured(seconds: float = STEP_S, part_s: float | None = None, workers: int = 4) -> MeasuredTask:
    part = GradientTimes(8, (seconds / workers if part_s is None else part_s,))
    model_bytes = 4 * sum(parameter.numel() for parameter in load_task("digits", {}).model().parameters())
    return MeasuredTask(counted(), GradientTimes(32, (seconds,)), part, model_bytes)


def predicted(model: ClusterModel, workers: int = 4, only: Sequence[str] = ()) -> dict[str, StepPrediction]:
    chosen = [one for one in CANDIDATES if not only or one.words in only]
    setting = AnalyzedCluster(workers, 2, model)
    return {one.words: one for one in predict_steps(load_task("digits", {}), measured(), setting, chosen)}


def test_simulated_all_reduces_take_no_less_than_computing_and_the_lower_bound() -> None:
    found = predicted(SLOW_NETWORK, only=("sync", "all_reduce", "sync batch_per_worker=true"))
    limit = bound_s(measured().model_bytes, 4, LinkCosts(1e-3, 1e-8, 0.0, 4))
    assert limit > 1e-3
    assert found["all_reduce"].step_s >= STEP_S / 4 + limit
    assert found["sync"].step_s >= STEP_S / 4 + limit
    assert found["sync batch_per_worker=true"].step_s >= STEP_S + 1e-3


def test_with_a_fast_network_a_step_takes_as_long_as_its_gradient() -> None:
    fast = ClusterModel(
        NetworkModel(latency_s=1e-9, bytes_per_s=1e14), nodes=NodeModel(message_s=0.0, apply_bytes_per_s=1e14)
    )
    found = predicted(fast)
    assert set(found) == {one.words for one in CANDIDATES}
    assert found["single"].step_s == pytest.approx(STEP_S, rel=0.01)
    assert found["all_reduce"].samples_per_s == pytest.approx(4 * 32 / STEP_S, rel=0.03)
    assert found["downpour"].samples_per_s == pytest.approx(4 * 32 / STEP_S, rel=0.05)
    assert found["downpour"].staleness == pytest.approx(3, abs=0.7)


def test_small_parts_that_take_long_are_counted_as_they_were_measured() -> None:
    setting = AnalyzedCluster(4, 2, ClusterModel(NetworkModel(latency_s=0.0, bytes_per_s=1e14)))
    only = [one for one in CANDIDATES if one.words == "all_reduce"]
    slow_parts = measured(part_s=0.008)  # a quarter of the samples takes 0.8 of the time
    (one,) = predict_steps(load_task("digits", {}), slow_parts, setting, only)
    assert one.step_s == pytest.approx(0.008, rel=0.02)


def test_one_worker_is_one_process() -> None:
    assert set(predicted(NONE, workers=1)) == {"single"}


# ---- the recommendation ----


def made(words: str, kind: Kind, rate: float, staleness: float = 0.0, off: float = 0.1) -> StepPrediction:
    return StepPrediction(words, kind, 32 / rate, rate, rate / (1 + off), rate * (1 + off), staleness, 0.5)


SINGLE = replace(made("single", "exact", 1000), one_process=True)
CASES = {
    "no other is clearly faster": ([SINGLE, made("sync", "exact", 900), made("downpour", "stale", 1400, 3)], "single"),
    "the same updates, faster": ([SINGLE, made("sync", "exact", 2000), made("downpour", "stale", 2500, 3)], "sync"),
    "stale, but clearly faster": ([SINGLE, made("sync", "exact", 900), made("downpour", "stale", 3000, 3)], "downpour"),
    "of equals the least stale": (
        [SINGLE, made("soft_sync", "stale", 2950, 0.8), made("downpour", "stale", 3000, 6.8)],
        "soft_sync",
    ),
    "a larger batch before stale gradients": (
        [SINGLE, made("sync batch_per_worker=true", "larger batch", 2800), made("downpour", "stale", 3000, 3)],
        "sync batch_per_worker=true",
    ),
    "ranges overlap": ([SINGLE, made("downpour", "stale", 1600, 3, off=0.5)], "single"),
    "models of their own are not recommended": ([SINGLE, made("averaging", "own models", 9000)], "single"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_recommendation(case: str) -> None:
    predictions, expected = CASES[case]
    found = recommend(predictions, "digits", 4)
    assert found.chosen.words == expected
    assert found.reasons[0].startswith(f"Use {expected}: ")


def test_the_recommendation_says_what_it_costs() -> None:
    predictions, _ = CASES["stale, but clearly faster"]
    text = " ".join(recommend(predictions, "digits", 4).reasons)
    assert "3 times one process" in text and "gradients that miss 3.0 updates" in text
    assert "rainband compare digits single downpour --workers 4" in text
    assert "Each of the 4 workers adds 75 % of the rate of one process" in text


def reasons_of(*predictions: StepPrediction) -> str:
    return " ".join(recommend(predictions, "digits", 4).reasons)


def test_a_faster_strategy_that_is_not_recommended_is_explained() -> None:
    text = reasons_of(SINGLE, made("elastic", "own models", 4400))
    assert "no strategy whose workers train one model together is clearly faster" in text
    assert (
        "elastic would train on 4.4 times as many samples per second, but its workers train models of their own" in text
    )
    assert "own models" not in reasons_of(SINGLE, made("elastic", "own models", 1100))


def test_overlapping_ranges_are_not_called_as_fast() -> None:
    text = reasons_of(made("single", "exact", 3000, off=1.0), made("all_reduce", "exact", 1000, off=1.0))
    assert "all_reduce (1,000 samples/s) cannot be told apart from it by this prediction" in text


def test_a_default_that_is_slower_than_one_process_is_named() -> None:
    assert "sync, the default, would be 40 times slower than one process here." in reasons_of(
        SINGLE, made("sync", "exact", 25)
    )
    assert "the default" not in reasons_of(SINGLE, made("sync", "exact", 900))


# ---- the commands ----


def test_analyze_prints_tables_and_a_recommendation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["analyze", "linear", "--workers", "2", "--network", "1gbit"]
    shown = CliRunner().invoke(build_app(), command)
    assert shown.exit_code == 0, shown.output
    for word in (
        "work W",
        "max(W/p, D)",
        "LogP lower bound",
        "star of 2 servers",
        "each on a machine of its own, 1gbit",
        "recursive_doubling",
        "- Use ",
    ):
        assert word in shown.output
    found = json.loads(CliRunner().invoke(build_app(), [*command, "--json"]).stdout)
    assert found["recommended"] in {one["words"] for one in found["predictions"]}
    assert all(row["lower"] <= row["greedy"] <= row["upper"] for row in found["times"])
    assert all(one["slowest"] <= one["samples_per_s"] <= one["fastest"] for one in found["predictions"])


def test_auto_trains_with_what_is_recommended_and_shows_both_rates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", "linear", "auto", "--workers", "2", "--runtime", "sim", "--epochs", "2"]
    shown = CliRunner().invoke(build_app(), command)
    assert shown.exit_code == 0, shown.output
    assert "auto: Use " in shown.output and "samples/s are predicted" in shown.output
    assert "the prediction was off by" in shown.output
    again = CliRunner().invoke(build_app(), ["runs", "show", "last"])
    assert "the prediction was off by" in again.output


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["lr=0.1"], "auto has no settings"),
        (["--stages", "2"], "--stages 2: auto cannot predict such runs"),
        (["--codec", "sign"], "--codec sign: auto cannot predict"),
    ],
)
def test_auto_refuses_what_it_cannot_predict(words: list[str], part: str) -> None:
    shown = CliRunner().invoke(build_app(), ["train", "linear", "auto", *words])
    assert shown.exit_code == 2
    assert part in shown.output
