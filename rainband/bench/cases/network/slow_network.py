"""Time to a fixed accuracy on four machines, over 100 Mbit and 1 Gbit: DDP over gloo against ours, also with codecs.

The machines are network namespaces of this one, and share its processors; `tc` limits what each sends. Ours are
encrypted, DDP is not. All have the same rate, not tuned for each: what is compared is the way over the network.
`all_reduce` is for one machine, and refuses several.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

from rainband.bench.baselines.time_to_target import TargetOrder
from rainband.bench.harness.machine_runs import await_found, number_of, running, start
from rainband.bench.harness.machines import Machines, NoMachines
from rainband.bench.harness.rows import Effort, Row, at_least
from rainband.views.history import read_run

MACHINES = 4
PORT = 7070
PARAMETERS, SAMPLES = "0.7M", 8192
BATCH, LR, ACCURACY = 64, 0.2, 0.5
DDP = "import sys; from rainband.bench.baselines import time_to_target as t; t.main(sys.stdin.buffer.read(), [1])"


class Method(NamedTuple):
    """One way to train."""

    words: tuple[str, ...]  # the strategy and its settings
    servers: int = 0
    codec: str = ""

    @property
    def name(self) -> str:
        return " ".join(self.words) + (f", {self.codec}" if self.codec else "")


SYNC = ("sync", f"lr={LR}", "optimizer=sgd")
DOWNPOUR = ("downpour", f"lr={LR}", "optimizer=sgd")
EVERY_4 = (*DOWNPOUR, "n_push=4", "n_fetch=4", f"local_lr={LR}")
AVERAGING = ("averaging", f"lr={LR}", "optimizer=sgd", "period=16")
ALONE = Method(("single", f"lr={LR}", "optimizer=sgd"))  # one machine without a network: what four must beat
METHODS = (
    ALONE,
    *(Method(SYNC), Method(SYNC, codec="bf16"), Method(SYNC, codec="sign"), Method(SYNC, codec="topk:0.01")),
    *(Method(AVERAGING), Method(AVERAGING, codec="bf16"), Method(("diloco", f"lr={LR}", "optimizer=sgd", "period=16"))),
    Method(("gossip", f"lr={LR}", "optimizer=sgd")),
    *(Method(DOWNPOUR, 1), Method(DOWNPOUR, 1, "topk:0.01"), Method(EVERY_4, 1), Method(EVERY_4, 1, "topk:0.01")),
)
QUICK = (ALONE, Method(SYNC), Method(SYNC, codec="topk:0.01"), Method(EVERY_4, 1, "topk:0.01"))


def run(effort: Effort) -> Iterator[Row]:
    limit_s = 75.0 if effort == "full" else 40.0
    machines = Machines(MACHINES)
    try:
        machines.make()
    except NoMachines as error:
        print(f"bench slow_network is left out: {error}", file=sys.stderr)
        return
    try:
        for mbit in (100, 1000) if effort == "full" else (100,):
            machines.limit(mbit)
            yield from _at(machines, mbit, METHODS if effort == "full" else QUICK, limit_s)
    finally:
        machines.remove()


def _at(machines: Machines, mbit: int, methods: tuple[Method, ...], limit_s: float) -> Iterator[Row]:
    ddp = _ddp(machines, limit_s)
    where = f"{mbit} Mbit, {PARAMETERS}, to {100 * ACCURACY:g} %"
    yield Row(f"DDP/gloo, {where}", ddp, "s")
    best = math.inf
    for method in methods:
        seconds = _train(machines, method, limit_s)
        best = min(best, seconds if method != ALONE else math.inf)
        yield Row(f"{method.name}, {where}", seconds, "s", f"{ddp / seconds:.2g} times as fast as DDP")
    if mbit == 100:
        yield at_least(f"the soonest, {where}", ddp / best, 5.0, "DDP/gloo")


def _ddp(machines: Machines, limit_s: float) -> float:
    ranks: list[subprocess.Popen[bytes]] = []
    for rank in range(MACHINES):
        order = TargetOrder(
            PARAMETERS, SAMPLES, BATCH, LR, ACCURACY, limit_s, rank, MACHINES, machines.address(0), PORT
        )
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": machines.card(rank), "OMP_NUM_THREADS": "1"}
        ranks.append(start(machines, rank, DDP, [], environment, subprocess.PIPE))
        stdin = ranks[-1].stdin
        assert stdin is not None
        stdin.write(msgspec.msgpack.encode(order))
        stdin.close()
    found = [process.communicate()[0] if process.stdin is None else _output(process) for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError("DDP over gloo failed.")
    return msgspec.msgpack.decode(found[0], type=float)


def _output(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    found = process.stdout.read()
    process.stdout.close()
    process.wait()
    return found


def _train(machines: Machines, method: Method, limit_s: float) -> float:
    """Return the seconds of training until the accuracy; infinity if it was not reached."""
    strategy, *settings = method.words
    batch = BATCH * MACHINES if strategy == "sync" else BATCH
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        words = ["train", "mlp", strategy, f"task.parameters={PARAMETERS}", f"task.samples={SAMPLES}", *settings]
        words += ["--workers", "1"]
        if method != ALONE:
            words += ["--min-workers", str(MACHINES), "--listen", f"{machines.address(0)}:{PORT}"]
        words += ["--epochs", "100000", "--batch-size", str(batch), "--target", f"accuracy={ACCURACY}", "--runs", root]
        words += ["--codec", method.codec] if method.codec else []
        words += ["--servers", str(method.servers)] if method.servers else []
        stack.enter_context(running(machines, 0, words))
        first = "config.json" if method == ALONE else "invite.txt"  # there before any event
        directory = await_found(lambda: next(Path(root).glob(f"*/{first}"), None), "the run").parent
        for index in range(1, 1 if method == ALONE else MACHINES):
            words = ["join", str(directory / "invite.txt"), "--workers", "1"]
            stack.enter_context(running(machines, index, words))
        events = directory / "events.jsonl"
        await_found(lambda: number_of(events, "FirstStep") or None, "the first step")
        try:
            await_found(lambda: number_of(events, "TargetReached") or None, "the accuracy", limit_s)
        except RuntimeError:
            return math.inf
        so_far = read_run(directory).so_far
        assert so_far.target is not None
        return so_far.target.at_s - (so_far.training.began_s or 0.0)
