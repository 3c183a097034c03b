"""Measure the points of a claim: tune on two seeds, run on others, and keep each finished point in a file of lines."""

from __future__ import annotations

import datetime
import hashlib
import json
import multiprocessing
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from reproduce.claim import Claim, Method, Results, Settings, Values

FIRST_SEED = 100  # of the seeds that decide; those for tuning are below


class Point(NamedTuple):
    """One run that is to be measured."""

    method: str
    x: float
    seed: int
    settings: Settings

    @property
    def key(self) -> str:
        """Return what identifies its result: with other settings, the file's result is not used."""
        text = json.dumps([self.settings, self.x, self.seed], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """The finished points of one claim, in a file to which each is added when it is done.

    A line with "run" says when, at which commit and by which command those below it were measured. A last line that
    was cut, because the process was killed, is left out.
    """

    def __init__(self, path: Path, resume: bool = True) -> None:
        self.path = path
        self.values: dict[str, Values] = {}
        self.seconds: dict[str, float] = {}
        self.run: dict[str, str] = {}
        if not resume:
            path.unlink(missing_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith("\n"):
            lines.pop()
            path.write_text("".join(lines), encoding="utf-8")
        for line in map(json.loads, lines):
            if "run" in line:
                self.run = line["run"]
            else:
                self.values[line["key"]], self.seconds[line["key"]] = line["values"], line["s"]

    def begin(self, command: str) -> None:
        """Note the run that adds points; nothing is noted if the last one was the same."""
        run = {"command": command, "date": datetime.date.today().isoformat(), "commit": _commit()}
        if run != self.run:
            self.run = run
            self._write({"run": run})

    def add(self, point: Point, values: Values, seconds: float) -> None:
        self.values[point.key], self.seconds[point.key] = values, seconds
        known = {"method": point.method, "x": point.x, "seed": point.seed}
        self._write({**known, "values": values, "s": round(seconds, 2), "key": point.key})

    def _write(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def point_of(claim: Claim, method: Method, task: str, x: float, seed: int, chosen: Settings) -> Point:
    settings = {**claim.settings, **claim.tasks[task], **method.settings, **chosen, **({"task": task} if task else {})}
    return Point(method.name, x, seed, settings)


def tuning_points(claim: Claim) -> Iterator[Point]:
    for method in claim.methods:
        if len(method.grid) > 1:
            for task in claim.tasks:
                for x in claim.x_of(method) if method.tuned_at is None else (method.tuned_at,):
                    for candidate in method.grid:
                        for seed in claim.tuning_seeds:
                            yield point_of(claim, method, task, x, seed, candidate)


def chosen(claim: Claim, store: Store, method: Method, task: str, x: float) -> Settings:
    """Return the settings of the grid with the least mean over the tuning seeds; not a number counts as the worst."""

    def score(candidate: Settings) -> float:
        at = x if method.tuned_at is None else method.tuned_at
        points = [point_of(claim, method, task, at, seed, candidate) for seed in claim.tuning_seeds]
        return float(np.nan_to_num(np.mean([store.values[p.key][claim.tuned_by] for p in points]), nan=np.inf))

    return method.grid[0] if len(method.grid) == 1 else min(method.grid, key=score)


def points(claim: Claim, store: Store, seed: int) -> Iterator[Point]:
    """Return the points of one seed; the tuning must be done."""
    for task in claim.tasks:
        for method in claim.methods:
            for x in claim.x_of(method):
                yield point_of(claim, method, task, x, seed, chosen(claim, store, method, task, x))


def all_points(claim: Claim, store: Store, seeds: int) -> Iterator[Point]:
    for seed in range(FIRST_SEED, FIRST_SEED + (seeds if claim.repeated else 1)):
        yield from points(claim, store, seed)


def is_tuned(claim: Claim, store: Store) -> bool:
    return all(point.key in store.values for point in tuning_points(claim))


def complete_seeds(claim: Claim, store: Store) -> list[int]:
    """Return the seeds, from the first, of which all points are measured."""
    seeds: list[int] = []
    for seed in count(FIRST_SEED) if is_tuned(claim, store) else ():
        if not all(point.key in store.values for point in points(claim, store, seed)):
            break
        seeds.append(seed)
        if not claim.repeated:
            break
    return seeds


def results(claim: Claim, store: Store, task: str, seeds: Sequence[int]) -> Results:
    def values(method: Method, x: float) -> list[Values]:
        best = chosen(claim, store, method, task, x)
        return [store.values[point_of(claim, method, task, x, seed, best).key] for seed in seeds]

    return Results({(method.name, x): values(method, x) for method in claim.methods for x in claim.x_of(method)})


def seconds_of(claim: Claim, store: Store) -> float:
    """Return the seconds that all finished points took, one after the other."""
    if not is_tuned(claim, store):
        return 0.0
    used = [
        *tuning_points(claim),
        *(point for seed in complete_seeds(claim, store) for point in points(claim, store, seed)),
    ]
    return sum(store.seconds[point.key] for point in used)


def measure(claim: Claim, store: Store, seeds: int, jobs: int, command: str = "") -> Iterator[tuple[int, int]]:
    """Measure what is missing, first for tuning and then for the verdict; yield the points done and their number."""
    jobs = 1 if claim.how == "processes" else jobs  # such a run uses the whole machine
    done, later = 0, _count(claim) * (seeds if claim.repeated else 1)
    for phase in (lambda: tuning_points(claim), lambda: all_points(claim, store, seeds)):
        todo = {point.key: point for point in phase() if point.key not in store.values}
        if todo:
            store.begin(command)
        total, later = done + len(todo) + later, 0  # how many of the second are missing is known after tuning
        for point, values, seconds in _measured(claim, list(todo.values()), jobs):
            store.add(point, values, seconds)
            done += 1
            yield done, total


def _count(claim: Claim) -> int:
    """Return the number of points of one seed."""
    return sum(len(claim.x_of(method)) for method in claim.methods) * len(claim.tasks)


def _measured(claim: Claim, todo: Sequence[Point], jobs: int) -> Iterator[tuple[Point, Values, float]]:
    if jobs == 1:
        for point in todo:
            yield (point, *_timed(claim.point, point))
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        pending = {pool.submit(_timed, claim.point, point): point for point in todo}
        try:
            for future in as_completed(pending):
                yield (pending[future], *future.result())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _timed(measure_one: Any, point: Point) -> tuple[Values, float]:
    began = time.perf_counter()
    values = measure_one(point.seed, point.x, **point.settings)
    return {name: float(value) for name, value in values.items()}, time.perf_counter() - began
