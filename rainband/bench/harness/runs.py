"""Runs for measurements, in a directory that is removed afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from rainband.runtimes.config import RunConfig
from rainband.runtimes.processes import launcher
from rainband.runtimes.run import RunResult, View
from rainband.runtimes.run_directory import new_directory


def run_to_measure(
    config: RunConfig, view: View, run: Callable[[RunConfig, View], RunResult] = launcher.run
) -> RunResult:
    """Run in a temporary directory; raise RuntimeError if the run does not finish."""
    with tempfile.TemporaryDirectory() as root:
        directory = str(new_directory(Path(root), "bench", config.strategy))
        result = run(msgspec.structs.replace(config, directory=directory), view)
    if result.outcome != "finished":
        raise RuntimeError(f"the run with {config.strategy} {result.outcome}, nothing to measure: {result.reason}")
    return result
