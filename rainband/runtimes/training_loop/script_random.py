"""Random numbers of scripts that run on several workers: equal until they join, so that models start equal."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

RandomState = dict[str, Any]


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


def state_of_script() -> RandomState:
    """Return the state of the generators from which this worker's script draws, such as dropout masks."""
    state = _state()
    state["cuda"] = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return state


def continue_script(state: RandomState, index: int) -> None:
    """Continue with the numbers of an earlier run: the first worker exactly, the others with numbers never used."""
    _set_state(state)
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if index == 0:
        return
    seed = int(torch.randint(1 << 62, ())) + index  # not the initial seed: the numbers of the earlier run would repeat
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(seed % (1 << 32))


class CommonRandom:
    """Random numbers that stay equal on all workers, for orders of samples; others differ after `seed_by_rank`."""

    def __init__(self, alone: bool = False) -> None:
        self.alone = alone  # one worker draws from its own numbers, as a script in one process does
        self.current = _state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from the common numbers inside the block."""
        if self.alone:
            yield
            return
        outside = _state()
        _set_state(self.current)
        try:
            yield
        finally:
            self.current = _state()
            _set_state(outside)

    def state(self, generator: torch.Generator | None = None) -> RandomState:
        """Return the common numbers' state, and that of a generator of a loader."""
        common = _state() if self.alone else self.current
        return {"common": common, "loader": None if generator is None else generator.get_state()}

    def put(self, state: RandomState, generator: torch.Generator | None = None) -> None:
        """Continue with a state that `state` returned, also on another worker."""
        if self.alone:
            _set_state(state["common"])
        else:
            self.current = state["common"]
        if generator is not None and state["loader"] is not None:
            generator.set_state(state["loader"])


def _state() -> RandomState:
    """Return the state of all generators, as lists, numbers and tensors."""
    version, words, gauss = random.getstate()
    state: RandomState = {"python": [version, list(words), gauss], "torch": torch.get_rng_state(), "numpy": None}
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        name, keys, *rest = numpy_random.get_state()
        state["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    return state


def _set_state(state: RandomState) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if (numpy_random := sys.modules.get("numpy.random")) is not None and state["numpy"] is not None:
        name, keys, *rest = state["numpy"]
        numpy_random.set_state((name, keys.numpy().astype("uint32"), *rest))
