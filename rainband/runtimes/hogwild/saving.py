"""Checkpoints of parameters in shared memory: workers pause their updates while these are copied.

A pause lasts as long as the copy. A worker announces each update in its own word before it looks whether updates are
paused; the copy begins when no word announces one, at least a millisecond after the pause was set. So the copied
parameters have exactly the updates that the tables say are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rainband.checkpoints.read import Checkpoint
from rainband.checkpoints.store import Store
from rainband.errors import BadCheckpoint
from rainband.protocol.accounting import NOT_FINITE
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import Message, Saved, TakeSnapshot
from rainband.protocol.saved_state import SavedBlock
from rainband.runtimes.checkpoints.background import Background
from rainband.runtimes.checkpoints.write import FAILURES, write_blocks
from rainband.runtimes.hogwild.memory import SharedParameters
from rainband.server.snapshots import VALUES, BlockSnapshot

if TYPE_CHECKING:
    from rainband.runtimes.hogwild.server import HogwildServer

MODEL = "model"  # of one worker, in the names of tensors
FILE = "memory.safetensors"
PATIENCE_S = 2.0  # with a worker that is in the middle of an update
LOOK_AGAIN_S = 0.001


class MemoryWriter:
    """Writes the shared parameters, beside the thread that serves messages."""

    def __init__(self, server: HogwildServer, store: Store, background: Background) -> None:
        self.server = server
        self.store = store
        self.background = background

    def advance(self, tell: Callable[[Message], None]) -> None:
        """Begin to write the checkpoint that the coordinator requests."""
        wanted, self.server.wanted = self.server.wanted, None
        if wanted is not None:
            self.background.submit(partial(self._write, wanted, tell))

    def _write(self, wanted: TakeSnapshot, tell: Callable[[Message], None]) -> Callable[[], None]:
        try:
            saved = write_blocks(self.store, wanted, FILE, copy_paused(self.server), more=False)
        except FAILURES as error:
            saved = Saved(wanted.number, error=f"{FILE}: {error}")
        return partial(tell, saved)


def copy_paused(server: HogwildServer) -> list[BlockSnapshot]:
    """Copy parameters and tables of one moment; raise OSError if a worker does not come to the end of its update."""
    memory = server.memory
    assert memory is not None, "checkpoints begin when the run has begun"
    memory.paused = True
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            time.sleep(LOOK_AGAIN_S)
            writing = [w for w in memory.writing() if server.left_words.get(w) != memory.word(w)]
            if not writing:
                return _copied(memory, server.blocks, server.applied_before)
            if time.monotonic() > until:
                raise OSError(f"worker {writing[0]} was in the middle of an update for {PATIENCE_S:g} s")
    finally:
        memory.paused = False


def _copied(memory: SharedParameters, blocks: Sequence[BlockSpec], applied_before: int) -> list[BlockSnapshot]:
    numbers = {number: at for at, number in enumerate(sorted({block.vector for block in blocks}))}
    masks = {portion: mask for portion, mask in enumerate(memory.accepted_sets().tolist()) if mask}
    skipped = [(portion, memory.skipped_in(portion)) for portion in masks]
    mean = memory.mean()
    taken = []
    for block in blocks:
        at, part = numbers[block.vector], slice(block.start, block.stop)
        tensors: dict[str, Tensor] = {VALUES: mean[at][part].clone()}
        if len(memory.models) > 1:
            tensors |= {f"{MODEL}/{k}": model[at][part].clone() for k, model in enumerate(memory.models)}
        saved = SavedBlock(
            index=block.index,
            vector=block.vector,
            start=block.start,
            stop=block.stop,
            version=memory.version + applied_before,
            first_open=0,
            open=masks,
            applied=memory.version + applied_before,
            skipped=tuple((portion, NOT_FINITE, mask) for portion, mask in skipped if mask),
            lr_factor=memory.lr_factor,
        )
        taken.append(BlockSnapshot(saved, tensors))
    return taken


@torch.no_grad()
def restore_memory(memory: SharedParameters, blocks: Sequence[BlockSpec], checkpoint: Checkpoint) -> int:
    """Give the memory the state of a checkpoint; return how many batches are in it.

    Each worker gets the model it had; with another number of workers, all begin with the mean.
    """
    numbers = {number: at for at, number in enumerate(sorted({block.vector for block in blocks}))}
    saved: Mapping[tuple[int, int], SavedBlock] = {(b.vector, b.start): b for b in checkpoint.manifest.blocks}
    for block in blocks:
        whole = saved.get((block.vector, block.start))
        if whole is None or whole.stop != block.stop:
            raise BadCheckpoint(checkpoint.place, f"it has no values for block {block.index}")
        file = checkpoint.file(whole.file)
        models = [name for name in file.entries if name.startswith(f"{whole.index}/{MODEL}/")]
        each = len(models) == len(memory.models) > 1
        for k, model in enumerate(memory.models):
            values = file.tensor(f"{whole.index}/{MODEL}/{k}" if each else f"{whole.index}/{VALUES}")
            model[numbers[block.vector]][block.start : block.stop] = values
    first = checkpoint.manifest.blocks[0]
    accepted = first.accepted_set(memory.plan)
    skipped = {portion: mask for portion, _, mask in first.skipped}
    last = max((*accepted.open, accepted.first_open - 1), default=-1)
    for portion in range(last + 1):
        memory.restore(portion, accepted.of(portion), skipped.get(portion, 0))
    memory.lower(first.lr_factor)
    return first.applied
