"""Models of checkpoints as files of plain PyTorch, and the options of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import rainband
from rainband.cli.main import build_app
from rainband.model.save import load_tensors
from rainband.options import OptionError, RunOptions
from rainband.runtimes.checkpoints.choose import with_checkpoints
from rainband.runtimes.checkpoints.export import save_pretrained
from rainband.runtimes.checkpoints.place import opened
from rainband.runtimes.checkpoints.restore import model_of
from rainband.runtimes.config import RunConfig
from rainband.tasks.task import TensorData
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


@pytest.mark.parametrize(
    ("strategy", "settings", "servers"),
    [("downpour", {}, 2), ("sync", {"batch_per_worker": True}, 3), ("sync", {}, 0), ("single", {}, 0)],
    ids=["downpour", "sync with servers", "sync", "single"],
)
def test_the_optimizer_of_a_checkpoint_continues_in_plain_pytorch(
    tmp_path: Path, strategy: str, settings: dict[str, object], servers: int
) -> None:
    """Adam's next step by hand needs both moments and the number of steps."""
    workers = 1 if strategy == "single" else 3
    adam = {"optimizer": "adam", "lr": 0.25, **settings}
    run = train(tmp_path / "a", strategy, adam, workers=workers, servers=servers, checkpoint_every_s=4.0)
    out = tmp_path / "optimizer.safetensors"
    said = CliRunner().invoke(build_app(), ["export", run.checkpoints[0], str(out), "--optimizer"])
    assert said.exit_code == 0, said.output
    module = nn.Linear(128, 1, bias=False)
    module.load_state_dict(model_of(opened(run.checkpoints[0])))
    optimizer, parameters = torch.optim.Adam(module.parameters(), lr=0.25), dict(module.named_parameters())
    for name, value in load_file(out).items():
        parameter, _, key = name.rpartition("/")
        optimizer.state[parameters[parameter]][key] = value
    saved = {key: value.clone() for key, value in optimizer.state[module.weight].items()}
    before = module.weight.detach().clone()
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    steps = saved["step"] + 1
    assert steps > 1 and saved["exp_avg"].shape == module.weight.shape
    mean = (0.9 * saved["exp_avg"] + 0.1) / (1 - 0.9**steps)
    square = (0.999 * saved["exp_avg_sq"] + 0.001) / (1 - 0.999**steps)
    torch.testing.assert_close(module.weight, before - 0.25 * mean / (square.sqrt() + 1e-8))


def test_an_optimizer_without_state_is_not_exported(tmp_path: Path) -> None:
    run = train(tmp_path / "a", "downpour", SGD, checkpoint_every_s=4.0)
    said = CliRunner().invoke(build_app(), ["export", run.checkpoints[0], str(tmp_path / "out"), "--optimizer"])
    assert said.exit_code == 2 and "plain sgd has none" in said.output


class Pretrained:
    """A small model of transformers inside a module of the user."""

    name, batch_size, epochs = "pretrained", 2, 1

    def model(self) -> nn.Module:
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
        )
        torch.manual_seed(0)
        return nn.ModuleDict({"backbone": BertModel(config), "head": nn.Linear(4, 1)})

    def data(self) -> TensorData:
        return TensorData(torch.randint(0, 8, (16, 3)))

    def loss(self, model: nn.ModuleDict, batch: tuple[Tensor]) -> Tensor:  # type: ignore[type-arg]
        loss: Tensor = model["head"](model["backbone"](batch[0]).last_hidden_state).square().mean()
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


def test_a_folder_for_from_pretrained_has_the_part_that_is_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run = train(tmp_path / "a", "single", SGD, Pretrained(), 1, 0, checkpoint_every_s=2.0)  # type: ignore[arg-type]
    checkpoint = opened(run.checkpoints[0])
    facts = msgspec.structs.replace(checkpoint.manifest.facts, task=f"{__name__}:Pretrained")
    checkpoint.manifest = msgspec.structs.replace(checkpoint.manifest, facts=facts)
    _, has_config = save_pretrained(checkpoint, tmp_path / "folder")
    assert has_config
    model = transformers.AutoModel.from_pretrained(tmp_path / "folder")
    saved = model_of(checkpoint)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[f"backbone.{name}"])


def test_a_run_begins_with_given_weights(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    save_file({"weight": torch.full((1, 128), 100.0)}, weights)
    config = with_checkpoints(CONFIG, {"from_weights": str(tmp_path)}, print)
    assert config.from_weights == str(weights)
    run = train(tmp_path / "a", "downpour", SGD, from_weights=config.from_weights)
    assert torch.equal(run.parameters["weight"].view(-1), TASK.after(0.5) + 100)


@pytest.mark.parametrize("what", ["a checkpoint", "a run without a model", "the folder of checkpoints"])
def test_a_run_begins_with_the_parameters_of_a_checkpoint(tmp_path: Path, what: str) -> None:
    before = train(tmp_path / "a", "downpour", SGD, checkpoint_every_s=4.0)
    (before.directory / "model.safetensors").unlink()
    checkpoint = Path(before.checkpoints[-1])
    given = {"a checkpoint": checkpoint, "a run without a model": before.directory}.get(what, checkpoint.parent)
    said: list[str] = []
    config = with_checkpoints(CONFIG, {"from_weights": str(given)}, said.append)
    assert config.from_weights == str(checkpoint) and not config.resume_from
    assert bool(said) is (what != "a checkpoint")
    after = train(tmp_path / "b", "downpour", SGD, from_weights=config.from_weights)
    begun = model_of(opened(str(checkpoint)))["weight"].view(-1)
    assert torch.equal(after.parameters["weight"].view(-1), begun + TASK.after(0.5))


class Tied(nn.Module):
    """A model with a shared parameter, and a buffer that no file of the model has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def test_the_tensors_of_a_checkpoint_name_a_shared_parameter_once() -> None:
    module, tensors = Tied(), {"first.weight": torch.ones(2, 2), "scratch": torch.ones(1)}
    load_tensors(module, tensors, "step-0000000008")
    assert torch.equal(module.second.weight, torch.ones(2, 2)) and not module.get_buffer("scratch").any()
    for wrong in ({**tensors, "third": torch.ones(1)}, {}, {"first.weight": torch.ones(3)}):
        with pytest.raises(ValueError, match="the weights of step-0000000008 are not those of this model"):
            load_tensors(module, wrong, "step-0000000008")


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
        with_checkpoints(CONFIG, {"from_weights": str(tmp_path / given), "runs": str(runs)}, print)


def test_an_end_before_the_batches_that_are_done_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """96 batches are three epochs of 32."""
    run = train(tmp_path / "a", "downpour", SGD, checkpoint_every_s=4.0, keep=99)
    config = RunConfig(task="given", strategy="downpour", strategy_settings=SGD, num_workers=3, num_servers=2)
    late = next(name for name in run.checkpoints if opened(name).manifest.step > 64)
    for epochs in (1, 2):
        short = msgspec.structs.replace(config, epochs=epochs)
        with pytest.raises(OptionError, match="some of them of epoch 3, .* Type epochs=3 or more, .*from_weights="):
            with_checkpoints(short, {"resume": late}, print)
    assert with_checkpoints(msgspec.structs.replace(config, epochs=3), {"resume": late}, print).resume_from == late


def test_a_new_run_and_one_that_continues_are_not_both(tmp_path: Path) -> None:
    run = train(tmp_path / "a", "downpour", SGD, checkpoint_every_s=4.0)
    config = RunConfig(task="given", strategy="downpour", strategy_settings=SGD, num_workers=3, num_servers=2)
    with pytest.raises(OptionError, match="omit one"):
        with_checkpoints(config, {"from_weights": "x", "resume": run.checkpoints[0]}, print)


def test_settings_that_differ_are_named_and_forced(tmp_path: Path) -> None:
    run = train(tmp_path / "a", "downpour", SGD, checkpoint_every_s=4.0)
    other = RunConfig(
        task="given", strategy="downpour", strategy_settings={**SGD, "lr": 0.1}, num_workers=3, num_servers=2
    )
    with pytest.raises(OptionError, match="the setting lr was 0.5, now it is 0.1"):
        with_checkpoints(other, {"resume": run.checkpoints[0]}, print)
    said: list[str] = []
    config = with_checkpoints(other, {"resume": run.checkpoints[0], "force": True}, said.append)
    assert config.resume_from == run.checkpoints[0] and config.force
    assert len(said) == 1 and "0.5" in said[0] and "0.1" in said[0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"strategy": "sync"}, "the strategy was downpour, now it is sync"),
        ({"strategy_settings": {**SGD, "optimizer": "adam"}}, "the optimizer was sgd, now it is adam"),
        ({"batch_size": 7}, "the batch size was 2, now it is 7"),
    ],
)
def test_what_decides_the_state_is_refused_even_with_force(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    run = train(tmp_path / "a", "downpour", SGD, checkpoint_every_s=4.0)
    other = RunConfig(task="given", strategy="downpour", strategy_settings=SGD, num_workers=3, num_servers=2)
    given: RunOptions = {"resume": run.checkpoints[0], "force": True}
    with pytest.raises(OptionError, match=f"{what}.* from_weights="):
        with_checkpoints(msgspec.structs.replace(other, **changes), given, print)


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("5m", 300), ("1h", 3600), (90, 90), ("0", 0)])
def test_times_are_given_as_people_write_them(text: str, seconds: float) -> None:
    assert with_checkpoints(CONFIG, {"checkpoint_every": text}, print).checkpoint_every_s == seconds


@pytest.mark.parametrize("text", ["often", "5x", "-1s", "nan"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="such as 30s, 5m or 1h"):
        with_checkpoints(CONFIG, {"checkpoint_every": text}, print)


def test_a_run_without_options_has_a_checkpoint_every_five_minutes_and_a_simulation_none() -> None:
    assert with_checkpoints(CONFIG, {}, print).checkpoint_every_s == 300
    simulated = RunConfig(task="linear", strategy="downpour", num_workers=2, num_servers=1, runtime="sim")
    assert with_checkpoints(simulated, {}, print).checkpoint_every_s == 0


def test_the_memory_of_a_process_is_a_place_for_simulated_checkpoints_only() -> None:
    with pytest.raises(OptionError, match="memory://here.* is the memory of one process, .* give a folder"):
        with_checkpoints(CONFIG, {"checkpoints": "memory://here"}, print)
    simulated = msgspec.structs.replace(CONFIG, runtime="sim")
    assert with_checkpoints(simulated, {"checkpoints": "memory://here"}, print).checkpoints == "memory://here"


def test_a_place_without_checkpoints_is_not_said_to_have_damaged_ones(tmp_path: Path) -> None:
    said = CliRunner().invoke(build_app(), ["checkpoints", str(tmp_path)])
    assert said.exit_code == 0 and said.output.strip() == f"{tmp_path} has no checkpoint yet."


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
