"""Training on three machines over 1 Gbit and 100 Mbit, with TLS, against DDP over gloo without; joining a run; Ray.

The machines are network namespaces of this one, and share its processors: what is measured is the way over the
network. All processes of a measurement end with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rainband.bench.baselines.data_parallel import TrainOrder
from rainband.bench.cases.sim import STEPS, measured
from rainband.bench.harness import on_ray
from rainband.bench.harness.machine_runs import await_found, events_in, number_of, running, start
from rainband.bench.harness.machines import Machines, NoMachines
from rainband.bench.harness.rows import Effort, Row, at_least, at_most
from rainband.bench.harness.tls_links import measure_tls, with_tls_links
from rainband.record.calibrate import calibrate
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation import run as sim
from rainband.runtimes.simulation.models.cluster_model import to_toml

SIZE = "5.8M"
MACHINES = 3
PORT = 7070
DDP = "import sys; from rainband.bench.baselines import data_parallel as d; d.train_main(sys.stdin.buffer.read(), [1])"
PREDICTED_EPOCHS = 10
GBIT_BYTES = 125e6
BATCH = 64  # of one machine


def run(effort: Effort) -> Iterator[Row]:
    yield from on_ray.rows(effort)
    seconds = 15.0 if effort == "full" else 6.0
    machines = Machines(MACHINES)
    try:
        machines.make()
    except NoMachines as error:
        print(f"bench machines is left out: {error}", file=sys.stderr)
        return
    try:
        machines.limit(1000)
        yield from _gigabit(machines, seconds)
        machines.limit(100)
        seconds *= 2  # a push of a worker takes up to 4 s
        ddp = _ddp(machines, seconds)
        yield Row(f"DDP/gloo, {MACHINES} machines, {SIZE}, 100 Mbit", ddp, "samples/s")
        slow = ["downpour", "n_push=4", "n_fetch=4"]
        ours = _train(machines, seconds, slow, servers=1)
        yield at_least("downpour n_push=4, 100 Mbit", ours.samples_per_s / ddp, 2.0, "DDP/gloo")
        yield from _prediction(100, slow, _train(machines, seconds, slow, servers=1, workers=0).samples_per_s)
    finally:
        machines.remove()


def _gigabit(machines: Machines, seconds: float) -> Iterator[Row]:
    ddp = _ddp(machines, seconds)
    yield Row(f"DDP/gloo, {MACHINES} machines, {SIZE}, 1 Gbit", ddp, "samples/s")
    downpour = _train(machines, seconds, ["downpour"], servers=1)
    yield Row(f"downpour, {MACHINES} machines, {SIZE}, 1 Gbit, TLS", downpour.samples_per_s, "samples/s")
    yield at_least("downpour, 1 Gbit", downpour.sent_per_s / GBIT_BYTES, 0.85, "the link of the servers' machine")
    yield at_least("downpour, 1 Gbit", downpour.samples_per_s / ddp, 1.0, "DDP/gloo")
    yield at_most("from rainband join to the connection of its worker", downpour.joined_s, 3.0, "", "s")
    apart = _train(machines, seconds, ["downpour"], servers=1, workers=0).samples_per_s
    yield from _prediction(1000, ["downpour"], apart)
    shared = _train(machines, seconds, ["sync", f"--batch-size={BATCH * MACHINES}"], servers=0)
    yield Row(f"sync, {MACHINES} machines, {SIZE}, 1 Gbit, TLS", shared.samples_per_s, "samples/s")
    yield at_least("sync, 1 Gbit", shared.samples_per_s / ddp, 1.0, "DDP/gloo at the same batch")
    yield from _prediction(1000, ["sync"], shared.samples_per_s)


def _prediction(mbit: int, words: Sequence[str], real: float) -> Iterator[Row]:
    """Compare the simulation with the rate of a run whose nodes are on machines of their own.

    With a server, that is on the first machine, without workers. The simulation is given the numbers of the links,
    and the costs of computing and encrypting that are measured.
    """
    strategy, *settings = words
    servers = int(strategy == "downpour")
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            task="mlp",
            task_settings={"parameters": SIZE},
            strategy=strategy,
            strategy_settings={name: int(value) for name, value in (one.split("=") for one in settings)},
            batch_size=BATCH if servers else BATCH * MACHINES,
            num_workers=MACHINES - servers,
            num_servers=servers,
            directory=folder,
        )
        file = Path(folder, "model.toml")
        with_server = msgspec.structs.replace(config, strategy="downpour", num_servers=1)  # only these are calibrated
        costs = with_tls_links(calibrate(with_server, steps=STEPS[SIZE]), mbit, measure_tls())
        file.write_text(to_toml(costs), encoding="utf-8")
        virtual = msgspec.structs.replace(
            config, epochs=PREDICTED_EPOCHS, sim=SimSettings(model=str(file), time_only=True)
        )
        predicted = measured(virtual, sim.run).rate
    nodes = f"a server and {MACHINES - servers} workers" if servers else f"{MACHINES} workers"
    name = f"{' '.join(words)}, {nodes}, {SIZE}, {mbit} Mbit"
    yield Row(f"{name}: measured", real, "samples/s")
    yield Row(f"{name}: predicted", predicted, "samples/s")
    yield at_most(f"{name}: relative error", abs(predicted / real - 1), 0.2, "the real run", unit="")


def _ddp(machines: Machines, seconds: float) -> float:
    """Return the samples per second of all ranks."""
    ranks = []
    for rank in range(MACHINES):
        order = TrainOrder(SIZE, seconds, rank, PORT, machines.address(0), MACHINES)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": machines.card(rank), "OMP_NUM_THREADS": "1"}
        ranks.append(start(machines, rank, DDP, [], environment, subprocess.PIPE))
        assert ranks[-1].stdin is not None
        ranks[-1].stdin.write(msgspec.msgpack.encode(order))
        ranks[-1].stdin.close()
    samples = 0.0
    for process in ranks:
        assert process.stdout is not None
        found = process.stdout.read()
        process.stdout.close()
        if process.wait() or not found:
            raise RuntimeError("DDP over gloo failed: see its output above.")
        samples += msgspec.msgpack.decode(found, type=list[float])[0]
    return samples


class Trained(msgspec.Struct, frozen=True):
    """Measurements while workers of all machines trained."""

    samples_per_s: float
    sent_per_s: float  # bytes, by the run's machine
    joined_s: float  # from starting the command until its worker is connected


def _train(machines: Machines, seconds: float, words: Sequence[str], servers: int, workers: int = 1) -> Trained:
    """Train with a worker on each machine; `workers`: on the first one."""
    with tempfile.TemporaryDirectory() as root:
        listen = f"{machines.address(0)}:{PORT}"
        options = [
            "--workers",
            str(workers),
            "--listen",
            listen,
            "--epochs",
            "100000",
            "--eval-every",
            "0",
            "--runs",
            root,
        ]
        options += ["--servers", str(servers)] if servers else []
        strategy, *rest = words
        with running(machines, 0, ["train", "mlp", strategy, f"task.parameters={SIZE}", *rest, *options]):
            invitation = await_found(lambda: next(iter(Path(root).glob("*/invite.txt")), None), "the invitation")
            events = invitation.parent / "events.jsonl"
            await_found(lambda: number_of(events, "FirstStep" if workers else "Listening") or None, "the first step")
            started = time.perf_counter()
            with running(machines, 1, ["join", str(invitation), "--workers", "1"]):
                await_found(lambda: number_of(events, "Linked") > workers or None, "the second machine")
                joined_s = time.perf_counter() - started
                with running(machines, 2, ["join", str(invitation), "--workers", "1"]):
                    number = workers + MACHINES - 1
                    await_found(lambda: len(working(events_in(events))) >= number or None, "the third machine's work")
                    before, sent, at = _samples(events), machines.bytes_sent(0), time.perf_counter()
                    time.sleep(seconds)
                    after, sent_then, until = _samples(events), machines.bytes_sent(0), time.perf_counter()
    samples, at_s = (after[k] - before[k] for k in range(2))
    if not samples or not at_s:
        raise RuntimeError("the run has made no progress while it was measured.")
    return Trained(samples / at_s, (sent_then - sent) / (until - at), joined_s)


def working(events: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the workers whose samples have been counted: on a slow link, that is long after they have joined."""
    progress = [one["samples_per_s"] for one in events if one["event"] == "Progress"]
    return {worker for rates in progress for worker, rate in rates.items() if rate > 0}


def _samples(path: Path) -> tuple[float, float]:
    """Return the samples done at the last progress, and when that was."""
    last = [one for one in events_in(path) if one["event"] == "Progress"][-1]
    return float(last["samples_done"]), float(last["at_s"])
