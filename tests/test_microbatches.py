"""Batches in microbatches on workers that have the whole model: the same gradients, with less memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from rainband.cli.options.words import configured
from rainband.options import OptionError
from rainband.runtimes.simulation.run import run
from tests.test_stages_sim import Seen

WORDS = ["tests.stage_tasks:Shaped", "task.name=chain", "task.samples=30", "task.epochs=2"]


def trained(folder: Path, strategy: str, microbatches: int | None, **settings: object) -> dict[str, torch.Tensor]:
    words = [WORDS[0], strategy, *WORDS[1:], *(f"{name}={value}" for name, value in settings.items())]
    config = configured(
        words, {"runtime": "sim", "workers": 1 if strategy == "single" else 2, "microbatches": microbatches}
    )
    assert config.microbatches == (microbatches or 1)
    folder.mkdir()
    result = run(msgspec.structs.replace(config, directory=str(folder)), Seen())
    assert result.outcome == "finished", result.reason
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("microbatches", [2, 3, 4, 9])
@pytest.mark.parametrize(
    "strategy, settings", [("single", {"lr": 0.1}), ("sync", {"lr": 0.1}), ("sandblaster", {"iterations": 3})]
)
def test_the_model_is_the_same(tmp_path: Path, strategy: str, settings: dict[str, object], microbatches: int) -> None:
    """Batches of 4 samples, the last of an epoch of 2: also where there are fewer samples than microbatches."""
    whole = trained(tmp_path / "whole", strategy, None, **settings)
    parts = trained(tmp_path / "parts", strategy, microbatches, **settings)
    assert all(torch.isfinite(tensor).all() for tensor in whole.values())
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-9, atol=1e-12)


def test_an_earlier_run_is_repeated_with_its_microbatches(tmp_path: Path) -> None:
    config = configured(["digits", "single"], {"microbatches": 4})
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    assert configured([], {"config": tmp_path / "config.json"}).microbatches == 4


def test_timing_without_gradients_has_none() -> None:
    with pytest.raises(OptionError, match="no batch is computed"):
        configured(["digits", "downpour"], {"microbatches": 4, "runtime": "sim", "time_only": True})


PEAK = """
import sys, torch
from torch import nn
from rainband.model.flat_parameters import Flat
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import Peer
from rainband.strategy import Batch
from rainband.tasks.task import TensorData
from rainband.worker.client import Client
from rainband.worker.worker import ModuleWorker

class Task:
    def loss(self, model, batch):
        return model(batch[0]).square().mean()

torch.set_num_threads(1)
model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())])
plan = DataPlan(fingerprint="", layout="", num_samples=32768, batch_size=32768, epochs=1, seed=0, portion_batches=1)
client = Client(Peer("worker", 0), plan, Flat(model), (), (), (), lambda message: None)
worker = ModuleWorker(0, 1, Task(), TensorData(torch.ones(32768, 64)), model, client)
worker.microbatches = int(sys.argv[1])

def peak_kb():  # of this process alone: ru_maxrss begins at the size of the process that started it
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak_kb()
worker.compute(Batch(0, 0, 0))
print(peak_kb() - before)
"""


def test_the_peak_of_memory_is_lower() -> None:
    """24 activations of 8 MB; in eight microbatches, of 1 MB."""

    def peak_kb(microbatches: int) -> int:
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(microbatches)], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert peak_kb(8) < 0.5 * peak_kb(1)
