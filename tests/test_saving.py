"""The model is saved whatever fails: the code of the user, the disk, or all workers."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import rainband
from rainband.errors import NotSaved, RainbandError
from rainband.model.flat_parameters import Flat
from rainband.model.save import save_blocks, save_model, saving
from rainband.protocol import events
from rainband.protocol.layout import cut
from rainband.protocol.messages import FilePart
from rainband.runtimes.machines.machine_host import ReceivedModel
from rainband.tasks.linear import Linear
from rainband.tasks.task import ModuleTask


def test_a_saved_model_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    save_model(nn.Linear(2, 2), str(tmp_path / "model"))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"usual": modes["usual"], "model": modes["usual"]}


def test_after_an_error_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(NotSaved, match=r"could not be saved \(IsADirectoryError"), saving("model"):
        save_model(nn.Linear(2, 2), str(tmp_path / "model"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_is_saved_from_blocks_as_from_its_module(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.Linear(4, 5).bfloat16())
    flat = Flat(module)
    blocks = cut(flat.layout, num_servers=2, block_bytes=64)
    values: dict[int, Any] = {}
    for block in blocks:
        view = flat.view(block).detach().clone()
        values[block.index] = view if block.index % 2 else view.view(torch.uint8).numpy().tobytes()
    assert len(blocks) > 4
    save_blocks(flat.layout, blocks, values, str(tmp_path / "blocks"))
    save_model(module, str(tmp_path / "module"))
    one, other = (safetensors.torch.load_file(tmp_path / name) for name in ("blocks", "module"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# ---- real runs ----


@dataclasses.dataclass(frozen=True)
class FailsAtBatch(Linear):
    """Raises at the third batch of each process."""

    draws_before = 24  # the fingerprint draws each of the eight samples three times

    def data(self) -> Any:
        return Numbered(super().data(), self.draws_before)


class FailsAtSharedBatch(FailsAtBatch):
    draws_before = 27  # workers that share batches also try how the loss depends on samples


class Numbered:
    def __init__(self, data: Any, draws_before: int) -> None:
        self.data = data
        self.drawn = -draws_before

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Any) -> Any:
        self.drawn += 1
        if self.drawn == 3:
            raise ZeroDivisionError("on purpose")
        return self.data.batch(indices)


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("strategy", [rainband.Downpour(optimizer="sgd", lr=0.5), rainband.Hogwild(lr=0.5)])
def test_after_an_error_of_the_only_worker_the_model_so_far_is_saved(tmp_path: Path, strategy: Any) -> None:
    task = FailsAtBatch(dimension=4, samples=8, batch_size=1, epochs=1)
    servers = 1 if isinstance(strategy, rainband.Downpour) else 0
    with pytest.raises(RainbandError, match="on purpose.* without buffers") as caught:
        rainband.fit(task, strategy, workers=1, servers=servers, runs=tmp_path, seed=3)
    assert "failed at step 3" in str(caught.value)
    [file] = tmp_path.glob("*/model.safetensors")
    saved = safetensors.torch.load_file(file)["weight"][0]
    samples = Linear.data(task).tensors[0]
    assert any(torch.equal(saved, -0.5 * (a + b)) for a, b in itertools.permutations(samples, 2))


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("strategy", [rainband.Single(optimizer="sgd", lr=0.5), rainband.Sync(optimizer="sgd", lr=0.5)])
def test_after_an_error_of_every_worker_the_last_one_saves_the_model_so_far(tmp_path: Path, strategy: Any) -> None:
    """As with a damaged file: the workers that do the part of a lost one come to it, too."""
    alone = isinstance(strategy, rainband.Single)
    workers, kind = (1, FailsAtBatch) if alone else (2, FailsAtSharedBatch)
    task = kind(dimension=4, samples=8, batch_size=2, epochs=1)
    with pytest.raises(RainbandError, match="on purpose"):
        rainband.fit(task, strategy, workers=workers, runs=tmp_path, seed=3)
    [file] = tmp_path.glob("*/model.safetensors")
    saved = safetensors.torch.load_file(file)["weight"][0]
    assert saved.count_nonzero() == 4  # the values of two updates; the first ones are zeros


@dataclasses.dataclass(frozen=True)
class Fine(Linear):
    def evaluate(self, model: Any) -> dict[str, float]:
        return {}


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("strategy, workers", [("sync", 2), ("single", 1), ("averaging", 1)])
def test_if_the_directory_cannot_be_written_to_the_model_is_saved_elsewhere(
    tmp_path: Path, strategy: str, workers: int
) -> None:
    lost: list[str] = []

    def in_the_way(event: events.AnyEvent) -> None:
        if isinstance(event, events.PlanMade):
            [directory] = tmp_path.iterdir()
            (directory / "model.safetensors").mkdir()
        if isinstance(event, events.Lost):
            lost.append(event.why)

    with pytest.raises(RainbandError, match="no worker is left.* it is in /"):
        rainband.fit(Fine(samples=64), strategy, workers=workers, runs=tmp_path, on_event=in_the_way)
    assert lost  # the second worker may have joined too late
    assert all(why.startswith("NotSaved: the model could not be saved (IsADirectoryError") for why in lost)
    [directory] = tmp_path.iterdir()
    file = Path(tempfile.gettempdir(), f"{directory.name}.safetensors")
    assert "weight" in safetensors.torch.load_file(file)
    os.unlink(file)


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_a_model_in_stages_that_no_server_has_is_saved_elsewhere_too(tmp_path: Path) -> None:
    def in_the_way(event: events.AnyEvent) -> None:
        if isinstance(event, events.PlanMade):
            [directory] = tmp_path.iterdir()
            (directory / "model.safetensors").mkdir()

    samples = torch.utils.data.TensorDataset(torch.ones(16, 2), torch.ones(16, 1))
    task = ModuleTask(
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), samples, nn.functional.mse_loss, batch_size=4
    )
    with pytest.raises(RainbandError, match="no worker is left.* it is in /"):
        rainband.fit(task, "single", workers=2, stages=2, epochs=1, runs=tmp_path, on_event=in_the_way)
    [directory] = tmp_path.iterdir()
    file = Path(tempfile.gettempdir(), f"{directory.name}.safetensors")
    assert len(safetensors.torch.load_file(file)) == 4
    os.unlink(file)


def test_a_model_of_another_machine_is_written_elsewhere_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is made before the first part is written: what has arrived cannot be had again."""
    (run := tmp_path / "run").mkdir()
    (elsewhere := tmp_path / "tmp").mkdir()
    full, make_room = {run}, os.posix_fallocate

    def fallocate(fd: int, offset: int, length: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).parent in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make_room(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))

    def take(model: ReceivedModel) -> list[bool]:
        return [model.take(FilePart(offset, 5), memoryview(b"01234"[offset : offset + 2])) for offset in (0, 2, 4)]

    model = ReceivedModel(run / "model.safetensors")
    assert take(model) == [False, False, True]
    assert model.place == elsewhere / "run.safetensors" and model.place.read_bytes() == b"01234"
    full.add(elsewhere)
    with pytest.raises(OSError, match="No space left"):
        take(ReceivedModel(run / "model.safetensors"))
    full.clear()
    model = ReceivedModel(run / "model.safetensors")
    assert take(model) == [False, False, True] and model.path.read_bytes() == b"01234"
    assert not list(tmp_path.rglob("*.part"))
