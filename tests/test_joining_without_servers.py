"""Strategies without servers, each by its name: workers that are lost, return, and join a running run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rainband
from rainband.plugins import load_strategy, strategy_names
from rainband.tasks.quadratic import Quadratic

TASK = Quadratic(dimension=5, samples=192, batch_size=4, epochs=2)  # 96 batches
SYNCHRONOUS = {"elastic": {"synchronous": True}}
FAULTS = {
    "lost": "0.03 kill worker 1",
    "returns": "0.02 kill worker 1\n0.05 start worker 1",
    "joins": "0.02 start worker 3",
    "all but one": "0.02 kill worker 0\n0.04 kill worker 2",
}


def names() -> list[str]:
    """Return the strategies whose workers exchange gradients or models with each other."""
    found = []
    for name in strategy_names():
        requires = load_strategy(name, SYNCHRONOUS.get(name, {})).requires
        if requires.in_rounds or requires.in_pairs:
            found.append(name)
    return found


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("name", names())
def test_workers_may_be_lost_return_and_join(name: str, what: str, tmp_path: Path) -> None:
    if (name, what) == ("async_gossip", "joins"):
        pytest.skip("the memory of its models is as large as the run begins")
    (tmp_path / "faults.txt").write_text(FAULTS[what])
    strategy = load_strategy(name, {**SYNCHRONOUS.get(name, {}), "lr": 0.02})
    result = rainband.fit(
        TASK, strategy, 3, runtime="sim", runs=tmp_path, faults=tmp_path / "faults.txt", failure_timeout_s=0.3
    )
    accounting = result.accounting
    assert (accounting.applied, accounting.lost, accounting.applied_twice) == (96, 0, 0)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in result.module.parameters())


def test_the_list_has_them_all() -> None:
    assert {"sync", "all_reduce", "averaging", "one_shot", "block_momentum", "adaptive_period", "diloco"} <= set(
        names()
    )
    assert {"elastic", "gossip", "async_gossip"} <= set(names())
