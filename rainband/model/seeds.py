"""Seed and restore the global random number generators of torch, numpy and Python."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


@contextmanager
def random_numbers_from(seed: int, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Seed the generators of the CPU and the tensors' devices inside the block."""
    devices = sorted({t.device for t in tensors if t.device.type not in ("cpu", "meta")}, key=str)
    with ExitStack() as restored:
        state = torch.get_rng_state()
        restored.callback(torch.set_rng_state, state)
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed: that reseeds every accelerator
        for device in devices:
            module = torch.get_device_module(device.type)
            restored.callback(module.set_rng_state, module.get_rng_state(device), device)
            with module.device(device):
                module.manual_seed(seed)
        yield


def seed_global_generators(seed: int) -> None:
    """Seed the generators from which tasks draw: augmentation is a function of the batch, on whichever worker."""
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed: that reseeds every accelerator
    np.random.seed(seed % 2**32)
    random.seed(seed)


class RandomStates(NamedTuple):
    """The states of the three global generators."""

    torch: Tensor
    numpy: Any
    python: Any


def all_random_states() -> RandomStates:
    return RandomStates(torch.get_rng_state(), np.random.get_state(), random.getstate())


def restore_random_states(states: RandomStates) -> None:
    torch.set_rng_state(states.torch)
    np.random.set_state(states.numpy)
    random.setstate(states.python)


@contextmanager
def global_generators_from(seed: int) -> Iterator[None]:
    """Seed the global generators of torch (on the CPU), numpy and Python inside the block."""
    states = all_random_states()
    seed_global_generators(seed)
    try:
        yield
    finally:
        restore_random_states(states)
