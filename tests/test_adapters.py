"""The loops of Lightning, Accelerate and the Hugging Face Trainer, joined: equal to the same loops alone."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from tests.one_process import OneProcess

torch.manual_seed(3)
INPUTS, LABELS = torch.randn(16, 5), torch.randint(0, 3, (16,))
DATA = TensorDataset(INPUTS, LABELS)  # four batches of four

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.fixture
def same_as_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], nn.Module], int], None]]:
    def check(script: Callable[[], nn.Module], pushes: int) -> None:
        alone = script()
        member = OneProcess()
        monkeypatch.setattr(sys.modules["__main__"], "__rainband__", member, raising=False)
        shared = script()
        monkeypatch.delattr(sys.modules["__main__"], "__rainband__")
        for a, b in zip(alone.state_dict().values(), shared.state_dict().values(), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)
        assert (member.num_pushed, member.accounting.untracked_pushes) == (pushes, pushes)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield check


@pytest.fixture(autouse=True)
def accelerate_forgets() -> Iterator[None]:
    """It keeps its settings for the whole process."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


SameAsAlone = Callable[[Callable[[], nn.Module], int], None]


@pytest.mark.parametrize(
    ("settings", "pushes"),
    [({}, 8), ({"accumulate_grad_batches": 2}, 4), ({"precision": "bf16-mixed"}, 8), ({"gradient_clip_val": 0.01}, 8)],
    ids=["plain", "accumulating", "bf16", "clipping"],
)
def test_lightning(same_as_alone: SameAsAlone, tmp_path: Path, settings: dict[str, Any], pushes: int) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    callback = pytest.importorskip("rainband.adapters.lightning").RainbandCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, number: int) -> Tensor:
            inputs, labels = batch
            return cross_entropy(self.net(inputs), labels)

        def configure_optimizers(self) -> Any:
            optimizer = Adam(self.parameters(), lr=0.01)
            return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]

    def script() -> nn.Module:
        module = Module()
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            callbacks=[callback()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **settings,
        )
        trainer.fit(module, DataLoader(DATA, batch_size=4))
        return module

    same_as_alone(script, pushes)


@pytest.mark.parametrize(("precision", "every"), [("no", 1), ("bf16", 2)])
def test_accelerate(same_as_alone: SameAsAlone, precision: str, every: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    adapter = pytest.importorskip("rainband.adapters.accelerate")

    def script() -> nn.Module:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=every)
        plain = net()
        model, optimizer, batches = accelerator.prepare(
            plain, SGD(plain.parameters(), lr=0.1, momentum=0.9), DataLoader(DATA, batch_size=4)
        )
        scheduler = accelerator.prepare(StepLR(optimizer, 1, gamma=0.5))
        with adapter.join(accelerator, model, optimizer):
            for inputs, labels in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(model(inputs), labels))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        return plain

    same_as_alone(script, 4 // every)


@pytest.mark.parametrize(("settings", "pushes"), [({}, 8), ({"bf16": True, "gradient_accumulation_steps": 2}, 4)])
def test_hugging_face(same_as_alone: SameAsAlone, tmp_path: Path, settings: dict[str, Any], pushes: int) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    callback = pytest.importorskip("rainband.adapters.hf").RainbandTrainerCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": cross_entropy(self.net(inputs), labels)}

    def script() -> nn.Module:
        model = Model()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_train_epochs=2,
            learning_rate=0.01,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=7,
            **settings,
        )
        samples = [{"inputs": x, "labels": y} for x, y in zip(INPUTS, LABELS, strict=True)]
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[callback()])
        trainer.train()
        return model

    same_as_alone(script, pushes)
