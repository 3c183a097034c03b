"""Give servers and workers their state of a checkpoint, and the other workers its model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from rainband.checkpoints.manifest import RunFacts
from rainband.checkpoints.read import Checkpoint
from rainband.checkpoints.store import Store
from rainband.errors import BadCheckpoint
from rainband.model.save import load_tensors, load_weights, named_parameters
from rainband.model_parallel.execution.snapshots import StageSnapshots
from rainband.model_parallel.execution.worker import StageWorker
from rainband.protocol.layout import BlockSpec
from rainband.protocol.saved_state import SavedBlock, step_of
from rainband.runtimes.checkpoints.place import WORKER_FILE, facts_of, opened, store_of
from rainband.runtimes.config import RunConfig
from rainband.server.server import Server
from rainband.server.snapshots import VALUES
from rainband.worker.saving.snapshots import SavedWorker, WorkerSnapshots, Write
from rainband.worker.session import Session
from rainband.worker.worker import ModuleWorker

NAMED, STEPPED = "training/named/", "training/optimizer/"  # of stages that step by themselves, in names of tensors


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
    kind = StageSnapshots if stage is not None and steps_itself else WorkerSnapshots
    worker.snapshots = session.snapshots = snapshots = kind(worker, steps_itself, write, buffers)
    if source is not None and source.has(WORKER_FILE):
        snapshots.restored = restored = _restored(buffers(), stage, source)
        if steps_itself and restored.training is None and not session.strategy.requires.shared_memory:
            raise BadCheckpoint(source.place, "servers had its optimizer, and here workers have it: it cannot continue")


def _restored(own: Mapping[str, Tensor], stage: StageWorker | None, checkpoint: Checkpoint) -> SavedWorker:
    """Give a worker its buffers; return the rest, which it gets when the strategy makes the optimizer."""
    blocks = checkpoint.manifest.blocks
    try:
        state = SavedWorker(**_worker_state(checkpoint, None if stage is None else stage.submodel.used()))
    except TypeError as error:
        raise BadCheckpoint(checkpoint.place, f"the state of a worker has other parts ({error})") from None
    state.put_buffers(own, stage is None)
    return state._replace(block=blocks[0] if state.training is not None and blocks else None)


def _worker_state(checkpoint: Checkpoint, parameters: Collection[str] | None = None) -> dict[str, Any]:
    """Return what the workers of one replica have written, joined by the names in the model.

    `parameters`: of stages that step by themselves, read only these; None: all.
    """

    def is_wanted(tensor: str) -> bool:
        if parameters is None:
            return True
        if tensor.startswith(NAMED):
            return tensor.removeprefix(NAMED) in parameters
        return not tensor.startswith(STEPPED) or tensor.removeprefix(STEPPED).rpartition("/")[0] in parameters

    names = [file.name for file in checkpoint.manifest.files if file.name.startswith("worker")]
    names.sort(key=lambda name: (name != WORKER_FILE, len(name), name))  # by rank
    first, *others = [checkpoint.state(name, is_wanted) for name in names] or [{"buffers": {}}]
    for other in others:  # of replicas of a stage, the first one counts
        first["buffers"] = other["buffers"] | first["buffers"]
        if "named" in (first.get("training") or {}):
            for what in ("named", "optimizer"):
                first["training"][what] = other["training"][what] | first["training"][what]
    return dict(first)


def load_initial(module: nn.Module, place: str) -> None:
    """Give a module its initial weights: of a safetensors file, or of a checkpoint; "": leave it as it is."""
    if step_of(place.rpartition("/")[2]) is None:
        load_weights(module, place)
    else:
        load_tensors(module, model_of(opened(place)), place)


def model_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the parameters and buffers of a checkpoint, by their names in the model."""
    layout = checkpoint.manifest.layout
    state = _worker_state(checkpoint)
    training = state.get("training")
    if training is not None and "parameters" in training:  # of a custom training loop
        tensors = dict(zip((spec.name for spec in layout.parameters), training["parameters"], strict=True))
        return {**tensors, **dict(zip(state["buffer_names"], training["buffers"], strict=True))}
    if training is not None and "named" in training:  # of stages that step by themselves
        return {**training["named"], **state["buffers"]}
    vectors = training["vectors"] if training is not None else vectors_of(checkpoint, VALUES)
    return {**named_parameters(layout, vectors), **state["buffers"]}


def vectors_of(checkpoint: Checkpoint, part: str) -> list[Tensor]:
    """Return a part of all blocks that servers have written, in vectors like those of the layout.

    Values have the dtype of the model, and optimizer state its own.
    """
    found: dict[int, Tensor] = {}
    layout = checkpoint.manifest.layout.vectors
    for block in checkpoint.manifest.blocks:
        file, name = checkpoint.file(block.file), f"{block.index}/{part}"
        if name in file.entries:
            values, vector = file.tensor(name), layout[block.vector]
            dtype = getattr(torch, vector.dtype) if part == VALUES else values.dtype
            found.setdefault(block.vector, torch.zeros(vector.numel, dtype=dtype))[block.start : block.stop] = values
    return [found.get(number, torch.zeros(vector.numel)) for number, vector in enumerate(layout)]
