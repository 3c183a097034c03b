"""Workers of a task that share each batch: the updates of one process, whatever happens to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rainband
from rainband.strategies.single import Single
from rainband.strategies.sync import Sync
from rainband.tasks.quadratic import Quadratic

MOMENTUM = {"momentum": 0.9, "lr_schedule": "cosine", "lr": 0.05}
TASK = Quadratic(dimension=9, samples=103, batch_size=16, epochs=2)  # the last batch of an epoch has 7 samples


def parameters(result: rainband.FitResult) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in result.module.parameters()])


# ---- in processes ----


@pytest.mark.parametrize("workers", [1, 3])
def test_processes_that_share_each_batch_make_the_updates_of_one(workers: int, tmp_path: Path) -> None:
    alone = rainband.fit(TASK, Single(**MOMENTUM), runs=tmp_path)  # type: ignore[arg-type]
    shared = rainband.fit(TASK, Sync(**MOMENTUM), workers=workers, runs=tmp_path)  # type: ignore[arg-type]
    if workers == 1:
        assert torch.equal(parameters(shared), parameters(alone))
    torch.testing.assert_close(parameters(shared), parameters(alone), rtol=0.0, atol=1e-6)
    assert (shared.accounting.applied, shared.accounting.batches) == (14, 14)
    assert shared.history[-1].samples == 206
