"""An independent record of a simulated run: every update of every block, and the parameters of every gradient.

It uses neither the accepted sets nor the batch accounting of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rainband.observer import Observer
from rainband.rules import Compensated
from rainband.runtimes.simulation.oracle.scenarios import STRENGTH, CaseSetup

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.model.gradient import Gradient
    from rainband.protocol.messages import Push
    from rainband.rounds.exchange import RoundId
    from rainband.server.block import Block
    from rainband.server.server import Server
    from rainband.strategy import Batch
    from rainband.worker.worker import ModuleWorker


@dataclass(frozen=True)
class LedgerUpdate:
    """One step of a block's optimizer."""

    batches: frozenset[tuple[int, int]]  # (portion, k)
    divisor: int  # of the sum of their gradients


class Ledger(Observer):
    """Counts the batches that reach the optimizer of each block, and stores all versions of the block."""

    def __init__(self, setup: CaseSetup) -> None:
        self.setup = setup
        self.blocks: dict[int, Block] = {}
        self.versions: dict[tuple[int, int], Tensor] = {}  # (block, version) -> its values, once there is a newer one
        self.violations: list[str] = []
        self.applied: dict[int, Counter[tuple[int, int]]] = {}  # block -> batch -> times
        self.updates: dict[int, list[LedgerUpdate]] = {}  # by block
        self.means: dict[tuple[RoundId, Batch], Tensor] = {}  # of batches that workers share

    def assigned(self, server: Server) -> None:
        self.blocks |= server.blocks
        for block in server.blocks.values():
            self.applied[block.index], self.updates[block.index] = Counter(), []

    def applying(self, block: Block, gradient: Tensor | None, pushes: Sequence[Push]) -> None:
        if gradient is not None:
            batches = [(r.portion, k) for p in pushes if not p.skip for r in p.push_id for k in range(r.first, r.last)]
            self.applied[block.index].update(batches)
            divisor = block.rule.gradients_per_update or len(batches)  # of a mean over this many gradients
            self.updates[block.index].append(LedgerUpdate(frozenset(batches), divisor))
            if isinstance(block.rule, Compensated):
                self._check_correction(block, block.rule, gradient, pushes[0])
        self._keep(block)

    def _keep(self, block: Block) -> None:
        """Store the values of a block that is about to change."""
        self.versions[block.index, block.version] = block.buffer.at(block.version).clone()

    def gradient(self, block: Block, batch: tuple[int, int]) -> Tensor:
        """Return a block's part of the gradient of a batch that was computed."""
        return self.setup.gradients[block.plan.number(*batch)][block.spec.start : block.spec.stop]

    def _check_correction(self, block: Block, rule: Compensated, gradient: Tensor, push: Push) -> None:
        """Check that the gradient was corrected by the change since the version that it was computed at.

        The server does not know the version any more if the worker was declared lost.
        """
        plain = self.gradient(block, (push.push_id[0].portion, push.push_id[0].first))
        size, expected = plain.numel(), plain
        if push.version != block.version and push.version in rule.given.get(push.worker, {}):
            change = block.values[:size] - self.versions[block.index, push.version][:size]
            expected = plain + STRENGTH * plain * plain * change
        if not torch.allclose(gradient[:size], expected, rtol=1e-5, atol=1e-3):
            self.violations.append(f"block {block.index}: a gradient at version {push.version} has a wrong correction")

    def averaged(self, worker: ModuleWorker, where: RoundId, gradient: Gradient) -> None:
        """Check that all members have the same mean of a round, and that it is the gradient of the whole batch."""
        (batch,), (tensor,) = gradient.batches, gradient.tensors
        assert tensor is not None
        size = worker.plan.samples_in(batch.portion, batch.k)
        if gradient.samples != size:
            self.violations.append(f"the mean of round {where.batch} is that of {gradient.samples} samples, not {size}")
        if not torch.equal(self.means.setdefault((where, batch), tensor.clone()), tensor):
            self.violations.append(f"worker {worker.rank} has another mean of round {where.batch} than others")
        if not torch.allclose(tensor[0], self.setup.gradient(worker, batch), rtol=1e-5):
            self.violations.append(f"the mean of round {where.batch} is not the gradient of its batch")

    def computing(self, worker: ModuleWorker, batch: Batch) -> None:
        """Check that the worker's parameters are those of the versions that it read."""
        if worker.rounds is not None:
            return  # it reads nothing: see `averaged`
        client, plan, exactly = worker.client, worker.plan, -1
        if plan.items_per_round:
            exactly = plan.round_of(batch.portion, batch.k)
        elif plan.coordinated:
            exactly = batch.lease  # the evaluation for which its work item was handed out
        for index, version in enumerate(client.pulls.versions):
            block = self.blocks[index]
            true = block.buffer.at(version) if version == block.version else self.versions.get((index, version))
            if true is None or not torch.equal(client.servers.views[index], true):
                self.violations.append(
                    f"the parameters of worker {worker.rank} are not those of version {version} of block {index}"
                )
            if exactly not in (-1, version):
                self.violations.append(
                    f"worker {worker.rank} computes at version {version} of block {index}, not {exactly}"
                )
