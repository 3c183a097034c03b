"""Copies of a server's blocks for a checkpoint: each is taken between two messages, so it is of one moment.

The vectors of full-batch strategies are not copied, but lent: a command copies one before it changes it.
Of an asynchronous run, each block may be copied at another moment: what it has accepted is copied with it. In rounds,
all blocks are copied at one version, each as soon as it has it. Training goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from rainband.protocol.accepted_set import AcceptedSet
from rainband.protocol.saved_state import SavedBlock

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.messages import TakeSnapshot
    from rainband.server.block import Block

VALUES, OPTIMIZER, RULE, VECTOR = "values", "optimizer", "rule", "vector"  # the parts of a block, in names of tensors


class BlockSnapshot(NamedTuple):
    """One block as it was at one moment."""

    saved: SavedBlock
    tensors: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Snapshots:
    """The blocks of one server that are still to be copied for a checkpoint, and the copies that were not taken yet."""

    def __init__(self, blocks: Mapping[int, Block]) -> None:
        self.blocks = blocks
        self.current: TakeSnapshot | None = None
        self.left: dict[int, None] = {}  # blocks that are not copied yet
        self.copied: list[BlockSnapshot] = []  # in rounds: at their version

    def begin(self, snapshot: TakeSnapshot) -> int | None:
        """Begin to copy; return the version of a block that has passed the wanted one, or None."""
        self.current, self.left, self.copied = snapshot, dict.fromkeys(self.blocks), []
        newest = max((block.version for block in self.blocks.values()), default=0)
        if 0 <= snapshot.at_version < newest:
            self.cancel()
            return newest
        if snapshot.at_once:
            self.copied, self.left = [snapshot_of(block) for block in self.blocks.values()], {}
        for block in self.blocks.values():
            self.changed(block)
        return None

    def cancel(self) -> None:
        self.current, self.left, self.copied = None, {}, []

    def changed(self, block: Block) -> None:
        """Copy a block if it has just reached the version that is wanted."""
        if self.current is not None and block.version == self.current.at_version and block.index in self.left:
            del self.left[block.index]
            self.copied.append(snapshot_of(block))

    def take(self, max_bytes: int) -> list[BlockSnapshot]:
        """Return some more copies, about this many bytes."""
        taken: list[BlockSnapshot] = []
        num_bytes = 0
        while num_bytes < max_bytes and (more := self._next()) is not None:
            taken.append(more)
            num_bytes += more.num_bytes
        return taken

    def _next(self) -> BlockSnapshot | None:
        if self.copied:
            return self.copied.pop(0)
        if self.current is None or self.current.at_version >= 0 or not self.left:
            return None
        index = next(iter(self.left))
        del self.left[index]
        return snapshot_of(self.blocks[index])

    @property
    def is_complete(self) -> bool:
        """True if every block was copied and taken."""
        return self.current is not None and not self.left and not self.copied


def snapshot_of(block: Block) -> BlockSnapshot:
    """Copy a block. Batches whose gradients are only buffered count as not accepted: they are computed again."""
    accounting, parameters = block.accounting, block.parameters
    accepted = AcceptedSet.of_portions(block.plan, accounting.accepted_set.first_open, accounting.accepted_set.open)
    skipped = dict(accounting.skipped)
    for push in block.rule.waiting_pushes():
        accepted.remove(push.push_id)
        for r in push.push_id if push.skip else ():
            skipped[r.portion, push.skip] = skipped.get((r.portion, push.skip), 0) & ~r.mask
    optimizer, numbers, absent = parameters.saved_state()
    tensors = {VALUES: block.values.clone()}
    tensors |= {f"{OPTIMIZER}/{name}": values for name, values in optimizer.items()}
    tensors |= {f"{VECTOR}/{name}": values for name, values in parameters.vectors.lend().items()}
    rule: dict[str, float] = {}
    for name, value in block.rule.state().items():
        if isinstance(value, torch.Tensor):
            tensors[f"{RULE}/{name}"] = value.clone()
        else:
            rule[name] = value
    saved = SavedBlock(
        index=block.index,
        vector=block.spec.vector,
        start=block.spec.start,
        stop=block.spec.stop,
        version=block.version,
        first_open=accepted.first_open,
        open=accepted.open,
        applied=accounting.applied,
        applied_untracked=accounting.applied_untracked,
        skipped=tuple((portion, reason, mask) for (portion, reason), mask in skipped.items() if mask),
        lr_factor=parameters.lr_factor,
        numbers=numbers,
        absent=absent,
        rule=rule,
    )
    return BlockSnapshot(saved, tensors)


def restore(block: Block, saved: SavedBlock, tensors: Mapping[str, Tensor]) -> None:
    """Give a block the state of a snapshot, with the tensors of its elements; ValueError if they do not fit."""
    of: dict[str, dict[str, Tensor]] = {OPTIMIZER: {}, RULE: {}, VECTOR: {}}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind in of:
            of[kind][rest] = tensor
    block.parameters.restore(tensors[VALUES], of[OPTIMIZER], saved)
    for name, tensor in of[VECTOR].items():
        block.parameters.vectors.named[name] = tensor.clone()
    block.accounting.restore(saved)
    block.rule.state({**saved.rule, **of[RULE]})
    block.version = saved.version
    block.parameters.publish_all()
    block.buffer.begin_at(saved.version)
    block.loaded = True
