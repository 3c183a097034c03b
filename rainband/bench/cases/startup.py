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


def first_step_s(words: Sequence[str]) -> float:
    """Return the seconds from the start of a command to the first step of its run, which is then ended."""
    with tempfile.TemporaryDirectory() as root:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *words, "--runs", root], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while process.poll() is None:
                if any(b'"FirstStep"' in log.read_bytes() for log in Path(root).glob("*/events.jsonl")):
                    return time.perf_counter() - started
                time.sleep(0.005)
        finally:
            process.terminate()
            process.wait()
    raise RuntimeError("the run ended before its first step: run the command by hand to see why.")
