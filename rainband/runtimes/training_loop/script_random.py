"""Random numbers of scripts that run on several workers: equal until they join, so that models start equal."""

from __future__ import annotations

import random
import sys

import torch


def seed_equally(seed: int) -> None:
    """Seed all generators: every script begins with the same numbers."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(seed)


def seed_by_rank(index: int) -> None:
    """Seed each worker differently, else all would use the same dropout masks. The first one keeps its state."""
    if index == 0:
        return
    random.seed(f"{random.random()} {index}")
    torch.manual_seed(torch.initial_seed() + index)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed((int(numpy_random.randint(1 << 31)) + index) % (1 << 32))
