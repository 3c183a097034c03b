"""From `rainband train` to the first step, as a multiple of `import torch`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rainband.bench.baselines.limit import timed
from rainband.bench.harness.rows import Effort, Row, at_most

MAIN = "from rainband.cli.main import main; main()"
COMMAND = ["train", "digits", "downpour", "--workers", "4", "--servers", "2", "--epochs", "1"]


def run(effort: Effort) -> list[Row]:
    repeats = 5 if effort == "full" else 2
    imports, starts = [], []
    for _ in range(repeats):
        imports.append(timed(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True)))
        starts.append(first_step_s(COMMAND))
    return [
        Row("import torch", median(imports), "s"),
        Row("rainband train to the first step", median(starts), "s"),
        at_most("rainband train to the first step", median(starts) / median(imports), 3.0, "import torch"),
    ]


def first_step_s(words: Sequence[str], runs: Path | None = None) -> float:
    """Return the seconds from the start of a command to the first step of its run, which is then stopped.

    `runs`: an empty folder for the run, which is kept; None: a temporary one.
    """
    if runs is None:
        with tempfile.TemporaryDirectory() as folder:
            return first_step_s(words, Path(folder))
    started = time.perf_counter()
    command = [sys.executable, "-c", MAIN, *words, "--runs", str(runs)]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            while process.poll() is None:
                if any(b'"FirstStep"' in log.read_bytes() for log in runs.glob("*/events.jsonl")):
                    return time.perf_counter() - started
                time.sleep(0.005)
        finally:
            process.terminate()
            process.wait()
        errors.seek(0)
        why = errors.read().decode(errors="replace").strip()
    raise RuntimeError(f"rainband {' '.join(words)} ended before its first step: {why or 'it said nothing'}")
