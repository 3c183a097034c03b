"""Models of checkpoints as files of plain PyTorch, and the options of checkpoints."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import rainband
from rainband.cli.main import build_app
from rainband.model_parallel.placement.placement import PlacedStage, Placement
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.options import OptionError
from rainband.runtimes.checkpoints.choose import with_checkpoints
from rainband.runtimes.checkpoints.place import opened
from rainband.runtimes.checkpoints.restore import model_of
from rainband.runtimes.config import RunConfig
from rainband.strategy import Requirements
from tests.checkpoint_runs import TASK, train

SGD = {"optimizer": "sgd", "lr": 0.5}
CONFIG = RunConfig(task="linear", strategy="downpour", num_workers=2, num_servers=1)


@pytest.mark.parametrize(
    ("strategy", "settings", "servers"),
    [("downpour", SGD, 2), ("sync", {**SGD, "batch_per_worker": True}, 3), ("sync", SGD, 0), ("single", SGD, 0)],
    ids=["downpour", "sync with servers", "sync", "single"],
)
def test_the_model_of_a_checkpoint_loads_into_plain_pytorch(
    tmp_path: Path, strategy: str, settings: dict[str, object], servers: int
) -> None:
    workers = 1 if strategy == "single" else 3
    run = train(tmp_path / "a", strategy, settings, workers=workers, servers=servers, checkpoint_every_s=4.0)
    checkpoint = opened(run.checkpoints[-1])
    exported = model_of(checkpoint)
    nn.Linear(128, 1, bias=False).load_state_dict(exported)
    out = tmp_path / "model.safetensors"
    said = CliRunner().invoke(build_app(), ["export", run.checkpoints[-1], str(out)])
    assert said.exit_code == 0, said.output
    assert torch.equal(load_file(out)["weight"], exported["weight"])
    if strategy == "single":  # half of an epoch's batches are half of its gradients, for these numbers not exactly
        share = checkpoint.manifest.step / 96
        assert torch.allclose(exported["weight"].view(-1), share * TASK.after(0.5), rtol=0.3)


def test_a_run_begins_with_given_weights(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    save_file({"weight": torch.full((1, 128), 100.0)}, weights)
    config = with_checkpoints(CONFIG, {"from_weights": str(tmp_path)}, Requirements(), print)
    assert config.from_weights == str(weights)
    run = train(tmp_path / "a", "downpour", SGD, from_weights=config.from_weights)
    assert torch.equal(run.parameters["weight"].view(-1), TASK.after(0.5) + 100)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    weights = tmp_path / "other.safetensors"
    save_file({"bias": torch.zeros(1)}, weights)
    with pytest.raises(ValueError, match=r"other\.safetensors are not those of this model.*bias"):
        train(tmp_path / "a", "downpour", SGD, from_weights=str(weights))


@pytest.mark.parametrize(
    ("given", "what"), [("model.pt", "can run code"), ("nothing", "no runs in"), ("folder", "there is no")]
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, given: str, what: str) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    runs = tmp_path / "runs"
    with pytest.raises(ValueError, match=what):
        with_checkpoints(CONFIG, {"from_weights": str(tmp_path / given), "runs": str(runs)}, Requirements(), print)


def test_a_new_run_and_one_that_continues_are_not_both(tmp_path: Path) -> None:
    run = train(tmp_path / "a", "downpour", SGD, checkpoint_every_s=4.0)
    config = RunConfig(task="given", strategy="downpour", strategy_settings=SGD, num_workers=3, num_servers=2)
    with pytest.raises(OptionError, match="omit one"):
        with_checkpoints(config, {"from_weights": "x", "resume": run.checkpoints[0]}, Requirements(), print)


def test_settings_that_differ_are_named_and_forced(tmp_path: Path) -> None:
    run = train(tmp_path / "a", "downpour", SGD, checkpoint_every_s=4.0)
    other = RunConfig(task="given", strategy="sync", strategy_settings={"lr": 0.1}, num_workers=3, num_servers=2)
    with pytest.raises(OptionError, match="the strategy was downpour, now it is sync.*was.*0.5.*now it is.*0.1"):
        with_checkpoints(other, {"resume": run.checkpoints[0]}, Requirements(), print)
    said: list[str] = []
    config = with_checkpoints(other, {"resume": run.checkpoints[0], "force": True}, Requirements(), said.append)
    assert config.resume_from == run.checkpoints[0] and config.force
    assert len(said) == 1 and "the strategy was downpour" in said[0]


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("5m", 300), ("1h", 3600), (90, 90), ("0", 0)])
def test_times_are_given_as_people_write_them(text: str, seconds: float) -> None:
    assert with_checkpoints(CONFIG, {"checkpoint_every": text}, Requirements(), print).checkpoint_every_s == seconds


@pytest.mark.parametrize("text", ["often", "5x", "-1s", "nan"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="such as 30s, 5m or 1h"):
        with_checkpoints(CONFIG, {"checkpoint_every": text}, Requirements(), print)


def test_a_run_without_options_has_a_checkpoint_every_five_minutes_and_a_simulation_none() -> None:
    assert with_checkpoints(CONFIG, {}, Requirements(), print).checkpoint_every_s == 300
    simulated = RunConfig(task="linear", strategy="downpour", num_workers=2, num_servers=1, runtime="sim")
    assert with_checkpoints(simulated, {}, Requirements(), print).checkpoint_every_s == 0


def test_a_strategy_without_checkpoints_says_so_if_one_is_asked_for() -> None:
    stages = (PlacedStage((0,), ("first",)), PlacedStage((1,), ("last",)))
    two = Placement(model="", kind="pipeline", partitioner="", num_machines=2, stages=stages)
    own = Requirements(servers=False)
    staged = msgspec.structs.replace(CONFIG, stage_plan=StagePlan(plan=two))
    assert with_checkpoints(staged, {}, own, print).checkpoint_every_s == 0
    with pytest.raises(OptionError, match="has no checkpoints, because"):
        with_checkpoints(staged, {"checkpoint_every": "5m"}, own, print)


def test_checkpoints_are_listed_the_newest_first_and_damage_is_named(tmp_path: Path) -> None:
    run = train(tmp_path / "a", "downpour", SGD, checkpoint_every_s=4.0)
    said = CliRunner().invoke(build_app(), ["checkpoints", str(run.directory)])
    assert said.exit_code == 0, said.output
    assert said.output.index(run.checkpoints[2][-10:]) < said.output.index(run.checkpoints[0][-10:])
    assert "3 checkpoints; rainband resume" in said.output
    damaged = next(Path(run.checkpoints[-1]).glob("server-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    said = CliRunner().invoke(build_app(), ["checkpoints", str(run.directory), "--check"])
    assert said.exit_code == 1 and damaged.name in said.output


def test_fit_continues_a_run(tmp_path: Path) -> None:
    strategy = rainband.Downpour(optimizer="sgd", lr=0.5)
    first = rainband.fit(
        TASK, strategy, workers=3, servers=2, runtime="sim", checkpoint_every=0.05, keep=9, runs=tmp_path
    )
    assert len(list((first.directory / "checkpoints").iterdir())) >= 2
    again = rainband.fit(TASK, strategy, workers=2, servers=1, runtime="sim", resume=first.directory, runs=tmp_path)
    assert again.directory != first.directory and again.accounting.applied == 96
    assert torch.equal(again.module.state_dict()["weight"].view(-1), TASK.after(0.5))
