"""Marks in a user's model that say where it may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

from torch import nn

WHOLE = "_rainband_whole"  # the attribute of a module that must not be cut
Module = TypeVar("Module", bound=nn.Module)


@runtime_checkable
class InPieces(Protocol):
    """A model that says where it can be cut: it computes its pieces one after the other."""

    def pieces(self) -> Sequence[nn.Module]:
        """Return modules whose composition is the model: the first takes the model's inputs, each other one value."""


def whole(module: Module) -> Module:
    """Mark a submodule that must not be cut: all of it stays on one machine."""
    setattr(module, WHOLE, True)
    return module


def is_whole(module: nn.Module) -> bool:
    return getattr(module, WHOLE, False) is True


def refuse_lost_parameters(model: nn.Module, pieces: Sequence[nn.Module]) -> None:
    """Raise ValueError if parameters are outside all pieces: they would silently not be trained."""
    kept = {id(parameter) for piece in pieces for parameter in piece.parameters()}
    if lost := [name for name, parameter in model.named_parameters() if id(parameter) not in kept]:
        raise ValueError(
            f"{type(model).__name__}.pieces() leaves out the parameters {', '.join(lost[:5])}"
            f"{' and more' if len(lost) > 5 else ''}: return modules that hold every parameter of the model."
        )
