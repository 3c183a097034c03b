"""Laws of every strategy: a run that is stopped and continued trains like one that was not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from rainband.plugins import load_strategy, strategy_names
from rainband.protocol import events
from rainband.runtimes.checkpoints.place import opened
from rainband.runtimes.config import SimSettings
from rainband.tasks.linear import Linear
from rainband.tasks.quadratic import Quadratic
from tests.checkpoint_runs import CheckpointRun, train
from tests.full_batch_runs import Logistic

EXACT = Linear(dimension=128, samples=16 * 32, batch_size=16, epochs=3)  # sums of its gradients are exact in any order
NEVER_S = 1e6


class Law(NamedTuple):
    """The settings of a strategy in these tests, and what is promised."""

    settings: Mapping[str, Any] = MappingProxyType({})
    task: Any = EXACT
    workers: int = 3
    servers: int = 2
    bits: bool = False  # the model is that of the run without a stop, bit for bit
    within: float = -1.0  # it differs by at most this much; negative: it depends on the times


SGD = {"optimizer": "sgd", "lr": 0.5}
ADAM = {"optimizer": "adam", "lr": 0.05}
ROUGH = Quadratic(dimension=24, samples=384, batch_size=12, epochs=3)  # any other order shows in the last bits
FULL_BATCH = {"iterations": 12, "gradient_tolerance": 0.0, "loss_tolerance": 0.0}
LAWS = {
    "adaptive_bound": Law(SGD, bits=True),
    "all_reduce": Law(ADAM, ROUGH, servers=0, bits=True),
    "adaptive_period": Law({"period": 2}, servers=0),
    "averaging": Law({"period": 2}, servers=0),
    "block_momentum": Law({"period": 2}, servers=0),
    "bounded_delay": Law(SGD, bits=True),
    "conjugate_gradient": Law(FULL_BATCH, Logistic(), within=1e-9),
    "async_gossip": Law({"lr": 0.01}, servers=0),
    "diloco": Law({"period": 2}, servers=0),
    "downpour": Law(SGD, bits=True),
    "elastic": Law({"period": 2}),
    "hogwild": Law({"lr": 0.5}, servers=0, bits=True),
    "one_shot": Law(servers=0),  # its only round ends with the run, so only a stop writes a checkpoint
    "sandblaster": Law(FULL_BATCH, Logistic(), within=1e-9),
    "single": Law(ADAM, ROUGH, workers=1, servers=0, bits=True),
    "soft_sync": Law(SGD),
    "stale_sync": Law(SGD, bits=True),
    "sync": Law(ADAM, ROUGH, servers=0, bits=True),
}
IN_STAGES = {"pipedream"}  # in test_checkpoint_stages.py


def law_of(name: str) -> Law:
    """Return the law of a strategy; of one that is not listed, it trains to the end and counts every batch once."""
    requires = load_strategy(name, {}).requires
    return LAWS.get(name, Law(servers=2 if requires.servers else 0))


def run(directory: Path, name: str, law: Law, stop_s: float | None = None, **more: Any) -> CheckpointRun:
    """Run to the end, or stop it at a time, and write a checkpoint then."""
    if stop_s is not None:
        more |= {"sim": SimSettings(faults=f"{stop_s:.6f} stop coordinator"), "checkpoint_every_s": NEVER_S}
    return train(directory, name, dict(law.settings), law.task, law.workers, law.servers, parts="equal", **more)


def check(after: CheckpointRun, whole: CheckpointRun, law: Law) -> None:
    assert after.result.outcome == "finished", after.result.reason
    accounting = after.result.accounting
    assert accounting["applied"] + sum(accounting["skipped"].values()) == whole.result.accounting["applied"]
    assert not accounting["lost"] and not accounting["applied_twice"]
    for name, values in whole.parameters.items():
        if law.bits:
            assert torch.equal(after.parameters[name], values)
        elif law.within >= 0:
            assert torch.allclose(after.parameters[name], values, atol=law.within, rtol=0)


@pytest.mark.parametrize("name", sorted(set(strategy_names()) - IN_STAGES))
def test_a_run_that_is_stopped_and_continued_trains_like_one_that_was_not(name: str, tmp_path: Path) -> None:
    law = law_of(name)
    whole = run(tmp_path / "whole", name, law)
    assert whole.result.outcome == "finished", whole.result.reason
    before = run(tmp_path / "a", name, law, stop_s=0.4 * whole.result.seconds)
    assert before.result.outcome == "stopped" and not before.events(events.Warned)
    [checkpoint] = before.checkpoints
    assert 0 < opened(checkpoint).manifest.step < whole.result.accounting["applied"]
    again = run(tmp_path / "b", name, law, resume_from=checkpoint, stop_s=0.2 * whole.result.seconds)
    assert again.result.outcome == "stopped"
    [later] = again.checkpoints
    assert opened(later).manifest.step > opened(checkpoint).manifest.step
    check(run(tmp_path / "c", name, law, resume_from=later), whole, law)


@pytest.mark.parametrize("name", sorted(set(strategy_names()) - IN_STAGES))
def test_a_run_continues_from_any_checkpoint_that_was_written_while_it_trained(name: str, tmp_path: Path) -> None:
    law = law_of(name)
    whole = run(tmp_path / "whole", name, law)
    before = run(tmp_path / "a", name, law, checkpoint_every_s=whole.result.seconds / 5, keep=9)
    assert (before.checkpoints or name == "one_shot") and not before.events(events.Warned)
    for name_, values in whole.parameters.items():  # writing changes nothing
        assert torch.equal(before.parameters[name_], values) or not (law.bits or law.within >= 0)
    for number, checkpoint in enumerate(before.checkpoints[::2]):
        check(run(tmp_path / f"b{number}", name, law, resume_from=checkpoint), whole, law)
