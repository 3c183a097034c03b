"""Lightning, Accelerate and the Hugging Face Trainer by default: workers share each batch, and one writes files.

Each script is run without Rainband, and in two forked workers, which must have its result up to rounding.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from rainband.rounds.rounds import RoundExchange
from rainband.runtimes.training_loop.split.loop import SplitLoop
from rainband.transports.shared_rounds import RoundsMemory, SharedBoard
from tests.test_shared_rounds import reap, workers

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]  # the libraries' own

numbers = torch.Generator().manual_seed(3)
INPUTS, LABELS = torch.randn(26, 5, generator=numbers).double(), torch.randint(0, 3, (26,), generator=numbers)
DATA = TensorDataset(INPUTS, LABELS)  # six batches of four, and one of two


def shuffled() -> DataLoader[Any]:
    """Return a loader whose order does not depend on what else draws random numbers, such as other loaders."""
    return DataLoader(DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9))


Script = Callable[[Path, bool], nn.Module]  # it gets a folder, and whether it is run by Rainband
Result = dict[str, Any]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


COMPUTED: list[int] = []  # samples of each batch that was trained with


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor, **how: Any) -> Tensor:
    COMPUTED.append(len(inputs))
    return cross_entropy(model(inputs), labels, **how)


def result_of(script: Script, folder: Path, joins: bool) -> Result:
    """Run a script; return its parameters and the files that it has written."""
    folder.mkdir()
    COMPUTED.clear()
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = script(folder, joins)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    sums = {key: value.tolist() for key, value in model.state_dict().items()}
    return {"sums": sums, "files": files, "computed": sum(COMPUTED)}


@contextmanager
def worker(memory: RoundsMemory, rank: int, module: Any, name: str, trial_rounds: int) -> Iterator[None]:
    """Let an adapter join the workers that have this memory."""

    def join(model: Any, optimizer: Any) -> SplitLoop:
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]

        def exchange(state: Any, like: list[Tensor]) -> RoundExchange:
            board = SharedBoard(memory.fds, rank, like)
            return RoundExchange(board, state, time.perf_counter, equal_parts=True, trial_rounds=trial_rounds)

        return SplitLoop(model, optimizers, exchange, memory.num_ranks)

    main = sys.modules["__main__"]
    vars(main)["__rainband__"] = SimpleNamespace(index=rank, num_workers=memory.num_ranks, asked_rank=False)
    setattr(module, name, join)
    yield


def check(script: Script, module: Any, name: str, folder: Path, trial_rounds: int) -> None:
    plain = in_a_fork(script, folder)
    memory = RoundsMemory(2)

    def train(memory: RoundsMemory, rank: int) -> Result:
        with worker(memory, rank, module, name, trial_rounds):
            return result_of(script, folder / f"worker {rank}", joins=True)

    with workers(memory, folder, train) as pids:
        reap(memory, pids, limit_s=60.0)
    memory.close()
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for key, value in plain["sums"].items():
        for one in found:
            torch.testing.assert_close(torch.tensor(one["sums"][key]), torch.tensor(value), rtol=1e-5, atol=1e-6)
    assert found[0]["sums"] == found[1]["sums"]
    computed = sum(one["computed"] for one in found)  # each worker alone would compute 2 * 26
    again = 2 * 2  # the last batch of a pass is too small for two parts
    assert plain["computed"] == 2 * 26
    assert computed == 2 * 26 + again if not trial_rounds else computed < 90  # first rounds compute some samples twice
    assert plain["files"] and [one["files"] for one in found] == [plain["files"], []]


def in_a_fork(script: Script, folder: Path) -> Result:
    """Run a script without Rainband; libraries keep settings for the whole process, so it is one of its own."""
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)
            (folder / "plain.json").write_text(json.dumps(result_of(script, folder / "plain", joins=False)))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0, "the script fails without Rainband"
    found: Result = json.loads((folder / "plain.json").read_text())
    return found


@pytest.mark.parametrize(
    ("settings", "trial_rounds"),
    [({}, 0), ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, 4)],
    ids=["plain", "accumulating"],
)
def test_lightning(settings: dict[str, Any], trial_rounds: int, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    adapter = pytest.importorskip("rainband.adapters.lightning")
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = loss_of(self.net, *batch)
            self.log("loss", loss, on_epoch=True, on_step=False)
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val", cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = Adam(self.parameters(), lr=0.01)
            return [optimizer], [{"scheduler": StepLR(optimizer, 3, gamma=0.5), "interval": "step"}]

    def script(folder: Path, joins: bool) -> nn.Module:
        module = Module()
        stops = EarlyStopping("loss", patience=1, min_delta=10.0)  # after three of the epochs
        trainer = lightning.Trainer(
            max_epochs=5,
            accelerator="cpu",
            callbacks=[ModelCheckpoint(monitor="val"), stops, *([adapter.RainbandCallback()] if joins else [])],
            logger=CSVLogger(folder),
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **settings,
        )
        validation = DataLoader(DATA, batch_size=8)
        trainer.fit(module, shuffled(), validation)
        assert trainer.current_epoch == 2 and trainer.global_step == (14 if not settings else 8)
        module.register_buffer("val", trainer.callback_metrics["val"].double())
        return module

    check(script, adapter, "join", tmp_path, trial_rounds)


@pytest.mark.parametrize(("every", "trial_rounds"), [(1, 0), (3, 4)])
def test_accelerate(every: int, trial_rounds: int, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    adapter = pytest.importorskip("rainband.adapters.accelerate")
    from contextlib import nullcontext

    def script(folder: Path, joins: bool) -> nn.Module:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=every)
        plain = net()
        model, optimizer, batches, tests = accelerator.prepare(
            plain,
            SGD(plain.parameters(), lr=0.1, momentum=0.9),
            DataLoader(DATA, batch_size=4, shuffle=True),  # its order depends on how the other loader is read
            DataLoader(DATA, batch_size=8),
        )
        torch.manual_seed(8)
        scheduler = accelerator.prepare(StepLR(optimizer, 2, gamma=0.7))
        steps, tested = 0, []
        with adapter.join(accelerator, model, optimizer) if joins else nullcontext():
            for _ in range(2):
                model.train()
                for inputs, labels in batches:
                    with accelerator.accumulate(model):
                        accelerator.backward(loss_of(model, inputs, labels))
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(model.parameters(), 0.1)
                            steps += 1
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                model.eval()
                with torch.no_grad():
                    tested += [len(accelerator.gather_for_metrics(model(inputs))) for inputs, _ in tests]
                accelerator.save_state(str(folder / "state"))
                if accelerator.is_main_process:
                    (folder / "log").write_text("one line")
        for file in (folder / "state").glob("random_states_*"):  # each process keeps its own
            file.unlink()
        assert steps == (14 if every == 1 else 6) and tested == 2 * [8, 8, 8, 2]
        return plain

    check(script, adapter, "join_plainly", tmp_path, trial_rounds)


class Classifier(nn.Module):
    """Its loss is a mean over the samples of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = loss_of(self.net, inputs, labels)
        if not self.training:
            COMPUTED.pop()
        return {"loss": loss}


class OverItems(Classifier):
    """Its loss is a mean over the labels of all batches of a step, as in the library's models; some are ignored."""

    def forward(self, inputs: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        labels = labels.masked_fill(inputs[:, 0] > 1.0, -100)
        items = kwargs.get("num_items_in_batch", 1)
        loss = loss_of(self.net, inputs, labels, reduction="sum") / items
        if not self.training:
            COMPUTED.pop()
        return {"loss": loss}


@pytest.mark.parametrize(
    ("model", "settings", "trial_rounds"),
    [
        (Classifier, {}, 0),
        (Classifier, {"gradient_accumulation_steps": 3}, 4),
        (OverItems, {"gradient_accumulation_steps": 2}, 4),
    ],
    ids=["plain", "accumulating", "mean over items"],
)
def test_hugging_face(
    model: Callable[[], nn.Module], settings: dict[str, Any], trial_rounds: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    adapter = pytest.importorskip("rainband.adapters.hf")

    def script(folder: Path, joins: bool) -> nn.Module:
        made = model()
        arguments = transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=4,
            num_train_epochs=2,
            learning_rate=0.05,
            use_cpu=True,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
            seed=7,
            **settings,
        )
        ignored = -100 if model is OverItems else None
        samples = [
            {"inputs": x, "labels": torch.tensor(ignored) if ignored and x[0] > 1.0 else y}
            for x, y in zip(INPUTS, LABELS, strict=True)
        ]
        trainer = transformers.Trainer(
            model=made,
            args=arguments,
            train_dataset=samples,
            eval_dataset=samples,
            callbacks=[adapter.RainbandTrainerCallback()] if joins else [],
        )
        trainer.train()
        assert trainer.state.global_step == {1: 14, 3: 6, 2: 8}[settings.get("gradient_accumulation_steps", 1)]
        for file in folder.rglob("rng_state.pth"):  # each worker keeps its own
            file.unlink()
        return made

    check(script, adapter, "join", tmp_path, trial_rounds)
