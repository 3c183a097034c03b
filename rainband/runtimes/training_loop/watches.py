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
    """Detects whether the gradients hold anything of the batches drawn but not stepped on.

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
    """Notices parameters that the loop itself changes. Servers hold the parameters, and would overwrite the change.

    Their version counters rise with each change in place, but with none of the run, and with none made through `.data`:
    so some elements are compared, too. A checksum differs unless the change was taken back. Where that is not
    enough, copies are kept from then on.
    """

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.turn = 0  # moves the compared elements on, so that in the end all are
        self.names = [spec.name for spec in flat.layout.parameters]
        self.places = [self._places(number) for number in range(len(flat.vectors))]
        self.seen: list[tuple[Tensor, Tensor]] = []  # per vector: positions, and the values there
        self.versions: list[int] = []
        self.sums: list[Tensor] = []  # per vector
        self.copies: list[Tensor] = []  # of the vectors, in a loop that takes changes back
        self.keeps_copies = False

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
        self.versions = [parameter._version for parameter in self.flat.parameters]
        self.sums = [checksum(memory) for memory in self.flat.vectors]
        self.copies = [memory.clone() for memory in self.flat.vectors] if self.keeps_copies else []

    def changed(self) -> str:
        """Return the name of a parameter that has other values than at the last `note`; empty: none is known."""
        for memory, (at, before), (numbers, *_) in zip(self.flat.vectors, self.seen, self.places, strict=True):
            if (place := different(memory[at], before)) is not None:
                return self.names[int(numbers[place])]
        written = [now._version - before for now, before in zip(self.flat.parameters, self.versions, strict=True)]
        if any(written) and any(
            bool(checksum(memory) != before) for memory, before in zip(self.flat.vectors, self.sums, strict=True)
        ):
            return self._changed_elsewhere(written)
        return ""

    def _changed_elsewhere(self, written: list[int]) -> str:
        """Return the name of a parameter with changes in other elements than those that are compared."""
        if self.copies:
            for vector, (memory, before) in enumerate(zip(self.flat.vectors, self.copies, strict=True)):
                if (place := different(memory, before)) is not None:
                    return self._name_at(vector, place)
            return ""
        self.keeps_copies = True
        once = [name for name, times in zip(self.names, written, strict=True) if times == 1]
        return once[0] if once else ""  # what was written once was not taken back

    def _name_at(self, vector: int, place: int) -> str:
        there = (spec for spec in self.flat.layout.parameters if spec.vector == vector)
        return next(spec.name for spec in there if spec.start <= place < spec.start + spec.numel)


def different(now: Tensor, before: Tensor) -> int | None:
    """Return the place of an element that differs by more than rounding errors; None if none does.

    What adds and subtracts the same, such as a perturbation for one backward pass, leaves rounding errors.
    """
    if torch.equal(now.view(torch.uint8), before.view(torch.uint8)):
        return None
    rounding = 8 * torch.finfo(now.dtype).eps
    same = torch.isclose(now, before, rtol=rounding, atol=rounding * float(before.abs().max()), equal_nan=True)
    return None if same.all() else int((~same).nonzero()[0])


def checksum(memory: Tensor) -> Tensor:
    """Return the sum of the bits: reading the memory is all that it costs."""
    bits = memory.view(torch.uint8)
    whole = len(bits) - len(bits) % 8
    return bits[:whole].view(torch.int64).sum() + bits[whole:].sum()
