"""Runs that Slurm or torchrun start on several machines: rank 0 coordinates, the others join through a shared file."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

SHARED_FOLDER = "RAINBAND_SHARED"  # the variable that names the folder of the file; by default the current one
PATIENCE_S = 300.0  # for rank 0 to write it
LOOK_EVERY_S = 0.2


class Launched(NamedTuple):
    """One of several processes that another launcher has started together."""

    launcher: str
    job: str
    rank: int
    size: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.launcher} job {self.job})"


def launched_by(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """Return what Slurm or torchrun say of this process; None if it was not started by them, or alone."""
    variables = {
        "torchrun": ("TORCHELASTIC_RUN_ID", "GROUP_RANK", "GROUP_WORLD_SIZE"),  # one for each machine
        "Slurm": ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS"),
    }
    for launcher, (job, rank, size) in variables.items():
        if job in environment and rank in environment and size in environment:
            found = Launched(launcher, environment[job], int(environment[rank]), int(environment[size]))
            return found if found.size > 1 else None
    return None


def shared_file(launched: Launched, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file, on a disk that all machines see, in which rank 0 leaves the invitation."""
    port = f"-{environment['MASTER_PORT']}" if "MASTER_PORT" in environment else ""  # jobs of torchrun may have no name
    job = re.sub(r"[^\w.-]", "_", launched.job + port)
    return Path(environment.get(SHARED_FOLDER, ".")) / f"rainband-{job}.invite.txt"


def await_file(path: Path, launched: Launched, say: Callable[[str], None], patience_s: float = PATIENCE_S) -> None:
    """Wait until rank 0 has written its invitation; raise ValueError if it does not."""
    if launched.rank == 0:
        raise ValueError(f"{launched} coordinates: start the run there, with rainband train or rainband run --listen.")
    say(f"{launched}: waiting for the invitation of rank 0, {path} ...")
    deadline = time.monotonic() + patience_s
    while not path.is_file():
        if time.monotonic() > deadline:
            raise ValueError(
                f"rank 0 has not written {path} within {patience_s:g} s: it must run rainband train --listen in the "
                f"same folder, which all machines must see; {SHARED_FOLDER} names another one."
            )
        time.sleep(LOOK_EVERY_S)
