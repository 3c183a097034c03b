"""A seeded simulation in stages is the same every time: the placement does not depend on measured times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rainband
from rainband.model_parallel.graph.split_loss import cut_task, measure_samples
from rainband.strategies.pipedream import Pipedream
from rainband.strategies.single import Single
from rainband.strategy import Strategy
from tests.stage_tasks import Shaped


@pytest.mark.parametrize("strategy", [Pipedream(lr=0.1), Single(lr=0.1)])
def test_a_simulated_run_in_stages_measures_nothing(
    strategy: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden() -> float:
        raise AssertionError("measured")

    monkeypatch.setattr("rainband.model_parallel.placement.measure.time.perf_counter", forbidden)
    hashes = set()
    for _ in range(2):
        result = rainband.fit(Shaped("chain"), strategy, 2, 0, stages=2, runtime="sim", seed=3, runs=tmp_path)
        hashes.add(json.loads((result.directory / "simulation.json").read_bytes())["trace_hash"])
    assert len(hashes) == 1


def test_counted_times_are_those_of_the_multiplications() -> None:
    """Four samples through a layer of 8 by 8: 256 multiplications, and twice that backward, at 10 billion a second."""
    task = Shaped("chain")
    cut, _, _ = cut_task(task, task.model(), data := task.data(), 4)  # type: ignore[arg-type]
    first, second = (measure_samples(task, cut, data, 4, threads=None) for _ in range(2))  # type: ignore[arg-type]
    assert first == second and first.counted
    times = {unit.name: (unit.forward_s, unit.backward_s) for unit in first.units if unit.parameter_bytes}
    assert times["_0"] == (256 / 1e10, 512 / 1e10)
    assert all(unit.seconds == 0 for unit in first.units if not unit.parameter_bytes)
