"""Disturb the workers of counted.py at random instants, and compare every survivor with plain PyTorch.

    python -m reproduce.default.kills                      50 killed workers
    python -m reproduce.default.kills --kills 0 --stops 20 --joins 10

Workers are killed (SIGKILL), stopped for longer than the failure timeout and continued (SIGSTOP, SIGCONT), and join
(`rainband join`). Compared are the parameters, the steps, both schedulers and the account of samples. A step more is
made only at the end of a pass, for samples that a lost worker had in its last batch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from reproduce.default.counted import EPOCHS, LOSSES, SAMPLES, STEPS, rate

LOOP = Path(__file__).parent / "counted.py"
RAINBAND = [sys.executable, "-c", "from rainband.cli.main import main; main()"]
FAILURE_TIMEOUT_S, LIMIT_S = 1.0, 120.0
STEP_S, STEP_IF_JOINED_S = 0.02, 0.25  # a worker that joins takes seconds to start


class Disturbed:
    """A run with its workers, some of which are killed, stopped or started late."""

    def __init__(self, number: int, workers: int, listen: bool, folder: Path) -> None:
        self.chance = random.Random(number)
        self.loss = LOSSES[number % len(LOSSES)]
        self.folder, self.workers, self.joined = folder, workers, 0
        self.log: list[str] = []
        self.step_s = STEP_IF_JOINED_S if listen else STEP_S
        self.caught_up = 0  # workers that joined, and came to the end
        self.more = 0  # steps
        self.lost: set[int] = set()
        self.excluded: set[int] = set()  # if the others end meanwhile, they do not wait for it
        self.helpers: list[subprocess.Popen[str]] = []
        words = ["run", "--json", "--workers", str(workers), "--failure-timeout", str(FAILURE_TIMEOUT_S)]
        words += ["--threads", "1", "--runs", str(folder / "runs"), *(["--listen", "127.0.0.1:0"] if listen else [])]
        words += self.words()
        self.errors = (folder / "errors.txt").open("w")
        self.process = subprocess.Popen([*RAINBAND, *words], stdout=subprocess.PIPE, stderr=self.errors, text=True)
        self.begun = time.perf_counter()

    def words(self) -> list[str]:
        (self.folder / "out").mkdir(exist_ok=True)
        return [str(LOOP), self.loss, str(self.folder / "out"), "--step-s", str(self.step_s)]

    def pids(self) -> dict[int, int]:
        """Return the processes of the workers that train, by rank."""
        names = [path.name.split(".") for path in (self.folder / "out").glob("*.begun")]
        return {int(rank): int(pid) for rank, pid, _ in names if int(rank) not in self.lost}

    def wait(self) -> None:
        """Wait until all first workers train."""
        while len(self.pids()) < self.workers and self.process.poll() is None:
            time.sleep(0.01)

    def signal(self, rank: int, which: signal.Signals) -> bool:
        done = (self.folder / "out" / f"{rank}.json").exists()
        if not done:
            try:
                os.kill(self.pids()[rank], which)
            except ProcessLookupError:
                return False
            self.log.append(f"{time.perf_counter() - self.begun:.2f} {which.name} {rank}")
        return not done

    def kill(self) -> bool:
        """Kill a worker that trains, unless it is the last one."""
        ranks = sorted(self.pids())
        rank = self.chance.choice(ranks)
        if len(ranks) < 2 or not self.signal(rank, signal.SIGKILL):
            return False
        self.lost.add(rank)
        return True

    def stop(self) -> bool:
        """Stop a worker, and continue it after the others have excluded it, or shortly before."""
        rank = self.chance.choice(sorted(self.pids()))
        if not self.signal(rank, signal.SIGSTOP):
            return False
        seconds = FAILURE_TIMEOUT_S * self.chance.choice((0.7, 1.5, 2.0))
        if seconds > FAILURE_TIMEOUT_S:
            self.excluded.add(rank)
        time.sleep(seconds)
        return self.signal(rank, signal.SIGCONT)

    def join(self) -> bool:
        """Start a worker more, as on another machine."""
        run = next((self.folder / "runs").iterdir())
        self.joined += 1
        where = self.folder / f"{self.joined}.invitation"
        invited = subprocess.run([*RAINBAND, "invite", str(run)], capture_output=True, text=True)
        if invited.returncode:
            return False
        where.touch(mode=0o600)
        where.write_text(invited.stdout, encoding="utf-8")
        command = [*RAINBAND, "join", str(where), "--workers", "1", *self.words()]
        log = (self.folder / f"{self.joined}.join.txt").open("w")
        self.helpers.append(subprocess.Popen(command, stdout=log, stderr=log, text=True, cwd=self.folder))
        self.log.append(f"{time.perf_counter() - self.begun:.2f} join")
        return True

    def problems(self) -> list[str]:
        """Wait for the end; return all that differs from plain PyTorch."""
        try:
            out, _ = self.process.communicate(timeout=LIMIT_S)
            for helper in self.helpers:
                helper.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return ["it does not end"]
        finally:
            for process in (self.process, *self.helpers):
                if process.poll() is None:
                    process.terminate()
            self.errors.close()
        found = {
            path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (self.folder / "out").glob("*.json")
        }
        self.caught_up = sum(int(rank) >= self.workers for rank in found)
        survivors = self.workers - sum(rank < self.workers for rank in self.lost | self.excluded)
        wrong = [f"{len(found)} of {survivors} survivors came to the end"] if len(found) < survivors else []
        if wrong or self.process.returncode:
            errors = (self.folder / "errors.txt").read_text(encoding="utf-8")
            wrong.append(f"exit code {self.process.returncode}: {errors[-2000:]}")
        if self.process.returncode:
            return wrong
        account = json.loads(out)["accounting"]["samples"]
        self.more = account["rounds"] - STEPS
        if not 0 <= self.more <= EPOCHS * any("SIG" in line for line in self.log):
            wrong.append(f"{account['rounds']} rounds, expected {STEPS}")
        if account["applied"] != EPOCHS * SAMPLES or account["skipped"] or account["not_seen"]:
            wrong.append(f"expected {EPOCHS * SAMPLES} samples: {account}")
        expected = dict(plain(self.loss))
        if self.more:
            expected |= {"steps": account["rounds"], "rate": rate(self.loss, account["rounds"])}
        if self.loss == "mean":  # samples of lost parts are in another batch, so only the total is the same
            expected["total"] = sum(rate("mean", step) for step in range(account["rounds"]))
            del expected["uses"], expected["parameters"]
        for rank, own in found.items():
            total = abs(own["total"] / expected["total"] - 1)
            if any(own[name] != value for name, value in expected.items() if name != "total") or total > 1e-5:
                wrong.append(f"worker {rank}: {own}, expected {expected}")
        if len({own["parameters"] for own in found.values()}) != 1:
            wrong.append("the workers have different parameters")
        return wrong


@cache
def plain(which: str) -> dict[str, Any]:
    """Return what plain PyTorch finds."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(LOOP), which, folder], check=True)
        found: dict[str, Any] = json.loads((Path(folder) / "0.json").read_text(encoding="utf-8"))
        return found


def main() -> None:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m reproduce.default.kills", description=description)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=0)
    parser.add_argument("--joins", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="number of the first run")
    asked = parser.parse_args()
    wanted = {"kill": asked.kills, "stop": asked.stops, "join": asked.joins}
    done: Counter[str] = Counter()
    number, bad, caught_up, began = asked.seed, 0, 0, time.perf_counter()
    while any(done[kind] < count for kind, count in wanted.items()):
        left = [kind for kind, count in wanted.items() if done[kind] < count]
        with tempfile.TemporaryDirectory() as name:
            run = Disturbed(number, asked.workers, "join" in left, Path(name))
            run.wait()
            events = [run.chance.choice(left) for _ in range(asked.workers - 1)]
            span = STEPS * run.step_s * (0.8 if "join" in events else 1.6)
            for event in events:
                time.sleep(run.chance.uniform(0, span / len(events)))
                if run.process.poll() is None and getattr(run, event)():
                    done[event] += 1
            wrong = run.problems()
            caught_up += run.caught_up
        bad += bool(wrong)
        result = ("WRONG" if wrong else "ok") + (f", {run.more} more steps" if run.more else "")
        print(f"run {number} ({run.loss}) {result}: {', '.join(run.log)}", *wrong, sep="\n  ", flush=True)
        number += 1
    counted = ", ".join(f"{done[kind]} {kind}s" for kind in wanted) + f" ({caught_up} of these came to the end)"
    print(f"{number - asked.seed} runs with {counted}, {bad} wrong, in {time.perf_counter() - began:.0f} s")
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
