"""Commands of rainband on the machines of a measurement, and the events of their runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rainband.bench.harness.machines import Machines

MAIN = "from rainband.cli.main import main; main()"
LIMIT_S = 120.0


@contextmanager
def running(machines: Machines, index: int, words: Sequence[str]) -> Iterator[None]:
    """Run a command of rainband on a machine, and end it at once afterwards."""
    process = start(machines, index, MAIN, words, dict(os.environ), subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        time.sleep(0.2)
        process.terminate()
        try:
            process.wait(LIMIT_S / 4)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start(
    machines: Machines, index: int, program: str, words: Sequence[str], environment: dict[str, str], output: int
) -> subprocess.Popen[bytes]:
    """Start a Python program on a machine."""
    command = [*machines.inside(index), sys.executable, "-c", program, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL, env=environment)


def await_found(found: Any, what: str, limit_s: float = LIMIT_S) -> Any:
    """Wait until a function returns something other than None, and return it."""
    deadline = time.monotonic() + limit_s
    while (result := found()) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} has not come within {limit_s:g} s.")
        time.sleep(0.01)
    return result


def events_in(path: Path) -> list[dict[str, Any]]:
    """Return the events that a run has written so far."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def number_of(path: Path, event: str) -> int:
    """Count the events of one kind."""
    return sum(one["event"] == event for one in events_in(path))
