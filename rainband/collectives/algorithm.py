"""An all-reduce algorithm: its table, and the numbers that a textbook gives for it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from rainband.collectives.table import MoveTable
from rainband.plugins import Family, find, names_of
from rainband.settings import build


class Textbook(NamedTuple):
    """The numbers of an algorithm; bytes in multiples of the vector's."""

    steps: float
    fan_in: float
    max_sent: float  # by one rank
    total_sent: float


class Formulas(NamedTuple):
    """The same as text. P ranks, Q the largest power of two up to P, N bytes. `≤`: an upper bound."""

    steps: str
    fan_in: str
    max_sent: str
    total_sent: str = "2(P−1)N"


class Algorithm(ABC):
    """An all-reduce algorithm; its file describes it, and its fields are its settings."""

    formulas: ClassVar[Formulas]
    # The executors play every table. Those that are fast are what `auto` chooses from.
    is_fast: ClassVar[bool] = False

    @abstractmethod
    def table(self, num_ranks: int) -> MoveTable:
        """Return the moves for this number of ranks."""

    @abstractmethod
    def textbook(self, num_ranks: int) -> Textbook:
        """Return the values of `formulas`; with one rank, all are 0."""


def _is_algorithm(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Algorithm) and not inspect.isabstract(value)


ALGORITHMS = Family("all-reduce algorithm", "collectives/algorithms", _is_algorithm)


def algorithm_names() -> list[str]:
    return names_of(ALGORITHMS)


def load_algorithm(name: str, settings: Mapping[str, object] | None = None) -> Algorithm:
    """Return the algorithm with these settings, checked against its fields."""
    found: type[Algorithm] = find(ALGORITHMS, name)
    if not _is_algorithm(found):
        raise ValueError(
            f"{name} is not an all-reduce algorithm: make it a dataclass that inherits from "
            "rainband.collectives.algorithm.Algorithm."
        )
    return build(found, settings or {})


def fast_algorithms() -> dict[str, Algorithm]:
    """Return the algorithms that `auto` chooses from."""
    loaded = {name: load_algorithm(name) for name in algorithm_names()}
    return {name: algorithm for name, algorithm in loaded.items() if algorithm.is_fast}
