"""The strategy all_reduce: the updates of sync by each algorithm, and the prices of their tables in a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rainband
from rainband.collectives.algorithm import algorithm_names, load_algorithm
from rainband.collectives.cost import LinkCosts, predict_s
from rainband.plugins import load_strategy
from rainband.protocol import events
from rainband.rounds.average import Contribution, average
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation import run as sim
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, ComputeModel
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.strategies.all_reduce import AllReduce
from rainband.strategies.sync import Sync
from rainband.tasks.quadratic import Quadratic
from rainband.transports.collectives.average import GroupAverage
from rainband.transports.collectives.memory import GroupMemory
from rainband.transports.collectives.shared import SharedGroup
from tests.test_shared_batches import Dying, parameters

SETTINGS: dict[str, Any] = {"momentum": 0.9, "lr": 0.02}
TASK = Quadratic(dimension=9, samples=103, batch_size=16, epochs=2)


def timed(algorithm: str, folder: Path, workers: int, num_bytes: int = 4_000_000) -> float:
    """Return the virtual seconds of one exchange: the difference between runs of 20 and 10 batches."""
    long, short = (seconds_of(algorithm, folder, workers, num_bytes, steps) for steps in (20, 10))
    return (long - short) / 10 - 1 / workers


def seconds_of(algorithm: str, folder: Path, workers: int, num_bytes: int, steps: int) -> float:
    (directory := folder / f"{algorithm}-{num_bytes}-{steps}").mkdir()
    config = RunConfig(
        task="quadratic",
        task_settings={"dimension": num_bytes // 4},
        strategy="all_reduce",
        strategy_settings={"algorithm": algorithm},
        num_workers=workers,
        num_servers=0,
        runtime="sim",
        directory=str(directory),
        sim=SimSettings(time_only=True, steps=steps),
    )
    compute = ComputeModel(kind="constant", step_s=1.0)
    network = NetworkModel(latency_s=0.01, bytes_per_s=1e8)
    return sim.run(config, lambda event: None, model=ClusterModel(network, compute)).seconds


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_a_simulated_exchange_costs_what_the_table_does(algorithm: str, tmp_path: Path) -> None:
    expected = predict_s(load_algorithm(algorithm).table(8), 4_000_000, LinkCosts(0.01, 1e-8, 0.0, 8))
    assert timed(algorithm, tmp_path, 8) == pytest.approx(expected, rel=1e-3)


def test_the_best_algorithm_is_chosen_in_a_simulation(tmp_path: Path) -> None:
    for num_bytes in (4_000, 40_000_000):
        by_name = {}
        for name in ("recursive_doubling", "direct", "ring", "auto"):
            by_name[name] = timed(name, tmp_path, 8, num_bytes)
        assert by_name["auto"] <= min(by_name.values()) * 1.001
        assert by_name["ring"] > by_name["auto"] * (1.5 if num_bytes == 4_000 else 1.0)


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_simulated_updates_are_those_of_sync(algorithm: str, tmp_path: Path) -> None:
    given = {"workers": 3, "runtime": "sim", "runs": tmp_path}
    ours = rainband.fit(TASK, AllReduce(algorithm=algorithm, **SETTINGS), **given)
    torch.testing.assert_close(parameters(ours), parameters(rainband.fit(TASK, Sync(**SETTINGS), **given)))


def test_an_algorithm_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no all-reduce algorithm named 'rnig' \(did you mean ring\?\)"):
        load_strategy("all_reduce", {"algorithm": "rnig"})


def averages(num_ranks: int, given: list[list[Contribution]], outs: list[list[Tensor | None]]) -> list[GroupAverage]:
    """Let all ranks average in threads; return their objects."""
    from concurrent.futures import ThreadPoolExecutor

    memory = GroupMemory(num_ranks)
    made = [GroupAverage(SharedGroup(memory.fds, rank, "continue", 5.0), "ring") for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(lambda rank: made[rank](outs[rank], rank, given[rank]), range(num_ranks)))
    for one in made:
        one.group.close()
    memory.close()
    return made


@pytest.mark.parametrize("lacks_one", [False, True])
def test_a_group_gives_the_mean_of_a_round(lacks_one: bool) -> None:
    """Whole numbers: the same bits. With a missing rank, all fall back to reading the tensors of the others."""
    tensors = [[torch.full((5,), float(rank)), torch.arange(4.0) * rank] for rank in range(3)]
    weights = [1.0, 2.0, 1.0]
    ranks = [0, 2] if lacks_one else [0, 1, 2]
    contributions = [Contribution(rank, weights[rank], 0b11, [t.clone() for t in tensors[rank]]) for rank in ranks]
    expected: list[Tensor | None] = [t.clone() for t in tensors[0]]
    average(expected, 0, contributions)
    outs: list[list[Tensor | None]] = [[t.clone() for t in tensors[rank]] for rank in range(3)]
    if lacks_one:
        memory = GroupMemory(3)
        made = [GroupAverage(SharedGroup(memory.fds, 0, "continue", 5.0), "ring")]
        assert made[0](outs[0], 0, contributions) == 2.0
        memory.close()
    else:
        made = averages(3, [contributions] * 3, outs)
    assert [one.is_broken for one in made] == [lacks_one] * len(made)
    assert [one.calls for one in made] == [int(not lacks_one)] * len(made)
    for out in outs[: len(made)]:
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True) if a is not None and b is not None)


@pytest.mark.processes
@pytest.mark.parametrize("algorithm", ["auto", "double_tree"])
def test_processes_make_the_updates_of_sync(algorithm: str, tmp_path: Path) -> None:
    ours = rainband.fit(TASK, AllReduce(algorithm=algorithm, **SETTINGS), workers=3, runs=tmp_path)
    virtual = rainband.fit(TASK, Sync(**SETTINGS), workers=3, runs=tmp_path, runtime="sim")
    torch.testing.assert_close(parameters(ours), parameters(virtual), rtol=0.0, atol=1e-6)


@pytest.mark.processes
def test_a_killed_process_changes_no_update(tmp_path: Path) -> None:
    lost: list[events.Lost] = []
    ours = rainband.fit(
        Dying(dimension=9, samples=103, batch_size=16, epochs=2),
        AllReduce(algorithm="ring", **SETTINGS),
        workers=3,
        runs=tmp_path,
        on_event=lambda event: lost.append(event) if isinstance(event, events.Lost) else None,
    )
    virtual = rainband.fit(TASK, Sync(**SETTINGS), workers=3, runs=tmp_path, runtime="sim")
    assert [event.node for event in lost] == ["worker 1"]
    torch.testing.assert_close(parameters(ours), parameters(virtual), rtol=0.0, atol=1e-6)
