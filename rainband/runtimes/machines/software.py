"""The versions that a machine has, which must be those of the run."""

from __future__ import annotations

import sys
from importlib import metadata

from rainband import __version__
from rainband.protocol.messages import Software


def own_software() -> Software:
    """Return the versions of this machine; builds of torch for different devices fit together."""
    torch = metadata.version("torch").partition("+")[0]
    return Software(__version__, torch, f"{sys.version_info.major}.{sys.version_info.minor}")


def software_differences(theirs: Software, ours: Software, their_machine: str) -> str:
    """Return what to install for a machine to join, naming both sides; "" if it fits."""
    names = {"rainband": "rainband", "torch": "torch", "python": "Python"}
    pairs = [(title, getattr(theirs, field), getattr(ours, field)) for field, title in names.items()]
    wrong = [f"{title} {mine} and the run's machine {other}" for title, mine, other in pairs if mine != other]
    if not wrong:
        return ""
    needed = " and ".join(f"{title} {other}" for title, mine, other in pairs if mine != other)
    return f"{their_machine} has {'; '.join(wrong)}: install {needed} on {their_machine}."
