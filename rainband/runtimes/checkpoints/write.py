"""Writes the parts of a checkpoint: blocks of a server, state of a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import safetensors

from rainband.checkpoints import commit
from rainband.checkpoints.store import Store
from rainband.checkpoints.write import write_file, write_tensors
from rainband.protocol.messages import Message, Saved, TakeSnapshot
from rainband.protocol.saved_state import SavedBlock
from rainband.runtimes.checkpoints.background import Background
from rainband.runtimes.checkpoints.place import WORKER_FILE
from rainband.server.server import Server
from rainband.server.snapshots import BlockSnapshot

FILE_BYTES = 64 << 20  # of the blocks in one file: so much memory is needed twice while a server writes
FAILURES = (OSError, ValueError, safetensors.SafetensorError)
Tell = Callable[[Message], None]


class ServerWriter:
    """Writes the blocks of one server, some at a time, while the server goes on."""

    def __init__(self, name: str, server: Server, store: Callable[[], Store], background: Background) -> None:
        """`name` is that of its files."""
        self.name = name
        self.server = server
        self.store = store
        self.background = background
        self.number = -1  # of the checkpoint under way
        self.files = 0

    def advance(self, tell: Tell) -> None:
        """Copy and write the next blocks, if there is room in memory; report what is written. Call it regularly."""
        self.background.settle()
        snapshots = self.server.snapshots
        while (current := snapshots.current) is not None and self.background.pending < 2:
            if current.number != self.number:
                self.number, self.files = current.number, 0
            taken = snapshots.take(FILE_BYTES)
            complete = snapshots.is_complete
            if not taken and not complete:
                return  # blocks that have not reached the version
            name = f"{self.name}-{self.files:04}.safetensors"
            self.files += 1
            if complete:
                snapshots.cancel()
            self.background.submit(partial(self._write, current, name, taken, complete, tell))

    def _write(
        self, snapshot: TakeSnapshot, name: str, blocks: Sequence[BlockSnapshot], complete: bool, tell: Tell
    ) -> Callable[[], None]:
        try:
            saved = write_blocks(self.store(), snapshot, name, blocks, more=not complete)
        except FAILURES as error:
            saved = Saved(snapshot.number, error=f"{name}: {error}")
        return partial(tell, saved)


def write_blocks(store: Store, snapshot: TakeSnapshot, name: str, blocks: Sequence[BlockSnapshot], more: bool) -> Saved:
    """Write one file with some blocks of a server."""
    if not blocks:
        return Saved(snapshot.number, more=more)
    folder = commit.begin(store, snapshot.folder)
    tensors = {f"{b.saved.index}/{part}": tensor for b in blocks for part, tensor in b.tensors.items()}
    file = write_tensors(store, folder, name, tensors)
    saved = tuple(msgspec.structs.replace(block.saved, file=name) for block in blocks)
    return Saved(snapshot.number, (file,), saved, more=more)


def write_worker(
    store: Store,
    snapshot: TakeSnapshot,
    state: object,
    block: SavedBlock | None,
    step: int = 0,
    name: str = WORKER_FILE,
) -> Saved:
    """Write the state of a worker; return what to report. `step`: batches in it, if there is no block."""
    try:
        folder = commit.begin(store, snapshot.folder)
        file = write_file(store, folder, name, state)
    except FAILURES as error:
        return Saved(snapshot.number, error=f"{name}: {error}")
    blocks = () if block is None else (msgspec.structs.replace(block, file=file.name),)
    return Saved(snapshot.number, (file,), blocks, step)
