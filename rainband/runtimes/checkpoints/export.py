"""Checkpoints as files of plain PyTorch and Hugging Face: the model's parameters and buffers, the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rainband.checkpoints.manifest import RunFacts
from rainband.checkpoints.read import Checkpoint
from rainband.model.containers import restored
from rainband.model.save import named_parameters, save_tensors
from rainband.protocol.layout import Layout
from rainband.runtimes.checkpoints.place import WORKER_FILE
from rainband.runtimes.checkpoints.restore import model_of, vectors_of
from rainband.server.snapshots import OPTIMIZER
from rainband.tasks.load import load_task

MODEL, CONFIG = "model.safetensors", "config.json"  # of Hugging Face
FORMAT = {"format": "pt"}  # without it, from_pretrained refuses a file


def optimizer_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the optimizer's state as PARAMETER/NAME, such as `0.weight/exp_avg`; ValueError if there is none."""
    found = dict(_of_servers(checkpoint) if _has_blocks(checkpoint) else _of_workers(checkpoint))
    if not found:
        optimizer = checkpoint.manifest.facts.strategy_settings.get("optimizer", "")
        raise ValueError(
            f"{checkpoint.place} has no optimizer state"
            + (f": plain {optimizer} has none." if optimizer else ": the optimizer of this run has none.")
        )
    return found


def _has_blocks(checkpoint: Checkpoint) -> bool:
    return any(block.stop for block in checkpoint.manifest.blocks)


def _of_servers(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    layout, blocks = checkpoint.manifest.layout, checkpoint.manifest.blocks
    specs = layout.parameters
    kinds = {
        name.split("/", 2)[2]: None
        for block in blocks
        for name in checkpoint.file(block.file).entries
        if name.startswith(f"{block.index}/{OPTIMIZER}/")
    }
    for kind in kinds:
        absent = {number for block in blocks for number in block.absent.get(kind, ())}
        tensors = named_parameters(layout, vectors_of(checkpoint, f"{OPTIMIZER}/{kind}"))
        for number, (name, tensor) in enumerate(tensors.items()):
            if number not in absent:
                yield f"{name}/{kind}", tensor
    for kind in dict.fromkeys(kind for block in blocks for kind in block.numbers):
        numbers = {number: value for block in blocks for number, value in block.numbers.get(kind, {}).items()}
        for number, value in sorted(numbers.items()):
            yield f"{specs[number].name}/{kind}", torch.tensor(float(value))


def _of_workers(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    state = checkpoint.state(WORKER_FILE)
    training = state.get("training") or {}
    if "loop" in state or "parameters" in training:
        raise ValueError(
            f"{checkpoint.place} is of a custom training loop, which has its optimizers itself: continue it, and save "
            "optimizer.state_dict() there."
        )
    if "named" in training:
        named = {name: restored(values) for name, values in training["optimizer"].items()}
    else:
        saved = restored(training.get("optimizer") or {})
        saved = saved.get("optimizer", saved)  # of a task with a scheduler
        named = {name: saved["state"].get(number, {}) for name, number in _numbers(checkpoint.manifest.layout).items()}
        _check_shapes(checkpoint, named)
    for name, values in named.items():
        for kind, value in values.items():
            if isinstance(value, Tensor | int | float):
                yield f"{name}/{kind}", value if isinstance(value, Tensor) else torch.tensor(float(value))


def _numbers(layout: Layout) -> dict[str, int]:
    """Return the number that an optimizer gives to each parameter: group by group."""
    in_order = sorted(layout.parameters, key=lambda spec: spec.group)
    return {spec.name: number for number, spec in enumerate(in_order)}


def _check_shapes(checkpoint: Checkpoint, named: Mapping[str, Mapping[str, Any]]) -> None:
    shapes = {spec.name: tuple(spec.shape) for spec in checkpoint.manifest.layout.parameters}
    for name, values in named.items():
        for kind, value in values.items():
            if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != shapes[name]:
                raise ValueError(
                    f"the optimizer of {checkpoint.place} has its parameters in another order than the model ({kind} "
                    f"of {name} has the shape {list(value.shape)}): its state cannot be exported by name."
                )


def save_pretrained(checkpoint: Checkpoint, folder: Path) -> tuple[dict[str, Tensor], bool]:
    """Write what from_pretrained of Hugging Face reads; return the tensors, and whether config.json is among it."""
    tensors, config = model_of(checkpoint), None
    module = _module_of(checkpoint.manifest.facts)
    for prefix, part in [] if module is None else module.named_modules():
        if hasattr(part, "config") and hasattr(part, "save_pretrained"):
            config = part.config
            inside = f"{prefix}." if prefix else ""
            tensors = {name.removeprefix(inside): tensor for name, tensor in tensors.items() if name.startswith(inside)}
            break
    else:
        if module is not None:
            raise ValueError(
                f"the model of {checkpoint.manifest.facts.task} is a {type(module).__name__}, and has no part that is "
                "a model of transformers: export it without --huggingface."
            )
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, str(folder / MODEL), FORMAT)
    if config is not None:
        config.save_pretrained(folder)
    return tensors, config is not None


def _module_of(facts: RunFacts) -> nn.Module | None:
    """Return the model as the run's task makes it; None: only a script can make it."""
    return None if facts.script else load_task(facts.task, facts.task_settings).model()
