"""Random numbers from a fixed seed; the generators are restored afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

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


@contextmanager
def global_generators_from(seed: int) -> Iterator[None]:
    """Seed the global generators of torch (on the CPU), numpy and Python inside the block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed: that reseeds every accelerator
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
