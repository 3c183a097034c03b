"""One play of a schedule table inside this process: who can go on, what is on its way, and what the losses were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rainband.pipeline.check import needs
from rainband.pipeline.graph import tensors_in
from rainband.pipeline.table import Action

if TYPE_CHECKING:
    from rainband.pipeline.execute import Micro, Pipeline

Gradients = list[Tensor | None]  # of the tensors of one value


class Turns:
    """Machines take turns: each does as much of its row as it can."""

    def __init__(self, pipeline: Pipeline, micros: Sequence[Micro]) -> None:
        self.pipeline, self.table, self.layout = pipeline, pipeline.table, pipeline.layout
        self.micros = micros
        self.inputs = [pipeline.cut.bind(micro.args, micro.kwargs) for micro in micros]
        self.arrived: dict[tuple[int, int, str], Any] = {}  # (stage, microbatch, value)
        self.returned: dict[tuple[int, int, str], dict[int, Gradients]] = {}  # (maker, microbatch, value) -> by reader
        self.done: set[tuple[int, int, str, int]] = set()
        self.losses = [float("nan")] * len(micros)
        self.sent = 0

    def play(self) -> None:
        at = [0] * len(self.table.rows)
        while sum(at) < sum(map(len, self.table.rows)):
            before = sum(at)
            for machine, row in enumerate(self.table.rows):
                while at[machine] < len(row) and self._is_ready(machine, row[at[machine]]):
                    self._do(machine, row[at[machine]], at[machine])
                    at[machine] += 1
            assert sum(at) > before, "the table was checked, and does not end"

    def _is_ready(self, machine: int, action: Action) -> bool:
        wanted = needs(self.table, machine, action)
        if action.kind == "U":  # a parameter that several stages use has its gradient from all of them
            for other in self.pipeline.sharing(action.stage):
                wanted += needs(self.table, machine, action._replace(stage=other))
        return all((other, *needed[:3]) in self.done for other, needed in wanted)

    def _do(self, machine: int, action: Action, place: int) -> None:
        match action.kind:
            case "F":
                self._forward(machine, action)
            case "B":
                self._backward(machine, action)
            case "U":
                self._update(machine, action, place)
        self.done.add((machine, *action[:3]))
        self._release(machine, action, place)

    # ---- forward ----

    def _forward(self, machine: int, action: Action) -> None:
        stage = self.pipeline.stages[machine, action.stage]
        given = [self._value(action.stage, action.micro, value) for value in stage.fragment.reads]
        results = stage.forward(action.micro, action.version, given)
        for value, result in zip(stage.fragment.makes, results, strict=True):
            for reader in self._readers(value):
                self.arrived[reader, action.micro, value] = _own_leaves(result)
                self._count(action.stage, reader, action.micro)

    def _value(self, stage: int, micro: int, value: str) -> Any:
        return self.inputs[micro][value] if value in self.inputs[micro] else self.arrived[stage, micro, value]

    def _readers(self, value: str) -> list[int]:
        """Stages that read a value, beside its own; the loss is in the last stage."""
        last = [self.table.num_stages - 1] if value in self.layout.outputs else []
        home = self.layout.maker[value]
        reading = {index for index in self.layout.readers.get(value, ()) if index != home}
        return sorted(reading | set(last))

    def _count(self, source: int, destination: int, micro: int) -> None:
        self.sent += self.table.home(source, micro) != self.table.home(destination, micro)

    # ---- backward ----

    def _backward(self, machine: int, action: Action) -> None:
        stage, micro = self.pipeline.stages[machine, action.stage], action.micro
        if action.stage == self.table.num_stages - 1:
            self._loss(action)
        incoming = [self._incoming(action.stage, micro, value) for value in stage.fragment.makes]
        update, weight = self._share(action)
        gradients = stage.backward(micro, action.version, incoming, update, weight)
        for value, gradient in zip(stage.fragment.reads, gradients, strict=True):
            if value not in self.inputs[micro]:
                self._give_back(action.stage, micro, value, gradient)

    def _loss(self, action: Action) -> None:
        """The loss of the model's answer, and the gradients of its outputs, wherever they were made."""
        micro, last = action.micro, action.stage
        values = {value: self._value(last, micro, value) for value in self.layout.outputs}
        leaves = _own_leaves(values)
        with torch.enable_grad():
            loss = self.micros[micro].loss(self.pipeline.cut.answer(leaves))
        wanting = [tensor for tensor in tensors_in(leaves) if tensor.requires_grad]
        found = iter(torch.autograd.grad(loss, wanting, allow_unused=True) if wanting else ())
        for value, leaf in leaves.items():
            gradients = [next(found) if tensor.requires_grad else None for tensor in tensors_in(leaf)]
            if value in self.layout.maker:
                self._collect(self.layout.maker[value], micro, value, -1, gradients)
                if self.layout.maker[value] != last and last not in self.layout.readers.get(value, ()):
                    self._count(last, self.layout.maker[value], micro)
            if value not in self.layout.fragments[last].reads:
                self.arrived.pop((last, micro, value), None)
        self.losses[micro] = float(loss.detach())

    def _give_back(self, stage: int, micro: int, value: str, gradient: Gradients) -> None:
        maker = self.layout.maker[value]
        wants = any(tensor.requires_grad for tensor in tensors_in(self.arrived[stage, micro, value]))
        if wants:
            self._collect(maker, micro, value, stage, gradient)
            self._count(stage, maker, micro)
        del self.arrived[stage, micro, value]

    def _collect(self, maker: int, micro: int, value: str, reader: int, gradient: Gradients) -> None:
        self.returned.setdefault((maker, micro, value), {})[reader] = gradient

    def _incoming(self, stage: int, micro: int, value: str) -> Gradients:
        """The sum over all readers, in the order of stages."""
        by_reader = self.returned.pop((stage, micro, value), {})
        columns = [by_reader[reader] for reader in sorted(by_reader)]
        if not columns:
            return []
        return [_sum(list(column)) for column in zip(*columns, strict=True)]

    def _share(self, action: Action) -> tuple[int, float]:
        """The update a microbatch belongs to, and its share of that update's samples."""
        update = action.micro // self.table.micros_per_update[action.stage]
        together = self.table.micros_of(action.stage, update)
        return update, self.micros[action.micro].samples / sum(self.micros[micro].samples for micro in together)

    # ---- update ----

    def _update(self, machine: int, action: Action, place: int) -> None:
        stage = self.pipeline.stages[machine, action.stage]
        last = self.table.last_use.get((machine, action.stage, stage.versions.newest), -1)
        overwrite = not self.table.stash or last < place
        stage.update(self.pipeline.total(action.stage, action.micro), overwrite)
        linked = [action.stage, *self.pipeline.sharing(action.stage)]
        others = [(home, s) for s in linked for home in self.table.homes[s]]
        if all((h, s) == (machine, action.stage) or (h, s, "U", action.micro) in self.done for h, s in others):
            for key in others:
                self.pipeline.stages[key].totals.pop(action.micro, None)

    def _release(self, machine: int, action: Action, place: int) -> None:
        """Versions that nobody on this machine needs any more."""
        versions = self.pipeline.stages[machine, action.stage].versions
        for version in sorted(versions.live):
            last = self.table.last_use.get((machine, action.stage, version), -1)
            if version != versions.newest and last <= place:
                versions.release(version)


def _own_leaves(value: Any) -> Any:
    """Tensors of the reader's own, over the same memory."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def _sum(gradients: list[Tensor | None]) -> Tensor | None:
    present: Iterator[Tensor] = (gradient for gradient in gradients if gradient is not None)
    total = next(present, None)
    for gradient in present:
        assert total is not None
        total = total + gradient
    return total
