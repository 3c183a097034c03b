"""A script that trains alone, with all that a loop among several has for those who watch."""

from __future__ import annotations

from rainband.worlds.alone import Alone


class Unwatched(Alone):
    """Nobody watches, so what the loop tells is not kept."""

    def log(self, *, loss: object) -> None:
        """As `run.log(loss=...)` in a run."""
