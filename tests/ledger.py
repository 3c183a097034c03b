"""The parameters as a ledger: the expected results of a run, derived from its plan alone.

Each block has one element per batch of the run, and the gradient of batch i is zero but for element i, whatever the
parameters are. So the elements count how often each batch reached each block, to the last bit, without push IDs
or batch accounting. Every version that a round may read is known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rainband.protocol.data_plan import DataPlan, bits
from rainband.protocol.layout import BlockSpec, Layout
from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.rules.rounds import TOO_LATE
from rainband.server.block import Block
from rainband.strategy import Strategy

LR = 0.5
AMOUNT = 840  # divisible by every number of samples that a round has here, 1 to 8, so that means stay exact
ELEMENTS = 64  # of a block: one per batch


class Wrong(AssertionError):
    """The run broke a promise."""


@dataclass(frozen=True)
class Case:
    """The size of a run, its strategy, and which of its batches are odd."""

    strategy: Strategy
    num_workers: int = 2
    num_servers: int = 1
    dtypes: tuple[str, ...] = ("float32",)  # one vector each, cut into one block per server
    num_samples: int = 16
    batch_size: int = 2
    epochs: int = 1
    portion_batches: int = 0  # 0: as the coordinator chooses
    direct: bool = False  # the servers' parameters are read in place, as in shared memory
    not_finite: frozenset[int] = frozenset()  # batches whose gradient is not finite
    absent: frozenset[tuple[int, int]] = frozenset()  # (batch, parameter) without a gradient

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_samples // self.batch_size)

    @property
    def num_batches(self) -> int:
        return self.batches_per_epoch * self.epochs

    @property
    def num_blocks(self) -> int:
        return len(self.dtypes) * self.num_servers

    @property
    def rounds(self) -> bool:
        return self.strategy.requires.waits == "rounds"


class Ledger:
    """The expected parameters, derived from the plan alone."""

    def __init__(self, case: Case) -> None:
        self.case = case
        assert case.num_batches <= ELEMENTS, "one element per batch"

    def amount(self, block: int, batch: int) -> float:
        """Return the value that one application of a batch adds to its element, before the learning rate."""
        if batch in self.case.not_finite or (batch, block) in self.case.absent:
            return 0.0
        return float(AMOUNT << block % 4)  # neighbours differ, so a block in the wrong place shows

    def first(self, block: int) -> Tensor:
        return torch.full((ELEMENTS,), float(block + 1), dtype=torch.float64)

    def samples(self, batch: int) -> int:
        inside = batch % self.case.batches_per_epoch
        return min(self.case.batch_size, self.case.num_samples - inside * self.case.batch_size)

    def after(self, block: int, batches: Collection[int]) -> Tensor:
        """After these batches have been applied once each, in whatever order."""
        values = self.first(block)
        for batch in batches:
            values[batch] -= LR * self.amount(block, batch)
        return values

    def versions(self, block: int, items_per_round: int, without: Collection[int] = ()) -> list[Tensor]:
        """Return every version of a block, in rounds, from the first values to the last, without dropped work items."""
        values = self.first(block)
        versions = [values.clone()]
        for work_items in self.rounds(items_per_round):
            counted = [b for b in work_items if b not in without]
            num_samples = sum(self.samples(b) for b in counted if b not in self.case.not_finite)
            for batch in counted:
                weight = self.samples(batch) / num_samples if num_samples else 0.0
                values[batch] -= LR * self.amount(block, batch) * weight
            versions.append(values.clone())
        return versions

    def rounds(self, items_per_round: int) -> list[range]:
        per_epoch = self.case.batches_per_epoch
        starts = [(e, at) for e in range(self.case.epochs) for at in range(0, per_epoch, items_per_round)]
        return [range(e * per_epoch + at, e * per_epoch + min(at + items_per_round, per_epoch)) for e, at in starts]

    def describe(self, block: int, found: Tensor, wanted: Tensor) -> str:
        """Name the batches whose elements are not what they must be."""
        lines = []
        for at in (found.double() != wanted.double()).nonzero().flatten().tolist():
            start, amount = self.first(block)[at], self.amount(block, at) or math.nan
            times = (start - found[at].double()) / (LR * amount)
            lines.append(
                f"batch {at} on block {block} counts {times:g} times, not {(start - wanted[at]) / (LR * amount):g}"
            )
        return "; ".join(lines)


class CountingOptimizer:
    """Plain SGD over a block's segments; it stands in for torch's where thousands of runs are made."""

    single_pass = True

    def __init__(
        self, spec: OptimizerSpec, block: BlockSpec, values: Tensor, groups: Sequence[Mapping[str, object]]
    ) -> None:
        assert spec.name == "sgd"
        self.lr = float(spec.settings["lr"])  # type: ignore[arg-type]
        self.segments = [(s.parameter, values[s.start : s.stop], s.start, s.stop) for s in block.segments]

    def groups(self) -> tuple[dict[str, object], ...]:
        return ()

    def step(self, gradient: Tensor, absent: Collection[int] = (), lr_scale: float = 1.0) -> None:
        for parameter, values, start, stop in self.segments:
            if parameter not in absent:
                values.sub_(gradient[start:stop], alpha=self.lr * lr_scale)


class Memory:
    """A worker's parameters: what a client uses of the flat vector."""

    def __init__(self, layout: Layout, ledger: Ledger) -> None:
        self.layout = layout
        self.vectors = [torch.zeros(v.numel, dtype=getattr(torch, v.dtype)) for v in layout.vectors]
        self.parameters = [self.vectors[p.vector][p.start : p.start + p.numel] for p in layout.parameters]
        for index, parameter in enumerate(self.parameters):
            parameter.copy_(ledger.first(index))

    def view(self, block: BlockSpec) -> Tensor:
        return self.vectors[block.vector][block.start : block.stop]

    def absent(self, block: BlockSpec, tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
        return tuple(s.parameter for s in block.segments if tensors[s.parameter] is None)

    def write(self, block: BlockSpec, tensors: Sequence[Tensor | None], out: Tensor) -> None:
        if len(out) != block.numel:
            present = [s for s in block.segments if tensors[s.parameter] is not None]
            pieces = [tensors[s.parameter][s.offset : s.offset + s.numel] for s in present]  # type: ignore[index]
            out.copy_(torch.cat(pieces) if pieces else out)
            return
        out.zero_()
        for s in block.segments:
            tensor = tensors[s.parameter]
            if tensor is not None:
                out[s.start : s.stop] = tensor[s.offset : s.offset + s.numel]

    def add_(self, tensors: Sequence[Tensor | None], alpha: float) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            if tensor is not None:
                parameter.add_(tensor, alpha=alpha)


def check_block(ledger: Ledger, index: int, block: Block) -> None:
    """The parameters of a block are what its marks say, to the last bit: each batch once, nothing else."""
    plan, not_finite = block.plan, ledger.case.not_finite
    if not block.loaded and not block.accounting.accepted_set.count:
        return  # the run was stopped before it had begun
    accepted = {
        number_of(plan, p, k) for p in range(plan.num_portions) for k in bits(block.accounting.accepted_set.of(p))
    }
    skipped = {number_of(plan, p, k) for (p, _), mask in block.accounting.skipped.items() for k in bits(mask)}
    if skipped & accepted != skipped or not_finite & accepted - skipped:
        raise Wrong(f"block {index} skipped {skipped} of {accepted}; not finite are {set(not_finite)}")
    if plan.items_per_round:
        reasons = {
            number_of(plan, p, k): reason for (p, reason), mask in block.accounting.skipped.items() for k in bits(mask)
        }
        late = [number for number, reason in reasons.items() if reason == TOO_LATE]
        wanted = ledger.versions(index, plan.items_per_round, late)[block.version]
    else:
        wanted = ledger.after(index, accepted - skipped)
    if not torch.equal(block.values, wanted.to(block.values.dtype)):
        raise Wrong(ledger.describe(index, block.values, wanted))


def number_of(plan: DataPlan, portion: int, k: int) -> int:
    """The number of a batch in the whole run."""
    return plan.epoch_of(portion) * plan.batches_per_epoch + plan.number(portion, k)
