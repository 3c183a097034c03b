"""Watches on the gradients and the parameters of a custom loop: changes that the loop itself has made to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from rainband.model.flat_parameters import Flat, is_finite
from rainband.protocol.accounting import NOT_FINITE

NEVER_STEPPED_ON = "never stepped on"
SAMPLES = 64  # elements of each parameter that are compared; others after every step


class GradientWatch:
    """Tells whether the gradients hold anything of the batches drawn but not stepped on.

    It compares them with those at the last draw, without copies: by their version counters.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        owned = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
        self.parameters = [parameter for some in owned for parameter in some]
        self.smallest_first = [sorted(some, key=torch.numel) for some in owned]
        self.versions: list[int] = []
        # zero_grad() replaces all gradients of an optimizer, and new ones begin with the same version: so one of each
        # optimizer is kept, which shows it.
        self.kept: list[Tensor | None] = []

    def note_draw(self) -> None:
        """Remember the gradients as they are now."""
        self.versions = self._versions()
        self.kept = self._some_of_each()

    def has_changed(self) -> bool:
        """Return True if a backward pass, or the loop itself, has changed a gradient since the last draw."""
        now = self._some_of_each()
        return any(a is not b for a, b in zip(now, self.kept, strict=True)) or self._versions() != self.versions

    def useless(self) -> str:
        """Return why the gradients cannot be part of a later step; empty if they can."""
        present = [p.grad for p in self.parameters if p.grad is not None]
        if not is_finite(present):
            return NOT_FINITE
        return "" if any(bool(_values(gradient).any()) for gradient in present) else NEVER_STEPPED_ON

    def _versions(self) -> list[int]:
        return [-1 if p.grad is None else p.grad._version for p in self.parameters]

    def _some_of_each(self) -> list[Tensor | None]:
        return [next((p.grad for p in some if p.grad is not None), None) for some in self.smallest_first]


def _values(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.coalesce().values()


class ParameterWatch:
    """Notices parameters that the loop itself changes, by comparing some of their elements.

    Servers hold the parameters, and would overwrite the change.
    """

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.turn = 0  # moves the compared elements on, so that in the end all are
        self.names = [spec.name for spec in flat.layout.parameters]
        self.places = [self._places(number) for number in range(len(flat.vectors))]
        self.seen: list[tuple[Tensor, Tensor]] = []  # per vector: positions, and the values there

    def _places(self, vector: int) -> tuple[Tensor, ...]:
        """Return the number of the parameter, its start, its size and an offset in it, of each compared element."""
        rows = [
            (number, spec.start, spec.numel, offset)
            for number, spec in enumerate(self.flat.layout.parameters)
            if spec.vector == vector and spec.numel
            for offset in range(0, spec.numel, max(1, spec.numel // SAMPLES))
        ]
        return torch.tensor(rows, dtype=torch.long).reshape(-1, 4).unbind(1)

    def note(self) -> None:
        """Remember the parameters as they are now."""
        self.turn += 1
        self.seen = []
        for memory, (_, starts, sizes, offsets) in zip(self.flat.vectors, self.places, strict=True):
            at = (starts + (offsets + self.turn) % sizes).to(memory.device)
            self.seen.append((at, memory[at]))

    def changed(self) -> str:
        """Return the name of a parameter that has other values than at the last `note`; empty: none is known."""
        for memory, (at, before), (numbers, *_) in zip(self.flat.vectors, self.seen, self.places, strict=True):
            now = memory[at]
            if torch.equal(now.view(torch.uint8), before.view(torch.uint8)):
                continue
            # What adds and subtracts the same, such as a perturbation for one backward pass, leaves rounding errors.
            rounding = 8 * torch.finfo(now.dtype).eps
            same = torch.isclose(now, before, rtol=rounding, atol=rounding * float(before.abs().max()), equal_nan=True)
            if not same.all():
                return self.names[int(numbers[int((~same).nonzero()[0])])]
        return ""
