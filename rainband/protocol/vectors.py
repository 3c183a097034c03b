"""Named vectors beside a block's parameters, and the closed set of operations on them. Pure: no I/O, no clock.

    fill      v <- a            on the elements of parameters; what lies between them stays zero
    copy      v <- w            makes v if there is none
    scale     v <- a v
    axpy      v <- v + a w
    multiply  v <- v * w        element by element
    swap      v <-> w
    drop      v is gone, and its memory
    dot       answers  v . w    in float64, whatever the vectors are
    norm      answers |v|       as the square, which can be added up over blocks

`params` are the block's parameters, `gradient` is where an evaluation is summed; all other names are the strategy's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.layout import BlockSegment

PARAMS = "params"
GRADIENT = "gradient"
ANSWERED = ("dot", "norm")  # these have a result
NEEDS_SOURCE = ("copy", "axpy", "multiply", "swap", "dot")
PIECE = 65536  # elements
KINDS = ("fill", "copy", "scale", "axpy", "multiply", "swap", "drop", "dot", "norm")


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """One operation, done on every block of every server."""

    kind: str
    target: str
    source: str = ""
    number: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.target} {self.source}".rstrip()

    @property
    def writes_params(self) -> bool:
        return self.target == PARAMS and self.kind not in ANSWERED


def fill(target: str, number: float) -> Operation:
    return Operation("fill", target, number=number)


def copy(target: str, source: str) -> Operation:
    return Operation("copy", target, source)


def scale(target: str, number: float) -> Operation:
    return Operation("scale", target, number=number)


def axpy(target: str, number: float, source: str) -> Operation:
    """target <- target + number * source"""
    return Operation("axpy", target, source, number)


def multiply(target: str, source: str) -> Operation:
    return Operation("multiply", target, source)


def swap(target: str, source: str) -> Operation:
    return Operation("swap", target, source)


def drop(target: str) -> Operation:
    return Operation("drop", target)


def dot(target: str, source: str) -> Operation:
    return Operation("dot", target, source)


def norm(target: str) -> Operation:
    return Operation("norm", target)


def validate_operations(operations: Iterable[Operation], names: Iterable[str], room: int) -> str:
    """Say what is wrong with a program, before any of it is done; "" if nothing is.

    `names` are the vectors there are, params among them; `room` is how many there may be beside params.
    """
    there = set(names)
    for operation in operations:
        kind, target, source = operation.kind, operation.target, operation.source
        if kind not in KINDS:
            return f"no operation named {kind!r}: there are {', '.join(KINDS)}"
        makes = kind in ("fill", "copy")
        for name in (() if makes else (target,)) + ((source,) if kind in NEEDS_SOURCE else ()):
            if name not in there:
                return f"{operation}: there is no vector {name!r}, only {', '.join(sorted(there))}"
        if PARAMS in (target, source) and kind in ("swap", "drop") and PARAMS in there:
            return f"{operation}: the parameters stay where readers see them; copy them instead"
        if makes and target not in there:
            if len(there) > room:  # params are not counted
                return f"{operation}: one vector too many, there is room for {room} beside the parameters"
            there.add(target)
        if kind == "drop":
            there.discard(target)
    return ""


class Vectors:
    """The vectors of one block. Operations were checked by `why_not`."""

    def __init__(self, params: Tensor, segments: Sequence[BlockSegment]) -> None:
        self.segments = segments
        self.named: dict[str, Tensor] = {PARAMS: params}
        self.lent: set[str] = set()  # a checkpoint is being written from them: copied before they are changed

    def lend(self) -> dict[str, Tensor]:
        """Return the vectors beside the parameters, for a reader: they stay as they are now."""
        self.lent = self.named.keys() - {PARAMS}
        return {name: self.named[name] for name in self.lent}

    def _own(self, name: str) -> Tensor:
        """Return a vector that may be changed."""
        if name in self.lent:
            self.lent.discard(name)
            self.named[name] = self.named[name].clone()
        return self.named[name]

    def run(self, operation: Operation) -> float | None:
        """Do one operation; a dot product or the square of a norm is returned."""
        v, w = self.named.get(operation.target), self.named.get(operation.source)
        match operation.kind:
            case "fill":
                self._fill(operation.target, operation.number)
            case "copy":
                self._copy(operation.target, operation.source)
            case "scale":
                self._own(operation.target).mul_(operation.number)
            case "axpy":
                assert w is not None
                self._own(operation.target).add_(w, alpha=operation.number)
            case "multiply":
                assert w is not None
                self._own(operation.target).mul_(w)
            case "swap":
                self._swap(operation.target, operation.source)
            case "drop":
                del self.named[operation.target]
                self.lent.discard(operation.target)
            case "dot":
                assert v is not None and w is not None
                return _dot(v, w)
            case "norm":
                assert v is not None
                return _dot(v, v)
        return None

    def add(self, gradient: Tensor) -> None:
        """Add to the sum of an evaluation."""
        self._own(GRADIENT).add_(gradient)

    def _swap(self, a: str, b: str) -> None:
        self.named[a], self.named[b] = self.named[b], self.named[a]
        names = {a, b}
        self.lent = self.lent - names | {({a: b, b: a})[name] for name in self.lent & names}

    def _fill(self, name: str, number: float) -> None:
        if name not in self.named:
            self.named[name] = self.named[PARAMS].new_zeros(self.named[PARAMS].shape)
        vector = self._own(name).zero_()
        for segment in self.segments if number else ():
            vector[segment.start : segment.stop] = number

    def _copy(self, name: str, source: str) -> None:
        if name in self.named:
            self._own(name).copy_(self.named[source])
        else:
            self.named[name] = self.named[source].clone()


def _dot(v: Tensor, w: Tensor) -> float:
    """In pieces that stay in the cache: twelve times as fast as making float64 copies of a whole block."""
    total = 0.0
    for at in range(0, v.numel(), PIECE):
        a = v[at : at + PIECE].double()
        b = a if w is v else w[at : at + PIECE].double()
        total += float(a.dot(b))
    return total
