"""Restore what a computation changes in a module: the modes and the buffers of its submodules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def same_modes(*models: nn.Module) -> Iterator[None]:
    """Restore the mode of every submodule, training or evaluation, when left."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training  # not train(): that changes submodules too, and graphs of torch.export refuse it


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the values of the buffers, such as BatchNorm's statistics, when left."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
