"""The parameters of one block: their optimizer, and the buffer where readers see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rainband.model.block_optimizer import BlockOptimizer
from rainband.model.optimizer_state import Numbers, as_parts, by_segment
from rainband.protocol.vectors import Vectors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from rainband.protocol.layout import BlockSpec
    from rainband.protocol.messages import InitBlock
    from rainband.protocol.parameter_buffers import ParameterBuffer
    from rainband.protocol.saved_state import SavedBlock
    from rainband.strategy import ServerPart

FULL_PRECISION = (torch.float32, torch.float64)
Groups = tuple[dict[str, object], ...]  # an optimizer's settings, one dict per parameter group


class BlockParameters:
    """Values in working precision, stepped by a torch optimizer and published for readers."""

    def __init__(
        self, spec: BlockSpec, buffer: ParameterBuffer, server_part: ServerPart, groups: Sequence[dict[str, object]]
    ) -> None:
        self.spec = spec
        self.buffer = buffer
        self.lr_factor = 1.0  # of the divergence guard
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        # Sixteen-bit parameters are kept in float32: small steps would be rounded to nothing.
        self.working_dtype = self.dtype if self.dtype in FULL_PRECISION else torch.float32
        self.values, self.optimizer = self._make_optimizer(server_part, groups)
        self.in_buffer = self.values is buffer.tensors[0]  # they are updated where readers see them
        self.first_state: dict[str, tuple[Tensor, tuple[int, ...]]] = {}  # of the optimizer, received before the values
        self.first_groups: Groups = self.optimizer.groups()  # of workers that send no settings
        self.groups_of: dict[int, Groups] = {}  # worker -> its optimizer settings, if it sends any
        self.groups: Groups = self.first_groups  # the optimizer has these now
        self.vectors = Vectors(self.values, spec.segments)  # for commands of the coordinator

    def _make_optimizer(
        self, server_part: ServerPart, groups: Sequence[dict[str, object]]
    ) -> tuple[Tensor, BlockOptimizer]:
        if len(self.buffer.tensors) == 1 and self.dtype in FULL_PRECISION:
            values = self.buffer.at(0)
            optimizer = BlockOptimizer(server_part.optimizer, self.spec, values, groups)
            if optimizer.single_pass:
                return values, optimizer
        # Readers may copy the buffer at any time, so an optimizer that writes values twice needs memory of its own.
        values = torch.zeros(self.spec.numel, dtype=self.working_dtype)
        return values, BlockOptimizer(server_part.optimizer, self.spec, values, groups)

    def load(self, load: InitBlock, values: Tensor) -> None:
        """Take the first values, or one part of the first optimizer state, which is sent before the values."""
        if load.part:
            self.first_state[load.part] = values.clone(), load.absent
            return
        self.values.copy_(values)
        self.publish_all()
        if self.first_state or load.numbers:
            self.optimizer.load_state(by_segment(self.spec.segments, self.first_state, load.numbers))
            self.first_state = {}

    def state(self) -> tuple[dict[str, tuple[Tensor, tuple[int, ...]]], Numbers]:
        """Return the optimizer's state as messages carry it."""
        return as_parts(self.spec, self.optimizer.state())

    def state_part(self, name: str) -> tuple[Tensor, tuple[int, ...]]:
        parts, _ = as_parts(self.spec, {name: self.optimizer.state_of(name)})
        return parts[name]

    def saved_state(self) -> tuple[dict[str, Tensor], Numbers, dict[str, tuple[int, ...]]]:
        """Return copies of the optimizer's state, its numbers, and the parameters that have none of a kind."""
        parts, numbers = as_parts(self.spec, self.optimizer.state(copied=False), self.working_dtype)
        return {name: values for name, (values, _) in parts.items()}, numbers, {n: a for n, (_, a) in parts.items()}

    def restore(self, values: Tensor, optimizer: Mapping[str, Tensor], saved: SavedBlock) -> None:
        """Continue with the values and the optimizer state of a checkpoint; ValueError if they do not fit."""
        if values.numel() != self.spec.numel or values.dtype != self.working_dtype:
            raise ValueError(f"{values.numel()} values of {values.dtype} are not those of block {self.spec.index}.")
        parts = {name: (of, saved.absent.get(name, ())) for name, of in optimizer.items()}
        if parts or saved.numbers:
            self.optimizer.load_state(by_segment(self.spec.segments, parts, saved.numbers), copy=False)
        self.values.copy_(values)
        self.lr_factor = saved.lr_factor

    def publish_all(self) -> None:
        """Copy the values to all places where readers see them."""
        for tensor in self.buffer.tensors:
            if tensor is not self.values:
                tensor.copy_(self.values)

    def set_groups(self, worker: int, groups: Groups) -> str:
        """Use other optimizer settings for a worker's gradients; return what is wrong with them, or nothing."""
        try:
            self.optimizer.update_groups(groups)
        except (ValueError, TypeError) as error:
            return str(error)
        self.groups_of[worker] = self.groups = groups
        return ""

    def differing_rates(self, workers: Collection[int]) -> dict[int, list[object]]:
        """Return the learning rates of these workers' parameter groups, if their optimizer settings differ."""
        if not self.groups_of:
            return {}
        groups = {worker: self.groups_of.get(worker, self.first_groups) for worker in workers}
        first = next(iter(groups.values()), ())
        if all(settings == first for settings in groups.values()):
            return {}
        return {worker: [group.get("lr") for group in settings] for worker, settings in groups.items()}

    def step(self, gradient: Tensor, absent: Collection[int], lr_scale: float, worker: int, version: int) -> None:
        """Apply a gradient with its sender's settings; the result is this version."""
        if self.groups_of:
            groups = self.groups_of.get(worker, self.first_groups)
            if groups is not self.groups and groups != self.groups:
                self.optimizer.update_groups(groups)
                self.groups = groups
        lr_scale *= self.lr_factor
        if self.in_buffer:
            self.buffer.begin_write()
            self.optimizer.step(gradient, absent, lr_scale)
            self.buffer.end_write()
        else:
            self.optimizer.step(gradient, absent, lr_scale)
            self.publish(version)

    def publish(self, version: int) -> None:
        """Copy the values to where readers see this version."""
        self.buffer.begin_write()
        self.buffer.at(version).copy_(self.values)
        self.buffer.end_write()

    @contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Make all changes inside visible to readers at once, as this version."""
        if self.in_buffer:
            self.buffer.begin_write()
            yield
            self.buffer.end_write()
        else:
            yield
            self.publish(version)
