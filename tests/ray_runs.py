"""Real runs on a real Ray of three nodes on this machine, for tests: watched and harmed from outside."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import rainband
from rainband.fit import FitResult
from rainband.protocol import events
from tests.gated import Gate, Gated
from tests.processes import LR, ROOT, E, wait_for

NODES, CPUS = 3, 2  # of each node
TIMEOUT_S = 5.0  # the failure timeout of these runs
DEADLINE_S = 45.0
HOST = "ray::RoleHost"


class RayCluster:
    """A cluster, with its processes."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.raylets = [raylet_of(node) for node in cluster.list_all_nodes()]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """The processes of runs below the nodes: actors, fork servers, workers, servers."""
        found = []
        for raylet in self.raylets:
            with suppress(psutil.NoSuchProcess):
                found += [child for child in psutil.Process(raylet).children(recursive=True) if is_of_run(child)]
        return [process for process in found if title_of(process).startswith(name)]

    @property
    def head(self) -> int:
        return raylet_of(self.cluster.head_node)

    def raylet_of(self, process: psutil.Process) -> int:
        """The manager of the node that a process of a run is on."""
        return next(parent.pid for parent in process.parents() if parent.pid in self.raylets)

    def replace(self, raylet: int) -> None:
        """Kill a node's manager, as if the node was lost, and add another node."""
        os.kill(raylet, signal.SIGKILL)
        self.cluster.add_node(num_cpus=CPUS)
        self.raylets = [raylet_of(node) for node in self.cluster.list_all_nodes()]


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def title_of(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def is_of_run(process: psutil.Process) -> bool:
    return title_of(process).startswith(("rainband", HOST))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """A cluster that demands a token; skipped where Ray is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")  # before Ray is imported
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_worker_niceness", "0")  # otherwise other programs of a busy machine starve the actors
        patch.delenv("RAY_ADDRESS", raising=False)
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'rainband[ray]'")
        from ray._raylet import Config
        from ray.cluster_utils import Cluster

        Config.initialize("")  # reads the variables again, if another test has imported Ray before
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
        try:
            for _ in range(NODES - 1):
                cluster.add_node(num_cpus=CPUS, wait=False)
            cluster.wait_for_nodes()
            yield RayCluster(cluster)
        finally:
            cluster.shutdown()


@pytest.fixture
def connected_cluster(ray_cluster: RayCluster) -> Iterator[RayCluster]:
    """The cluster, to which this process is connected, as after a `ray.init` of the user's."""
    import ray

    ray.init(address=ray_cluster.address, log_to_driver=False)
    yield ray_cluster
    ray.shutdown()


class RayRun:
    """A run of `fit` on a thread of this process, with a gate before every batch."""

    def __init__(self, cluster: RayCluster, path: Path, task: Any, gate: Gate | None, **options: Any) -> None:
        self.cluster, self.gate, self.seen = cluster, gate, list[events.AnyEvent]()
        self.returned: FitResult | BaseException | None = None

        def train() -> None:
            try:
                strategy = options.pop("strategy", rainband.Downpour(lr=LR, optimizer="sgd"))
                self.returned = rainband.fit(
                    task,
                    strategy,
                    runtime="ray",
                    runs=path / "runs",
                    failure_timeout_s=TIMEOUT_S,
                    on_event=self.seen.append,
                    **{"workers": 2, "servers": 1, **options},
                )
            except BaseException as error:
                self.returned = error

        self.thread = threading.Thread(target=train, daemon=True)
        self.thread.start()

    def all(self, kind: type[E], **fields: Any) -> list[E]:
        return [
            event
            for event in list(self.seen)
            if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items())
        ]

    def first(self, kind: type[E], **fields: Any) -> E:
        def found() -> list[E]:
            some = self.all(kind, **fields)
            assert some or self.returned is None, f"it ended without {kind.__name__}: {self.returned} {self.seen}"
            return some

        return wait_for(found, f"{kind.__name__} {fields}", DEADLINE_S)[0]

    def let(self, num_batches: int) -> None:
        """Let some more batches pass."""
        assert self.gate is not None
        self.gate.let(num_batches)

    def open(self) -> None:
        assert self.gate is not None
        self.gate.open()

    def under_way(self, workers: int = 2) -> None:
        """Wait until all workers have come to the gate with work."""
        assert self.gate is not None
        gate = self.gate
        wait_for(lambda: self.returned or len(gate.begun()) >= workers, "all workers at the gate", DEADLINE_S)
        assert self.returned is None, self.returned

    def process(self, name: str) -> psutil.Process:
        """One of its processes, such as "rainband worker 1"."""
        (process,) = wait_for(lambda: self.cluster.processes(name), name)
        return process

    def result(self) -> FitResult:
        """Let all batches pass, and return what `fit` returns; afterwards no process is left."""
        if self.gate is not None:
            self.gate.open()
        self.thread.join(DEADLINE_S)
        assert isinstance(self.returned, FitResult), (self.returned, self.seen)
        self.left_nothing()
        return self.returned

    def left_nothing(self) -> None:
        wait_for(lambda: not self.cluster.processes(), "the end of all processes")


@contextmanager
def ray_run(
    cluster: RayCluster, path: Path, task: Callable[[str], Any] | None = None, **options: Any
) -> Iterator[RayRun]:
    """Start a run whose batches wait at a gate."""
    gate = Gate(path / "gate")
    made = Gated(str(gate.folder)) if task is None else task(str(gate.folder))
    run = RayRun(cluster, path, made, gate, **options)
    try:
        yield run
    finally:
        gate.open()
        run.thread.join(DEADLINE_S)
        gate.close()


def is_exact(result: FitResult, task: Gated) -> bool:
    """Return True if the parameters are those of every batch applied exactly once, to the last bit."""
    num_steps = task.samples // task.batch_size * task.epochs
    wanted = {"weight": task.linear.after(LR).tolist(), "bias": [-LR * num_steps]}
    got = {name: values.flatten().tolist() for name, values in result.module.state_dict().items()}
    return got == wanted


@contextmanager
def driver(cluster: RayCluster, path: Path, program: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program as the driver of a run, in a process of its own."""
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT)}
    with (path / "driver.out").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=path,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
