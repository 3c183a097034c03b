"""Random numbers in scripts that run several times: alike until they join, so that models start alike, then apart."""

from __future__ import annotations

import random
import sys

import torch


def same_random_numbers(seed: int) -> None:
    """Every script begins with these numbers."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(seed)


def own_random_numbers(index: int) -> None:
    """From here on workers differ: else all would drop out and shuffle alike. The first goes on as it is."""
    if index == 0:
        return
    random.seed(f"{random.random()} {index}")
    torch.manual_seed(torch.initial_seed() + index)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed((int(numpy_random.randint(1 << 31)) + index) % (1 << 32))
