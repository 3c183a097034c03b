"""One process without servers: plain PyTorch, with the accounting of every other strategy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rainband.protocol.optimizer_spec import element_wise
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation import run as sim
from rainband.tasks.linear import Linear


class OneBad(Linear):
    """The loss of the batch with the first sample is not a number."""

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        bad = bool((batch[0] == self._x[0]).all(dim=-1).any())
        return super().loss(model, batch) * (math.nan if bad else 1.0)


def test_single_skips_a_batch_whose_gradient_is_not_finite_and_counts_it(tmp_path: Path) -> None:
    config = RunConfig(
        task="tests.test_strategy_single:OneBad",
        strategy="single",
        strategy_settings={"lr": 0.25},
        num_workers=1,
        num_servers=0,
        epochs=2,
        directory=str(tmp_path),
        runtime="sim",
    )
    result = sim.run(config, lambda event: None)
    assert (result.outcome, result.accounting["skipped"]) == ("finished", {"not finite": 2})
    assert result.accounting["applied"] == result.accounting["batches"] - 2
    saved = load_file(tmp_path / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in saved.values())


def test_a_weight_decay_of_0_is_0_and_not_the_optimizers_own() -> None:
    assert element_wise("adamw", 0.1).settings == {"lr": 0.1, "weight_decay": 0.0}
    assert element_wise("mylab:Mine", 0.1).settings == {"lr": 0.1}  # nobody knows what it takes


def test_what_an_optimizer_does_not_take_is_refused_with_what_it_takes() -> None:
    with pytest.raises(ValueError, match="momentum=0.9: adagrad has no momentum, it takes lr and weight_decay"):
        element_wise("adagrad", 0.1, momentum=0.9)


def test_a_script_can_ask_for_its_rank_whatever_was_imported() -> None:
    import rainband.runtimes.processes.server_process  # all that a run imports

    assert (rainband.rank(), rainband.num_workers()) == (0, 1)
