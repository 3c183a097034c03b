"""Sandblaster on replicas of two stages, as processes: it reaches the loss of whole models."""

from __future__ import annotations

from pathlib import Path

import pytest

from rainband.runtimes.config import RunConfig
from tests.processes import Order, RunLauncher
from tests.stage_tasks import Shaped, planned


@pytest.mark.processes
def test_sandblaster_in_stages(launcher: RunLauncher, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    config = RunConfig(
        task="tests.stage_tasks:Shaped",
        task_settings={"name": "chain", "samples": 48},
        strategy="sandblaster",
        num_workers=4,
        num_servers=2,
        transport="shm",
        failure_timeout_s=5.0,
        directory=str(directory),
        stage_plan=planned(Shaped("chain", samples=48), 2),
    )
    with launcher._launched(Order(str(tmp_path / "launcher"), config), directory, None) as run:
        result = run.result()
    assert result.outcome == "finished", result.reason
    assert result.metrics["loss"] == pytest.approx(6.7777e-07, rel=1e-4)
