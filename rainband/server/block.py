"""All that one block remembers: parameters, optimizer state, the rule with its buffer and clocks, version and marks.

Blocks share nothing, so one can be copied, saved, restored and moved by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from rainband.model.block_optimizer import BlockOptimizer
from rainband.model.optimizer_state import by_segment
from rainband.protocol.data_plan import AcceptedSet, DataPlan, PushId, num_batches
from rainband.protocol.messages import Missed, Tally
from rainband.protocol.parameter_buffers import ParameterBuffer
from rainband.protocol.vectors import Vectors

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.observer import Observer
    from rainband.protocol.layout import BlockSpec
    from rainband.protocol.messages import InitBlock, Peer, Pull, Push, StalenessLimit
    from rainband.protocol.vectors import Operation
    from rainband.rules.rule import Rule
    from rainband.strategy import ServerPart

FULL_PRECISION = (torch.float32, torch.float64)


class Block:
    """One block on its server."""

    def __init__(
        self,
        spec: BlockSpec,
        buffer: ParameterBuffer,
        plan: DataPlan,
        server_part: ServerPart,
        groups: Sequence[dict[str, object]],
        observer: Observer | None = None,
    ) -> None:
        self.spec = spec
        self.observer = observer
        self.index, self.part, self.numel, self.num_bytes = spec.index, spec.part, spec.numel, spec.num_bytes
        self.buffer = buffer
        self.plan = plan
        self.rule: Rule = server_part.rule()
        self.clocked, self.keeps_reads = self.rule.clocked, self.rule.keeps_reads  # asked for every push and pull
        self.schedule = server_part.schedule
        self.is_constant = server_part.schedule.is_constant
        self.lr_factor = 1.0  # of the divergence guard
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        # Sixteen-bit parameters are kept in float32: small steps would otherwise round to nothing.
        self.master_dtype = self.dtype if self.dtype in FULL_PRECISION else torch.float32
        self.values: Tensor = buffer.at(0)
        self.optimizer = (
            BlockOptimizer(server_part.optimizer, spec, self.values, groups) if self._can_update_in_buffer() else None
        )
        if self.optimizer is None or not self.optimizer.single_pass:
            # Readers may look at the published memory at any time, so it only ever goes from one value to the next.
            self.values = torch.zeros(spec.numel, dtype=self.master_dtype)
            self.optimizer = BlockOptimizer(server_part.optimizer, spec, self.values, groups)
        self.version = 0
        self.loaded = False
        self.accepted_set = AcceptedSet(plan)
        self.untracked_pushes: dict[
            tuple[int, int], int
        ] = {}  # (worker, incarnation) -> last sequence, for pushes without name
        self.waiting: dict[Peer, Pull] = {}  # readers that are not admitted yet, longest first
        self.applied = 0  # batches that reached the optimizer; counted here, apart from the marks, to check them
        self.skipped: dict[tuple[int, str], int] = {}  # (portion, reason) -> mask
        self.staleness: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))  # worker -> missed -> times
        self.num_pushes = self.total_missed = self.most_missed = 0  # of all workers together
        self.dropped: list[PushId] = []  # since the server has looked last
        self.num_extras = 0  # pushes without name that reached the optimizer
        self.first_state: dict[str, tuple[Tensor, tuple[int, ...]]] = {}  # parts that came before the values
        self.groups_of: dict[
            int, tuple[dict[str, object], ...]
        ] = {}  # worker -> its optimizer settings, if it sends any
        self.groups: tuple[dict[str, object], ...] = ()  # the optimizer has these now
        self.vectors = Vectors(self.values, spec.segments)  # where the coordinator leads; otherwise only the parameters
        self.accepted_before = self.skipped_before = 0  # batches, in evaluations that are over

    def _can_update_in_buffer(self) -> bool:
        return len(self.buffer.tensors) == 1 and self.dtype in FULL_PRECISION

    def load(self, load: InitBlock, values: Tensor) -> None:
        """Take the first values, or before them the first state of the optimizer, part by part."""
        if load.part:
            self.first_state[load.part] = values.clone(), load.absent
            return
        self.values.copy_(values)
        for buffer in self.buffer.tensors:
            if buffer is not self.values:
                buffer.copy_(values)
        if self.first_state or load.numbers:
            assert self.optimizer is not None
            self.optimizer.load_state(by_segment(self.spec.segments, self.first_state, load.numbers))
            self.first_state = {}
        self.loaded = True

    def replan(self, plan: DataPlan) -> None:
        """The data became known after the blocks were made: nothing is marked yet."""
        self.plan, self.accepted_set = plan, AcceptedSet(plan)

    def take_groups(self, worker: int, groups: tuple[dict[str, object], ...]) -> str:
        """A worker's optimizer has other settings from now on; says what is wrong with them, or nothing."""
        assert self.optimizer is not None
        try:
            self.optimizer.update_groups(groups)
        except (ValueError, TypeError) as error:
            return str(error)
        self.groups_of[worker] = self.groups = groups
        return ""

    def apply(self, gradient: Tensor, pushes: Sequence[Push], absent: Collection[int]) -> None:
        if self.observer is not None:
            self.observer.applying(self, gradient, pushes)
        self._count(pushes)
        if self.groups_of:
            self._use_groups_of(pushes[0].worker)
        scale = self.lr_factor
        if not self.is_constant:
            scale *= self.schedule.scale(self._position(pushes[0]))
        assert self.optimizer is not None
        if self.values is self.buffer.tensors[0]:
            self.buffer.begin_write()
            self.optimizer.step(gradient, absent, scale)
            self.buffer.end_write()
        else:
            self.optimizer.step(gradient, absent, scale)
            self._publish()
        self.version += 1

    def _use_groups_of(self, worker: int) -> None:
        """A push is applied with its own sender's learning rate, whoever pushed before it."""
        groups = self.groups_of.get(worker, self.groups)
        if groups is not self.groups and groups != self.groups:
            self.take_groups(worker, groups)

    def advance(self, pushes: Sequence[Push]) -> None:
        self._publish()
        self.version += 1

    def compute(self, operations: Sequence[Operation], renewed: bool) -> list[float]:
        """Do a command's operations; `renewed`: with them the parameters are a new version, at once for all readers."""
        if renewed and self.observer is not None:
            self.observer.applying(self, None, ())
        in_place = self.values is self.buffer.tensors[0]
        if renewed and in_place:
            self.buffer.begin_write()
        results = [self.vectors.run(operation) for operation in operations]
        if renewed and in_place:
            self.buffer.end_write()
        elif renewed:
            self._publish()
        self.version += renewed
        return [result for result in results if result is not None]

    def begin_evaluation(self) -> None:
        """The cells of the one before are over: the same ones may come again."""
        self.accepted_before += self.accepted_set.count
        self.skipped_before += sum(mask.bit_count() for mask in self.skipped.values())
        self.accepted_set, self.skipped = AcceptedSet(self.plan), {}

    def accumulate(self, gradient: Tensor, push: Push) -> None:
        self._count([push])
        self.vectors.add(gradient)

    def _publish(self) -> None:
        self.buffer.begin_write()
        self.buffer.at(self.version + 1).copy_(self.values)
        self.buffer.end_write()

    def _position(self, push: Push) -> float:
        if push.push_id:
            return self.plan.progress(push.push_id[0].portion, push.push_id[0].first)
        return min(1.0, self.accepted_set.count / self.plan.num_batches)  # no name: as far as the data is

    def _count(self, pushes: Sequence[Push]) -> None:
        for push in pushes:
            if not push.skip:
                self.applied += len(push.push_id[0]) if len(push.push_id) == 1 else num_batches(push.push_id)
                self.num_extras += not push.push_id
                missed = self.version - push.version if self.version > push.version else 0
                self.staleness[push.worker][missed] += 1
                self.num_pushes += 1
                self.total_missed += missed
                if missed > self.most_missed:
                    self.most_missed = missed

    def skip(self, name: PushId, reason: str) -> None:
        for r in name:
            key = r.portion, reason
            self.skipped[key] = self.skipped.get(key, 0) | r.mask

    def drop(self, names: Sequence[PushId], reason: str) -> None:
        for name in names:
            for r in name:  # it may have been skipped for another reason; the same one must hold on all blocks
                for key in [key for key in self.skipped if key[0] == r.portion]:
                    self.skipped[key] &= ~r.mask
            self.skip(name, reason)
        self.dropped += names

    def limit(self) -> StalenessLimit | None:
        """What the rule lets readers miss, if it bounds it at all."""
        return self.rule.limit()

    def tally(self) -> Tally:
        skipped = self.skipped_before + sum(mask.bit_count() for mask in self.skipped.values())
        accepted = self.accepted_before + self.accepted_set.count
        return Tally(accepted, self.applied, skipped, self.rule.buffered, self.num_extras)

    def missed(self) -> Missed:
        return Missed(self.spec.index, self.num_pushes, self.total_missed, self.most_missed)
