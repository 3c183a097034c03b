"""The descriptions of files and blocks in checkpoints, which the nodes report to the coordinator."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from rainband.protocol.accepted_set import AcceptedSet
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.layout import Layout

NAME = re.compile(r"step-(\d{10,})")


def name_of(step: int) -> str:
    """Return the folder of the checkpoint of a step; their names sort like their steps."""
    return f"step-{step:010d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder; None for any other name."""
    match = NAME.fullmatch(name)
    return None if match is None else int(match[1])


class SavedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a checkpoint. Its header has the hashes of its tensors."""

    name: str
    num_bytes: int
    header_hash: str


class SavedBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A block in a checkpoint: where its values are, and which batches are in them."""

    index: int = 0  # a worker has one block, without elements, for what it has accepted
    vector: int = 0
    start: int = 0
    stop: int = 0
    file: str = ""
    version: int
    first_open: int  # every portion below is accepted
    open: dict[int, int] = {}  # portion -> mask of the accepted batches
    applied: int = 0
    applied_untracked: int = 0
    skipped: tuple[tuple[int, str, int], ...] = ()  # portion, reason, mask
    lr_factor: float = 1.0
    numbers: dict[str, dict[int, float]] = {}  # optimizer state that is one number per parameter
    absent: dict[str, tuple[int, ...]] = {}  # kind of optimizer state -> parameters that have none
    rule: dict[str, float] = {}  # numbers of the update rule

    def accepted_set(self, plan: DataPlan) -> AcceptedSet:
        return AcceptedSet.of_portions(plan, self.first_open, self.open)


def begun_epochs(plan: DataPlan, step: int, blocks: Iterable[SavedBlock]) -> int:
    """Return the epochs of which a checkpoint has batches: a run that continues from it has no fewer."""
    last = max((max((*block.open, block.first_open - 1)) for block in blocks), default=-1)
    return max(-(-step // plan.batches_per_epoch), plan.epoch_of(last) + 1)


class SavedCommands(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last command of a full-batch strategy that a checkpoint contains."""

    number: int  # of the last command that the blocks have executed
    version: int  # of every block
    evaluates: bool  # that command began an evaluation, which was not complete
    file: str = ""  # with the results of all commands that were complete


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint from which a run continues."""

    place: str  # path or URL of the checkpoint
    step: int
    plan: DataPlan
    layout: Layout
    num_replicas: int
    blocks: tuple[SavedBlock, ...] = ()
    samples: int = 0  # that were processed until then
    results: bytes = b""  # of the commands of a full-batch strategy
    force: bool = False  # also with other data
