"""Gossip and elastic averaging: mixing matrices, the laws of the papers, and what failures change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import rainband
from rainband.collectives.graphs import NAMES, is_connected, mixing_matrix
from rainband.plugins import load_strategy
from rainband.strategies.averaging.averaging import Averaging
from rainband.strategies.averaging.elastic import Elastic
from rainband.strategies.neighbors.gossip import Gossip
from rainband.strategy import LOCAL_STEPS, Cluster, Requirements, Strategy, Worker
from rainband.tasks.quadratic import Quadratic
from tests.test_local_steps import FAULTS, TASK, OneHot, fitted, weights

# ---- graphs ----


def check_mixing(matrix: Sequence[Sequence[float]]) -> None:
    """Check that a matrix is symmetric and non-negative, with rows that sum to 1."""
    values = np.array(matrix)
    assert np.allclose(values.sum(axis=1), 1.0, rtol=0, atol=1e-9)
    assert (values >= 0).all() and np.allclose(values, values.T, rtol=0, atol=1e-9)


@pytest.mark.parametrize("graph", NAMES)
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17])
def test_every_mixing_matrix_keeps_the_mean_and_connects_all(graph: str, number: int) -> None:
    matrix = mixing_matrix(graph, number)
    check_mixing(matrix)
    assert is_connected(matrix)


@pytest.mark.parametrize("number", [2, 3, 4, 5, 8, 16])
def test_the_second_eigenvalue_of_a_ring_is_that_of_the_formula(number: int) -> None:
    values = np.linalg.eigvalsh(np.array(mixing_matrix("ring", number)))
    assert sorted(values)[-2] == pytest.approx(1 / 3 + 2 / 3 * math.cos(2 * math.pi / number))


def test_neighbors_of_each_graph() -> None:
    def neighbors(graph: str, number: int) -> list[int]:
        return [j for j, weight in enumerate(mixing_matrix(graph, number)[0]) if weight and j]

    assert neighbors("ring", 8) == [1, 7]
    assert neighbors("torus", 12) == [1, 3, 4, 8]  # 3 rows of 4
    assert neighbors("exponential", 16) == [1, 2, 4, 8, 12, 14, 15]
    assert neighbors("complete", 4) == [1, 2, 3]


def test_a_graph_from_a_file_has_the_weights_of_metropolis_and_hastings(tmp_path: Path) -> None:
    (tmp_path / "star.txt").write_text("# a star\n0 1\n0 2\n0 3\n")
    matrix = mixing_matrix(str(tmp_path / "star.txt"), 4)
    check_mixing(matrix)
    assert matrix[0] == pytest.approx((1 / 4, 1 / 4, 1 / 4, 1 / 4)) and matrix[1] == pytest.approx((1 / 4, 3 / 4, 0, 0))
    without_last = mixing_matrix(str(tmp_path / "star.txt"), 3)
    check_mixing(without_last)
    assert without_last[2] == pytest.approx((1 / 3, 0, 2 / 3))


def test_parts_without_a_link_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text("0 1\n2 3\n")
    assert not is_connected(mixing_matrix(str(tmp_path / "two.txt"), 4))
    (text,) = Gossip(graph=str(tmp_path / "two.txt")).advice(Cluster(4))
    assert "is not connected with 4 workers" in text


@pytest.mark.parametrize(
    "text, told",
    [
        ("0 1 2", "line 1: '0 1 2' must be two different ranks"),
        ("3 3", "must be two different ranks"),
        ("#", "has no edges"),
    ],
)
def test_a_wrong_file_is_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text(text)
    with pytest.raises(ValueError, match=told):
        Gossip(graph=str(tmp_path / "graph.txt"))


def test_a_graph_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"graph=rnig: it must be ring, torus, exponential, complete, or a file"):
        load_strategy("gossip", {"graph": "rnig"})


# ---- gossip ----


@pytest.mark.parametrize("graph", NAMES)
def test_the_mean_of_the_models_moves_by_the_mean_step(graph: str, tmp_path: Path) -> None:
    """With a linear loss, each batch moves its own number by 1 on one of 4 workers: the mean model by 1/4."""
    result = fitted(OneHot(24), Gossip(graph=graph, lr=1.0), tmp_path)
    torch.testing.assert_close(weights(result), torch.full((24,), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("graph", NAMES)
def test_the_mean_moves_by_minus_lr_times_the_mean_gradient(graph: str, tmp_path: Path) -> None:
    """On a quadratic with equal curvatures the mean gradient is that at the mean: the result is sync's."""
    task = Quadratic(dimension=4, samples=64, batch_size=4, epochs=2, condition=1.0)
    gossip = weights(fitted(task, Gossip(graph=graph, lr=0.2), tmp_path))
    together = weights(fitted(task, Averaging(period=1, lr=0.2), tmp_path))
    torch.testing.assert_close(gossip, together, rtol=0.0, atol=1e-5)


class Apart(Strategy):
    """Mixes models that begin apart, without gradients, and notes their distance from the mean."""

    distances: ClassVar[dict[int, float]] = {}
    starts: ClassVar[list[float]] = []
    graph: ClassVar[str] = "ring"

    @property
    def requires(self) -> Requirements:
        return LOCAL_STEPS

    async def run(self, worker: Worker) -> None:
        models, optimizer = worker.models, worker.optimizer(Gossip(lr=0.0).spec(), Gossip().schedule())
        begun, number = False, 0
        while await models.begin():
            if not begun:
                own = worker.params.copy()
                own.tensors[0].fill_(self.starts[worker.rank])
                worker.params.replace(own)
                begun = True
            for batch in models.batches(1):
                optimizer.step(await worker.gradient(batch))
            own = worker.params.copy()
            mean = await models.mean(own, equally=True)
            self.distances[number] = self.distances.get(number, 0.0) + (own - mean).square()
            number += 1
            worker.params.replace(await models.mix(lambda i, n: mixing_matrix(self.graph, n)[i]))


@pytest.mark.parametrize("number", [4, 5, 8])
def test_without_gradients_disagreement_shrinks_by_the_second_eigenvalue(number: int, tmp_path: Path) -> None:
    """Reached in the slowest mode, a wave around the ring; other starts shrink at least as fast."""
    second = 1 / 3 + 2 / 3 * math.cos(2 * math.pi / number)
    for starts, exactly in (
        ([math.cos(2 * math.pi * i / number) for i in range(number)], True),
        (range(number), False),
    ):
        Apart.distances, Apart.starts = {}, list(map(float, starts))
        fitted(OneHot(number * 6), Apart(), tmp_path, number)
        ratios = [math.sqrt(Apart.distances[i + 1] / Apart.distances[i]) for i in range(5)]
        assert all(ratio <= second + 1e-4 for ratio in ratios)
        assert not exactly or ratios == pytest.approx([second] * 5, abs=1e-4)


def test_averaging_gradients_with_neighbors_does_not_lead_to_agreement(tmp_path: Path) -> None:
    """Models that begin apart stay apart if gradients are mixed: where the loss is linear, by exactly as much."""

    class OfGradients(Apart):
        async def run(self, worker: Worker) -> None:
            models, optimizer = worker.models, worker.optimizer(Gossip(lr=1.0).spec(), Gossip().schedule())
            begun = False
            while await models.begin():
                if not begun:
                    own = worker.params.copy()
                    own.tensors[0].fill_(self.starts[worker.rank])
                    worker.params.replace(own)
                    begun = True
                own = worker.params.copy()
                for batch in models.batches(1):
                    optimizer.step(await worker.gradient(batch))
                step = worker.params.copy() - own
                mean = await models.mean(own, equally=True)
                self.distances[len(self.distances)] = (own - mean).square()
                worker.params.replace(step)
                mixed = await models.mix(lambda i, n: mixing_matrix("complete", n)[i])
                worker.params.replace(own + mixed)

    Apart.starts, OfGradients.distances = [0.0, 1.0, 2.0, 3.0], {}
    fitted(OneHot(24), OfGradients(), tmp_path)
    distances = list(OfGradients.distances.values())
    assert sorted(distances[-4:]) == pytest.approx(sorted(distances[:4])) and sum(distances[:4]) > 1


def test_bytes_per_worker_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    sent = []
    for number in (3, 4, 8):
        history = fitted(OneHot(8), Gossip(lr=0.1), tmp_path, number).history
        rounds = math.ceil(8 / number)
        last_means = 1
        sent.append({n - last_means * 32 for n in history[-1].sent_bytes.values()} | {rounds})
        assert {(n - last_means * 32) / rounds for n in history[-1].sent_bytes.values()} == {2 * 32}


@pytest.mark.parametrize("faults", list(FAULTS)[:7])
@pytest.mark.parametrize("graph", ["ring", "torus"])
def test_a_lost_neighbor_changes_no_sum(graph: str, faults: str, tmp_path: Path) -> None:
    """A round is finished with the neighbors that are left, and its lost batch is repeated: the sum stays near."""
    result = fitted(OneHot(64), Gossip(graph=graph, lr=1.0), tmp_path, faults=faults)
    accounting = result.accounting
    assert (accounting.applied, accounting.lost, accounting.applied_twice) == (64, 0, 0)
    assert (weights(result) > 0).all() and weights(result).max() < 1.0


@pytest.mark.processes
def test_processes_gossip_like_simulated_workers(tmp_path: Path) -> None:
    virtual = weights(fitted(TASK, Gossip(lr=0.1, momentum=0.9), tmp_path, 3))
    real = rainband.fit(TASK, Gossip(lr=0.1, momentum=0.9), workers=3, runs=tmp_path)
    torch.testing.assert_close(weights(real), virtual, rtol=0.0, atol=1e-6)
    assert real.accounting.applied == 48


# ---- elastic ----

FLAT = Quadratic(dimension=4, samples=64, batch_size=4, epochs=3, noise=0.0, condition=8.0)  # 48 equal batches


def elastic_center(workers: int, period: int, beta: float, rounds: int, lr: float) -> Tensor:
    """Return the center, if all workers make the same steps at the same time."""
    optimum, shrink = FLAT.optimum().double(), 1 - lr * FLAT._curvature.double()
    x = center = torch.zeros(4, dtype=torch.float64)
    for _ in range(rounds):
        x = optimum + shrink**period * (x - optimum)
        x, center = x - beta / workers * (x - center), center + beta * (x - center)
    return center


def test_synchronous_elastic_averaging_follows_its_equations(tmp_path: Path) -> None:
    found = weights(fitted(FLAT, Elastic(period=3, lr=0.3, moving_rate=0.8, synchronous=True), tmp_path))
    torch.testing.assert_close(found, elastic_center(4, 3, 0.8, 4, 0.3), rtol=0.0, atol=1e-5)


def test_one_worker_and_a_center_follow_the_equations(tmp_path: Path) -> None:
    found = weights(fitted(FLAT, Elastic(period=4, lr=0.3, moving_rate=0.5), tmp_path, 1, servers=2))
    torch.testing.assert_close(found, elastic_center(1, 4, 0.5, 12, 0.3), rtol=0.0, atol=1e-5)


def test_momentum_is_nesterovs() -> None:
    assert Elastic(momentum=0.99).local_spec().settings["nesterov"] is True
    assert "nesterov" not in Elastic().local_spec().settings


@pytest.mark.parametrize("faults", list(FAULTS)[:7])
@pytest.mark.parametrize("synchronous", [False, True])
def test_elastic_goes_on_without_a_lost_worker(synchronous: bool, faults: str, tmp_path: Path) -> None:
    result = fitted(TASK, Elastic(period=2, lr=0.1, synchronous=synchronous), tmp_path, faults=faults)
    accounting = result.accounting
    assert (accounting.applied, accounting.lost, accounting.applied_twice) == (48, 0, 0)
    assert weights(result).isfinite().all()


def test_each_batch_reaches_the_center_once(tmp_path: Path) -> None:
    """With one exchange per worker, each batch moves the center by alpha."""
    result = fitted(OneHot(24), Elastic(period=6, lr=1.0, moving_rate=1.0, synchronous=True), tmp_path)
    torch.testing.assert_close(weights(result), torch.full((24,), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("given", [{"period": 65}, {"moving_rate": 0.0}, {"moving_rate": 1.5}])
def test_wrong_settings_of_elastic_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="choose"):
        load_strategy("elastic", given)


@pytest.mark.processes
def test_processes_follow_the_equations_of_one_worker(tmp_path: Path) -> None:
    real = rainband.fit(FLAT, Elastic(period=4, lr=0.3, moving_rate=0.5), workers=1, servers=1, runs=tmp_path)
    torch.testing.assert_close(weights(real), elastic_center(1, 4, 0.5, 12, 0.3), rtol=0.0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:graph=.* is not connected")
def test_at_the_end_the_disagreement_is_the_distance_from_the_mean_of_all(tmp_path: Path) -> None:
    """Two pairs, with a step of 1 of another number on each of four workers: pairs mix, and stay apart."""
    (tmp_path / "pairs.txt").write_text("0 1\n2 3\n")
    last = fitted(OneHot(4), Gossip(lr=1.0, graph=str(tmp_path / "pairs.txt")), tmp_path, 4).history[-1]
    assert last.disagreement == pytest.approx(math.sqrt(3 / 4), rel=1e-5)


def test_one_worker_sends_nothing(tmp_path: Path) -> None:
    last = fitted(OneHot(8), Gossip(lr=0.1), tmp_path, 1).history[-1]
    assert not any(last.sent_bytes.values())


def test_a_graph_that_is_not_connected_or_names_other_workers_is_advised_against(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text("0 1\n1 2\n2 3\n3 0\n")
    assert Gossip(graph=str(path)).advice(Cluster(4)) == []
    (line,) = Gossip(graph=str(path)).advice(Cluster(3))
    assert line == f"graph={path} has edges of worker 3, which are left out: use --workers 4."
