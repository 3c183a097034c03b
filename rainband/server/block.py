"""A block: a slice of the parameters that is updated and read as one unit.

Blocks share nothing, so each can be copied, saved, restored and moved by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from rainband.protocol.data_plan import DataPlan, PushId
from rainband.protocol.messages import AdjustRule, Flush, Forget
from rainband.server.block_accounting import BlockAccounting
from rainband.server.block_parameters import BlockParameters

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.observer import Observer
    from rainband.protocol.layout import BlockSpec
    from rainband.protocol.messages import InitBlock, Peer, Pull, Push, RuleChange, Tally
    from rainband.protocol.parameter_buffers import ParameterBuffer
    from rainband.protocol.vectors import Operation
    from rainband.rules.rule import Rule
    from rainband.strategy import ServerPart

log = logging.getLogger("rainband")


class Block:
    """One block on its server: parameters, update rule, batch accounting, version, and the readers that wait."""

    def __init__(
        self,
        spec: BlockSpec,
        buffer: ParameterBuffer,
        plan: DataPlan,
        server_part: ServerPart,
        groups: Sequence[dict[str, object]],
        observer: Observer | None = None,
        staleness: dict[int, dict[int, int]] | None = None,
    ) -> None:
        """`staleness`: of the gradients of all blocks, see `BlockAccounting`."""
        self.spec = spec
        self.index, self.num_bytes = spec.index, spec.num_bytes
        self.buffer = buffer
        self.plan = plan
        self.observer = observer
        self.rule: Rule = server_part.rule()
        self.clocked, self.keeps_reads = self.rule.clocked, self.rule.keeps_reads  # read for every push and pull
        self.schedule = None if server_part.schedule.is_constant else server_part.schedule
        self.parameters = BlockParameters(spec, buffer, server_part, groups)
        self.values = self.parameters.values  # in the precision in which they are kept
        self.accounting = BlockAccounting(plan, staleness)
        self.version = 0
        self.warned_of_rates = False
        self.loaded = False
        self.waiting: dict[Peer, Pull] = {}  # readers that are not admitted yet, longest first

    def load(self, load: InitBlock, values: Tensor) -> None:
        """Take the first values, or one part of the first optimizer state, which is sent before the values."""
        self.parameters.load(load, values)
        self.loaded = self.loaded or not load.part

    def replan(self, plan: DataPlan) -> None:
        """Use another data plan; nothing was accepted yet, or it is the one of a checkpoint, of another length."""
        self.plan = plan
        if self.accounting.accepted_set.count:
            self.accounting.replan(plan)
        else:
            self.accounting = BlockAccounting(plan, self.accounting.staleness)

    def change_rule(self, message: RuleChange) -> None:
        match message:
            case Flush():
                self.rule.flush(self)
            case Forget():
                self.rule.forget(self, message.worker)
            case AdjustRule():
                self.parameters.lr_factor *= message.lr_factor
                if message.bound is not None:
                    self.rule.retune(message.bound)

    # ---- what a rule calls -----------------------------------------------------------------------------------------

    def apply(self, gradient: Tensor, pushes: Sequence[Push], absent: Collection[int]) -> None:
        if self.observer is not None:
            self.observer.applying(self, gradient, pushes)
        self.accounting.count(pushes, self.version)
        lr_scale = 1.0 if self.schedule is None else self.schedule.scale(self._progress(pushes[0]))
        sender = pushes[0]
        if sender.skip:  # a skip brings no settings
            sender = next((push for push in pushes if not push.skip), sender)
        if self.index == 0 and len(pushes) > 1 and not self.warned_of_rates:  # the first block, so once in a run
            self._warn_of_rates(pushes, sender.worker)
        self.parameters.step(gradient, absent, lr_scale, sender.worker, self.version + 1)
        self.version += 1

    def apply_residual(self, gradient: Tensor | None, push: Push) -> None:
        """Apply what a worker's codec has kept of earlier gradients: it counts no batch, and makes no new version."""
        if gradient is None:
            return
        if self.observer is not None:
            self.observer.applying(self, gradient, (push,))
        # In a mean of several gradients, one of them is this fraction.
        mean_of = self.plan.items_per_round or self.rule.gradients_per_update or 1
        lr_scale = 1.0 if self.schedule is None else self.schedule.scale(self._progress(push))
        self.parameters.step(
            gradient / mean_of if mean_of > 1 else gradient, push.absent, lr_scale, push.worker, self.version
        )

    def _warn_of_rates(self, pushes: Sequence[Push], used: int) -> None:
        """Say so if an update uses one worker's optimizer settings for gradients of others with different settings."""
        rates = self.parameters.differing_rates(sorted({push.worker for push in pushes if not push.skip}))
        if not rates:
            return
        self.warned_of_rates = True
        told = ", ".join(f"worker {worker} lr={_in_short(lrs)}" for worker, lrs in rates.items())
        log.warning(
            "workers whose gradients are averaged have different optimizer settings (%s): this update uses those of "
            "worker %d, and later ones those of their first batch's worker. Set the learning rate by the epoch or by "
            "run.progress, the same on all workers, not by a worker's own count of batches or its own loss.",
            told,
            used,
        )

    def advance(self, pushes: Sequence[Push]) -> None:
        self.parameters.publish(self.version + 1)
        self.version += 1

    def accumulate(self, gradient: Tensor, push: Push) -> None:
        self.accounting.count([push], self.version)
        self.parameters.vectors.add(gradient)

    def drop(self, names: Sequence[PushId], reason: str) -> None:
        self.accounting.drop(names, reason)

    def _progress(self, push: Push) -> float:
        """Return the fraction of the training at which a push was computed."""
        if push.push_id:
            return self.plan.progress(push.push_id[0].portion, push.push_id[0].first)
        return min(1.0, self.accounting.accepted_set.count / self.plan.num_batches)

    def compute(self, operations: Sequence[Operation], new_version: bool) -> list[float]:
        """Do vector operations; with `new_version` readers see all changes of the parameters at once."""
        if new_version and self.observer is not None:
            self.observer.applying(self, None, ())
        with self.parameters.changing(self.version + 1) if new_version else nullcontext():
            results = [self.parameters.vectors.run(operation) for operation in operations]
        self.version += new_version
        return [result for result in results if result is not None]

    def begin_evaluation(self) -> None:
        self.accounting.begin_evaluation(self.plan)

    def tally(self) -> Tally:
        return self.accounting.tally(self.rule.buffered)


def _in_short(rates: Sequence[object]) -> str:
    return ", ".join(dict.fromkeys(f"{rate:g}" if isinstance(rate, float) else str(rate) for rate in rates))
