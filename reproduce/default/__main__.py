"""The default of `rainband run` next to plain PyTorch, at equal samples: eight loops, two and four workers, kills.

    python -m reproduce.default                  all runs that are missing, then the table
    python -m reproduce.default --limit 5        at most five of them
    python -m reproduce.default --table          the tables of what was run, on the page and in the README

Each run is a line of results.jsonl, so a long series can be interrupted. Workers are killed by SIGKILL at a random
instant. All survivors must have the same result, and every sample must be accounted for.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reproduce.default.loops import LOOPS

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
PAGE = HERE.parents[1] / "docs" / "results" / "default.md"
README = HERE.parents[1] / "README.md"
BEGIN, END = "<!-- table: python -m reproduce.default --table -->", "<!-- end of the table -->"
SEEDS, LIMIT_S = 5, 600
EXPECTED = {  # steps of one process, and the samples in them
    "cnn": (8 * 45, 8 * 1437),
    "mlp": (12 * 45, 12 * 1437),
    "resnet": (7 * 44, 7 * 44 * 32),
    "frozen": (8 * 45, 8 * 1437),
    "autoencoder": (16 * 90, 16 * 1437),
    "graph": (10 * 64, 10 * 2048),
    "language_model": (600, 600 * 24),
    "table": (12 * 32, 12 * 2000),
}
MEASURES = {"cnn": "accuracy, %", "mlp": "accuracy, %", "resnet": "accuracy, %", "frozen": "accuracy, %"}
TITLES = {
    "cnn": "small CNN with BatchNorm, SGD with momentum 0.9, cosine",
    "mlp": "perceptron, SGD with momentum 0.9 and a high rate",
    "resnet": "image classifier in the style of the ImageNet example",
    "frozen": "pretrained body that is unfrozen, AdamW, OneCycle",
    "autoencoder": "autoencoder, accumulation, averaged parameters",
    "graph": "graph network, Adam, clipping",
    "language_model": "language model in the style of nanoGPT, AdamW",
    "table": "regression, ReduceLROnPlateau",
}
DIGITS = {"autoencoder": 4, "graph": 3, "language_model": 3, "table": 4}


class Setup(NamedTuple):
    """A way to run a loop; no workers: plain PyTorch."""

    workers: int = 0
    killed: int = 0

    def __str__(self) -> str:
        if not self.workers:
            return "plain"
        return f"{self.workers} workers" + (f", {self.killed} killed" if self.killed else "")


SETUPS = (Setup(), Setup(2), Setup(4), Setup(2, 1), Setup(4, 2))
SHORT = SETUPS[:3]  # in the README


class Wrong(Exception):
    """A run broke a promise: survivors differ, or samples are missing."""


def run(loop: str, setup: Setup, seed: int) -> dict[str, Any]:
    """Run one loop once; return its line of the results."""
    with tempfile.TemporaryDirectory() as folder:
        words = [loop, "--seed", str(seed), "--kill", str(setup.killed), "--out", folder]
        command = [sys.executable, str(HERE / "loops.py"), *words]
        if setup.workers:
            start = [sys.executable, "-c", "from rainband.cli.main import main; main()", "run", "--json"]
            more = ["--workers", str(setup.workers), "--threads", "1", "--runs", folder, "--seed", str(seed)]
            command = [*start, *more, *command[1:]]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise Wrong(f"{loop}, {setup}, seed {seed}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        found = [json.loads(file.read_text(encoding="utf-8")) for file in Path(folder).glob("*.json")]
        line = {"loop": loop, "setup": str(setup), "seed": seed, "found": found[0], "seconds": round(seconds, 1)}
        line["commit"] = commit()
        if setup.workers:
            line["accounting"] = check(loop, setup, found, json.loads(done.stdout))
        return line


def check(loop: str, setup: Setup, found: list[float], report: dict[str, Any]) -> Any:
    """Return the account of samples; raise Wrong if survivors differ, or if it does not add up."""
    if len(found) != setup.workers - setup.killed:
        raise Wrong(f"{len(found)} of {setup.workers} workers came to the end: {setup.killed} were to be killed")
    if len(set(found)) > 1:
        raise Wrong(f"the workers have different results: {found}")
    account = report["accounting"]["samples"]
    steps, samples = EXPECTED[loop]
    more = account["rounds"] - steps  # for samples that a killed worker had in the last batch of a pass
    if not 0 <= more <= setup.killed or account["applied"] != samples or account["skipped"] or account["not_seen"]:
        raise Wrong(f"expected {EXPECTED[loop]} rounds and samples: {account}")
    return account


def commit() -> str:
    """Return the commit of the code that runs here."""
    git = ["git", "-C", str(HERE), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


# ---- results ----


def read() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def missing(loops: list[str], seeds: int, setups: Sequence[Setup]) -> Iterator[tuple[str, Setup, int]]:
    have = {(line["loop"], line["setup"], line["seed"]) for line in read()}
    for seed in range(seeds):
        for setup in setups:
            for loop in loops:
                if (loop, str(setup), seed) not in have:
                    yield loop, setup, seed


class Row(NamedTuple):
    """The results of one loop with each setup, over seeds."""

    loop: str
    values: dict[str, list[float]]

    def deviation(self, setup: Setup) -> float:
        """Return the distance of the means in standard errors of their difference."""
        plain, own = self.values[str(Setup())], self.values[str(setup)]
        error = math.sqrt(statistics.variance(plain) / len(plain) + statistics.variance(own) / len(own))
        return (statistics.fmean(own) - statistics.fmean(plain)) / max(error, 1e-12)

    def mean(self, setup: Setup) -> str:
        values, digits = self.values.get(str(setup), []), DIGITS.get(self.loop, 2)
        if len(values) < 2:
            return f"{values[0]:.{digits}f}" if values else "-"
        return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"

    def shown(self, setup: Setup) -> str:
        values, text = self.values.get(str(setup), []), self.mean(setup)
        if 0 < len(values) < SEEDS:
            text += f" [{len(values)} seed{'s' * (len(values) > 1)}]"
        return f"{text} ({self.deviation(setup):+.1f})" if setup.workers and len(values) > 2 else text


def rows() -> list[Row]:
    lines = {(line["loop"], line["setup"], line["seed"]): line["found"] for line in read()}
    found = []
    for loop in LOOPS:
        values: dict[str, list[float]] = {}
        for (name, setup, _), value in sorted(lines.items()):
            if name == loop:
                values.setdefault(setup, []).append(value)
        if len(values.get(str(Setup()), [])) >= 2:
            found.append(Row(loop, values))
    return found


def table() -> str:
    """Return the table of the page, and what it was made from."""
    lines = _head(["loop", "measure", *map(str, SETUPS)])
    for row in rows():
        shown = [row.loop, MEASURES.get(row.loop, "loss"), *(row.shown(setup) for setup in SETUPS)]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join([*lines, "", runs_in_words()])


def short_table() -> str:
    """Return the table of the README."""
    lines = _head(["script", "measure", *map(str, SHORT)])
    for row in rows():
        shown = [TITLES[row.loop], MEASURES.get(row.loop, "loss"), *(row.mean(setup) for setup in SHORT)]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _head(names: list[str]) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def runs_in_words() -> str:
    """Say how many runs there are, and which code they ran with."""
    lines = read()
    commits = Counter(line["commit"] for line in lines)
    of_each = Counter(Counter((line["loop"], line["setup"]) for line in lines).values())
    results = ", ".join(f"{number} have {seeds} seeds" for seeds, number in sorted(of_each.items(), reverse=True))
    total = len(LOOPS) * len(SETUPS)
    by = ", ".join(f"{count} with `{commit}`" for commit, count in commits.items())
    return f"{len(lines)} of {total * SEEDS} runs; of {total} results, {results}. Runs by commit of the code: {by}."


def tables() -> dict[Path, str]:
    """Return the generated part of each file."""
    return {PAGE: table(), README: short_table()}


def written(path: Path) -> str:
    """Return what is written in the generated part of a file."""
    return path.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def write() -> None:
    for path, text in tables().items():
        before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        path.write_text(f"{before}{begin}\n\n{text}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m reproduce.default", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--limit", type=int, default=10**6, help="the largest number of runs")
    parser.add_argument("--loops", nargs="*", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--plain", action="store_true", help="only plain PyTorch")
    parser.add_argument("--table", action="store_true", help="only write the tables")
    asked = parser.parse_args()
    failed = 0
    if not asked.table:
        for number, (loop, setup, seed) in enumerate(
            missing(asked.loops, asked.seeds, SETUPS[: 1 if asked.plain else None])
        ):
            if number >= asked.limit:
                break
            try:
                line = run(loop, setup, seed)
            except Wrong as wrong:
                print(f"WRONG: {loop}, {setup}, seed {seed}: {wrong}", flush=True)
                failed += 1
                continue
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{loop:15} {setup!s:20} seed {seed}: {line['found']:.5g} after {line['seconds']} s", flush=True)
    write()
    print(table())
    if failed:
        raise SystemExit(f"{failed} runs were wrong")


if __name__ == "__main__":
    main()
