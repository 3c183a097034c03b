"""Give servers and workers their state of a checkpoint, and the other workers its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from rainband.checkpoints.manifest import RunFacts
from rainband.checkpoints.read import Checkpoint
from rainband.checkpoints.store import Store
from rainband.errors import BadCheckpoint
from rainband.model.save import named_parameters
from rainband.model_parallel.execution.worker import StageWorker
from rainband.protocol.layout import BlockSpec
from rainband.protocol.saved_state import SavedBlock
from rainband.runtimes.checkpoints.place import WORKER_FILE, facts_of, opened, store_of
from rainband.runtimes.config import RunConfig
from rainband.server.server import Server
from rainband.worker.saving.snapshots import SavedWorker, WorkerSnapshots, Write
from rainband.worker.session import Session
from rainband.worker.worker import ModuleWorker


@dataclass(frozen=True)
class CheckpointAccess:
    """The place where the nodes of this process write checkpoints, and the one from which they continue."""

    store: Store
    facts: RunFacts
    keep: int = 3
    source: Checkpoint | None = None


def access_of(config: RunConfig) -> CheckpointAccess:
    source = opened(config.resume_from) if config.resume_from else None
    return CheckpointAccess(store_of(config), facts_of(config), config.keep, source)


def restore_server(server: Server, checkpoint: Checkpoint) -> None:
    """Give all blocks of a server their state; raise BadCheckpoint or ValueError if one does not fit."""
    saved = {(block.vector, block.start): block for block in checkpoint.manifest.blocks}
    starts = sorted(saved)
    for block in server.blocks.values():
        spec = block.spec
        of_vector = [start for vector, start in starts if vector == spec.vector and start <= spec.start]
        if not of_vector or saved[spec.vector, of_vector[-1]].stop < spec.stop:
            raise BadCheckpoint(checkpoint.place, f"it has no values for block {spec.index}")
        whole = saved[spec.vector, of_vector[-1]]
        server.restore(msgspec.structs.replace(whole, index=spec.index), _tensors(checkpoint, whole, spec))
    if checkpoint.manifest.commands is not None:
        server.restore_commands(checkpoint.manifest.commands)


def _tensors(checkpoint: Checkpoint, saved: SavedBlock, spec: BlockSpec) -> dict[str, Tensor]:
    """Return the tensors of a block, cut out of those of the saved block that it is a part of."""
    file, prefix = checkpoint.file(saved.file), f"{saved.index}/"
    names: Iterable[str] = [name for name in file.entries if name.startswith(prefix)]
    first, last = spec.start - saved.start, spec.stop - saved.start
    tensors = {name.removeprefix(prefix): file.tensor(name) for name in names}
    for name, tensor in tensors.items():
        if tensor.numel() != saved.stop - saved.start:
            raise BadCheckpoint(file.name, f"{name} has {tensor.numel()} values, its block {saved.stop - saved.start}")
    if last - first == saved.stop - saved.start:
        return tensors
    return {name: tensor[first:last].clone() for name, tensor in tensors.items()}  # the rest is not kept in memory


def begin_checkpoints(worker: ModuleWorker, session: Session, source: Checkpoint | None, write: Write) -> None:
    """Let a worker take part in checkpoints; if the run continues from one, give it its state."""
    steps_itself = not session.strategy.requires.servers
    stage = worker if isinstance(worker, StageWorker) else None
    buffers = stage.submodel.buffers if stage is not None else lambda: dict(worker.module.named_buffers())
    worker.snapshots = session.snapshots = snapshots = WorkerSnapshots(worker, steps_itself, write, buffers)
    if source is not None and source.has(WORKER_FILE):
        snapshots.restored = _restored(buffers(), stage is None, source)


def _restored(own: Mapping[str, Tensor], has_whole_model: bool, checkpoint: Checkpoint) -> SavedWorker:
    """Give a worker its buffers; return the rest, which it gets when the strategy makes the optimizer."""
    blocks = checkpoint.manifest.blocks
    try:
        state = SavedWorker(**{**checkpoint.state(WORKER_FILE), "buffers": _buffers(checkpoint)})
    except TypeError as error:
        raise BadCheckpoint(checkpoint.place, f"the state of a worker has other parts ({error})") from None
    state.put_buffers(own, has_whole_model)
    return state._replace(block=blocks[0] if state.training is not None and blocks else None)


def _buffers(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the buffers that the workers of one replica have written."""
    names = [file.name for file in checkpoint.manifest.files if file.name.startswith("worker")]
    return {name: buffer for file in names for name, buffer in checkpoint.state(file)["buffers"].items()}


def model_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the parameters and buffers of a checkpoint, by their names in the model."""
    layout = checkpoint.manifest.layout
    state: dict[str, Any] = checkpoint.state(WORKER_FILE) if checkpoint.has(WORKER_FILE) else {}
    training = state.get("training")
    if training is not None and "parameters" in training:  # of a custom training loop
        tensors = dict(zip((spec.name for spec in layout.parameters), training["parameters"], strict=True))
        return {**tensors, **dict(zip(state["buffer_names"], training["buffers"], strict=True))}
    vectors = training["vectors"] if training is not None else _vectors(checkpoint)
    return {**named_parameters(layout, vectors), **_buffers(checkpoint)}


def _vectors(checkpoint: Checkpoint) -> list[Tensor]:
    """Return the parameters that servers have written, in the vectors of the layout."""
    vectors = [
        torch.zeros(vector.numel, dtype=getattr(torch, vector.dtype)) for vector in checkpoint.manifest.layout.vectors
    ]
    for block in checkpoint.manifest.blocks:
        values = checkpoint.file(block.file).tensor(f"{block.index}/values")
        vectors[block.vector][block.start : block.stop] = values
    return vectors
