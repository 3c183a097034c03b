"""Reading the autograd graph of a loss: what its mean counts, and which batch it was computed from.

A mean over what counts, as that of cross_entropy with ignore_index or with class weights, is not one over samples. The
graph is read before each backward pass, which frees what it holds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

MEAN = 1  # the number of reduction="mean" in PyTorch
MEANS_OF_TARGETS = {"NllLossBackward0", "NllLoss2DBackward0"}  # cross_entropy of indices, or of images of them
NODES = 2000  # of a graph that are searched

Watch = Callable[[Sequence[Tensor]], None]
_watches: dict[int, Watch] = {}  # by thread
_backward = torch.autograd.backward


def watch_losses(watch: Watch) -> None:
    """Call a function with the losses of each backward() of this thread, before it."""
    _watches[threading.get_ident()] = watch
    torch.autograd.backward = _watched_backward


def stop_watching() -> None:
    _watches.pop(threading.get_ident(), None)
    if not _watches:
        torch.autograd.backward = _backward


def _watched_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    watch = _watches.get(threading.get_ident())
    if watch is not None and torch._C._current_graph_task_id() < 0:  # not inside another one, as of checkpointing
        watch((tensors,) if isinstance(tensors, Tensor) else tuple(tensors))
    _backward(tensors, *args, **kwargs)


class CountedFraction:
    """The fraction of a loss's targets that counts in its mean: 1 without weights and without ignored targets."""

    def __init__(self) -> None:
        self.value = 1.0  # of the last backward pass
        self.differs = False  # several means in one loss had different fractions
        self.is_known = False  # this loop has such losses, so each of them is searched
        self.passes = 0
        self.nodes = NODES  # of a graph that are searched

    def look(self, losses: Sequence[Tensor]) -> None:
        """Find it in the graph of a loss; more and more rarely, if there was none."""
        self.passes += 1
        self.value = 1.0
        if self.is_known or not self.passes & (self.passes - 1):
            found, nodes = fractions(losses, self.nodes)
            if found and not self.is_known:
                self.is_known, self.nodes = True, 2 * nodes  # the rest is the model
            self.differs = self.differs or len(set(found)) > 1
            self.value = found[0] if len(set(found)) == 1 else 1.0


def fractions(losses: Sequence[Tensor], limit: int = NODES) -> tuple[list[float], int]:
    """Return the sum of the weights of the targets of each mean in these losses, divided by their number.

    And how many nodes of the graph were searched until the last of them was found.
    """
    found, last = [], 0
    root = losses[0].grad_fn if len(losses) == 1 else None
    nodes = [root] if root is not None and _is_mean_of_targets(root) else _nodes(losses, limit, of_loss_only=True)
    for number, node in enumerate(nodes, 1):
        if _is_mean_of_targets(node) and node._saved_reduction == MEAN:
            with suppress(RuntimeError):  # an earlier pass has freed it: autograd is about to tell
                found.append(float(node._saved_total_weight) / max(1, node._saved_target.numel()))
                last = number
    return found, last


def memory_used(losses: Sequence[Tensor]) -> set[int]:
    """Return the addresses of the tensors that the graphs of these losses hold, such as inputs and targets."""
    addresses = set()
    for node in _nodes(losses, NODES):
        for name in _saved_names(type(node)):
            with suppress(RuntimeError):
                held = getattr(node, name)
                if isinstance(held, Tensor) and held.layout is torch.strided:
                    addresses.add(held.untyped_storage().data_ptr())
    return addresses


def _nodes(losses: Sequence[Tensor], limit: int, of_loss_only: bool = False) -> Iterator[Any]:
    """Yield the nodes of graphs, those next to the losses first."""
    coming: deque[Any] = deque(loss.grad_fn for loss in losses if loss.grad_fn is not None)
    seen = {None, *coming}
    for _ in range(limit):
        if not coming:
            return
        node = coming.popleft()
        yield node
        if of_loss_only and _is_mean_of_targets(node):
            continue  # the model follows
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                coming.append(following)


def _is_mean_of_targets(node: Any) -> bool:
    return node.name() in MEANS_OF_TARGETS


def _saved_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_")]
