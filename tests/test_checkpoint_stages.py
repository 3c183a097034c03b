"""Models in stages continue from a checkpoint, in simulations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rainband.protocol import events
from rainband.runtimes.checkpoints.place import opened
from rainband.runtimes.checkpoints.restore import model_of
from rainband.tasks.task import TensorData
from tests.checkpoint_runs import CheckpointRun, train
from tests.stage_tasks import planned


class Normed:
    """A model with statistics in both of its stages."""

    name = "normed"
    batch_size = 4
    epochs = 3

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        parts = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)]
        return nn.Sequential(*parts)

    def data(self) -> TensorData:
        return TensorData(torch.randn(48, 6, generator=torch.Generator().manual_seed(1)))

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        return (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


def run(directory: Path, strategy: str, workers: int, servers: int = 2, **more: Any) -> CheckpointRun:
    settings = {"optimizer": "adam", "lr": 0.01, **({"batch_per_worker": True} if strategy == "sync" else {})}
    plan = planned(Normed(), 2)  # type: ignore[arg-type]
    return train(directory, strategy, settings, Normed(), workers, servers, stage_plan=plan, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["sync", "downpour"])
@pytest.mark.parametrize(("workers", "servers"), [(4, 2), (2, 1), (6, 3)])
def test_stages_continue_with_other_numbers_of_replicas_and_servers(
    tmp_path: Path, strategy: str, workers: int, servers: int
) -> None:
    before = run(tmp_path / "a", strategy, 4, checkpoint_every_s=3.0, keep=99)
    assert before.result.outcome == "finished", before.result.reason
    assert before.checkpoints and not before.events(events.Warned)
    for number, checkpoint in enumerate(before.checkpoints[::2]):
        assert model_of(opened(checkpoint)).keys() == Normed().model().state_dict().keys()
        after = run(tmp_path / f"b{number}", strategy, workers, servers, resume_from=checkpoint)
        assert after.result.outcome == "finished", after.result.reason
        assert after.result.accounting["applied"] == 36 and not after.result.accounting["applied_twice"]
        if strategy == "sync":  # statistics are those of each worker
            for name, _ in Normed().model().named_parameters():
                torch.testing.assert_close(after.parameters[name], before.parameters[name], rtol=1e-6, atol=1e-7)


def test_each_stage_gets_its_own_statistics_back(tmp_path: Path) -> None:
    before = run(tmp_path / "a", "downpour", 2, 1, checkpoint_every_s=1e6, stop_at_s=12.0)
    [checkpoint] = before.checkpoints
    saved = model_of(opened(checkpoint))
    again = run(tmp_path / "b", "downpour", 2, 1, resume_from=checkpoint, checkpoint_every_s=1e6, stop_at_s=0.5)
    assert before.result.outcome == again.result.outcome == "stopped"
    for name, values in again.parameters.items():
        if "num_batches_tracked" in name:
            assert saved[name] > 0 and values >= saved[name]


STEPPING = {  # strategies whose stages have their optimizers, and the number of replicas of the first stage
    "single": ("single", {}, 1),
    "pipedream": ("pipedream", {}, 1),
    "replicas": ("pipedream", {}, 2),
    "2bw": ("pipedream", {"pipedream_2bw": True}, 1),
    "vertical sync": ("pipedream", {"vertical_sync": True}, 1),
}


EVERY_S = {case: 8.0 if case == "single" else 3.0 for case in STEPPING}


def stepping(directory: Path, case: str, **more: Any) -> CheckpointRun:
    strategy, settings, replicas = STEPPING[case]
    plan = planned(Normed(), 2, replicas=[replicas, 1])  # type: ignore[arg-type]
    settings = {"optimizer": "adam", "lr": 0.01, **settings}
    return train(directory, strategy, settings, Normed(), plan.size, 0, stage_plan=plan, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", STEPPING)
def test_stages_that_step_by_themselves_continue_after_the_same_batch(tmp_path: Path, case: str) -> None:
    before = stepping(tmp_path / "a", case, checkpoint_every_s=EVERY_S[case], keep=99)
    assert before.result.outcome == "finished", before.result.reason
    assert len(before.checkpoints) >= 2 and not before.events(events.Warned)
    for number, checkpoint in enumerate(before.checkpoints):
        manifest = opened(checkpoint).manifest
        assert len({str(block.open) + str(block.first_open) for block in manifest.blocks}) == 1
        assert model_of(opened(checkpoint)).keys() == Normed().model().state_dict().keys()
        rest = [later for later in before.checkpoints if later > checkpoint]
        every_s = 0.0 if case == "single" else EVERY_S[case]
        after = stepping(tmp_path / f"b{number}", case, resume_from=checkpoint, checkpoint_every_s=every_s)
        assert after.result.outcome == "finished", after.result.reason
        assert after.result.accounting["applied"] == 36 and not after.result.accounting["applied_twice"]
        if case == "single" or not rest:  # a checkpoint empties the pipeline, so its moment matters
            for name, values in before.parameters.items():
                assert torch.equal(after.parameters[name], values)


@pytest.mark.parametrize("case", STEPPING)
def test_stages_that_are_stopped_end_after_the_same_batch(tmp_path: Path, case: str) -> None:
    before = stepping(tmp_path / "a", case, checkpoint_every_s=1e6, stop_at_s=12.0)
    assert (before.result.outcome, before.result.exit_code) == ("stopped", 75), before.result.reason
    [checkpoint] = before.checkpoints
    assert opened(checkpoint).manifest.step == before.result.accounting["applied"] > 0
    saved = model_of(opened(checkpoint))
    for name, values in before.parameters.items():
        assert torch.equal(saved[name], values)
    after = stepping(tmp_path / "b", case, resume_from=checkpoint)
    assert after.result.outcome == "finished" and after.result.accounting["applied"] == 36
