"""Runs on a Ray cluster: the same numbers as in processes, whatever is killed."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import rainband
from rainband.errors import RainbandError
from rainband.protocol import events
from tests.gated import Gate, Gated
from tests.processes import LR, wait_for
from tests.ray_runs import (  # noqa: F401 (fixtures)
    HOST,
    TIMEOUT_S,
    RayCluster,
    RayRun,
    connected_cluster,
    driver,
    is_exact,
    ray_cluster,
    ray_run,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]
SHARED = rainband.Sync(lr=LR, optimizer="sgd")
KILLED = "killed by signal 9, often because memory ran out"


def rejoins(run: RayRun, worker: int) -> None:
    """Wait until a worker has joined a second time."""
    joined = lambda: len(run.all(events.Joined, node=f"worker {worker}"))  # noqa: E731
    wait_for(lambda: run.returned or joined() == 2, "the return of a worker", 60.0)
    assert joined() == 2, run.returned


@pytest.mark.usefixtures("ray_cluster")
def test_a_killed_worker_returns_and_every_batch_counts_once(connected_cluster: RayCluster, tmp_path: Path) -> None:  # noqa: F811
    @dataclass(frozen=True)
    class Local(Gated):
        """A task that cannot be imported."""

        says: str = "computed by a task of the driver's"

    with ray_run(connected_cluster, tmp_path, Local, transport="tcp") as run:
        run.under_way()
        run.let(20)
        run.process("rainband worker 1").kill()
        run.first(events.Lost, node="worker 1", why=KILLED)
        run.let(20)
        rejoins(run, 1)
        result = run.result()

    assert is_exact(result, Gated())
    assert result.accounting.lost == result.accounting.applied_twice == 0
    assert {link.links for link in run.all(events.Linked)} == {("tls",)}
    assert "computed by a task of the driver's" in (result.directory / "output.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["itself", "itself, which hangs", "its actor", "its actor, which hangs"])
@pytest.mark.parametrize("nodes", ["one node", "two nodes"])
def test_workers_that_share_batches_are_replaced(
    connected_cluster: RayCluster,  # noqa: F811
    tmp_path: Path,
    nodes: str,
    what: str,
) -> None:
    """On one node, they have one actor, which starts the one that is lost beside the other."""
    needs = {"CPU": 1.0 if nodes == "one node" else 1.5}
    with ray_run(
        connected_cluster, tmp_path, strategy=SHARED, servers=None, parts="equal", worker_resources=needs
    ) as run:
        run.under_way()
        run.let(20)
        worker = run.process("rainband worker 1")
        actor = worker.parent().parent()  # type: ignore[union-attr]
        other = run.process("rainband worker 0").parent().parent()  # type: ignore[union-attr]
        assert (actor == other) == (nodes == "one node")
        if what == "itself":
            worker.kill()
        elif what == "itself, which hangs":
            worker.suspend()
        elif what == "its actor":
            actor.kill()
        else:
            actor.suspend()
        run.first(events.Lost, node="worker 1") if "hangs" not in what else None
        run.let(20)
        wait_for(lambda: run.returned or not worker.is_running(), "the end of the earlier worker 1", 60.0)
        rejoins(run, 1)
        result = run.result()
    assert is_exact(result, Gated())
    assert result.accounting.lost == result.accounting.applied_twice == 0


@pytest.mark.slow
@pytest.mark.parametrize("what", ["its actor", "its actor, which hangs", "itself, which hangs"])
def test_a_worker_whose_actor_is_lost_or_that_hangs_is_replaced(
    connected_cluster: RayCluster,  # noqa: F811
    tmp_path: Path,
    what: str,
) -> None:
    with ray_run(connected_cluster, tmp_path) as run:
        run.under_way()
        run.let(20)
        worker = run.process("rainband worker 1")
        actor = worker.parent().parent()  # type: ignore[union-attr]
        assert actor.name().startswith(HOST) or HOST in " ".join(actor.cmdline())
        if what == "its actor":
            actor.kill()
        elif what == "itself, which hangs":
            worker.suspend()
        else:
            actor.suspend()
            worker.suspend()
        run.first(events.Lost, node="worker 1")
        run.let(20)
        rejoins(run, 1)
        wait_for(lambda: not worker.is_running(), "the end of the earlier worker 1")
        result = run.result()
    assert is_exact(result, Gated())
    assert result.accounting.lost == result.accounting.applied_twice == 0


@pytest.mark.slow
def test_an_actor_that_hangs_while_its_worker_computes_disturbs_nobody(
    connected_cluster: RayCluster,  # noqa: F811
    tmp_path: Path,
) -> None:
    with ray_run(connected_cluster, tmp_path) as run:
        run.under_way()
        actor = run.process("rainband worker 1").parent().parent()  # type: ignore[union-attr]
        actor.suspend()
        before = len(run.all(events.Progress))
        wait_for(lambda: len(run.all(events.Progress)) > before + 3 * TIMEOUT_S, "some failure timeouts")
        actor.resume()
        result = run.result()
    assert run.all(events.Lost) == [] and is_exact(result, Gated())


@pytest.mark.slow
def test_a_worker_of_a_lost_node_ends_and_returns_on_another_node(
    connected_cluster: RayCluster,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Ray itself would let it compute on for many seconds, and start it again after 15 s."""
    with ray_run(connected_cluster, tmp_path, workers=2, worker_resources={"CPU": 1.5}) as run:  # one on each node
        run.under_way()
        run.let(20)
        raylets = {
            connected_cluster.raylet_of(run.process(f"rainband {name}")): name for name in ("worker 0", "worker 1")
        }
        raylets.pop(connected_cluster.raylet_of(run.process("rainband server 0")), None)
        raylets.pop(connected_cluster.head, None)
        raylet, name = next(iter(raylets.items()))
        ghost = run.process(f"rainband {name}")
        connected_cluster.replace(raylet)
        wait_for(lambda: not ghost.is_running(), "the end of the worker on the lost node", TIMEOUT_S)
        run.first(events.Lost, node=name)
        run.let(20)
        rejoins(run, int(name.removeprefix("worker ")))
        result = run.result()
    assert is_exact(result, Gated())
    assert result.accounting.lost == result.accounting.applied_twice == 0


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP, signal.SIGINT])
def test_nothing_is_left_when_the_driver_is_lost_hangs_or_is_interrupted(
    ray_cluster: RayCluster,  # noqa: F811
    tmp_path: Path,
    signum: int,
) -> None:
    program = f"""
import rainband
from tests.gated import Gated
rainband.fit(Gated({str(tmp_path / "gate")!r}), "downpour", runtime="ray", workers=2, servers=1,
    failure_timeout_s={TIMEOUT_S}, runs={str(tmp_path / "runs")!r})
"""
    gate = Gate(tmp_path / "gate")
    try:
        with driver(ray_cluster, tmp_path, program) as process:
            wait_for(lambda: process.poll() is not None or len(gate.begun()) == 2, "the workers", 60.0)
            assert process.poll() is None, (tmp_path / "driver.out").read_text()
            os.kill(process.pid, signum)
            if signum == signal.SIGINT:
                gate.open()
            wait_for(lambda: not ray_cluster.processes(), "the end of all processes", 2 * TIMEOUT_S)
            if signum == signal.SIGINT:
                assert process.wait(30) == 0
    finally:
        gate.close()


@pytest.mark.slow
def test_a_task_that_fails_leaves_nothing(connected_cluster: RayCluster, tmp_path: Path) -> None:  # noqa: F811
    with ray_run(connected_cluster, tmp_path, lambda gate: Gated(gate, crash_at=7)) as run:
        run.open()
        run.thread.join(60)
    assert isinstance(run.returned, RainbandError) and "sample 7 is one too many" in str(run.returned)
    run.left_nothing()


@pytest.mark.slow
def test_more_workers_join_as_soon_as_there_is_room(connected_cluster: RayCluster, tmp_path: Path) -> None:  # noqa: F811
    with ray_run(connected_cluster, tmp_path, workers=(1, 3)) as run:
        run.under_way(1)
        run.let(4)
        wait_for(lambda: len(run.all(events.Joined)) == 4, "a server and three workers", 60.0)
        result = run.result()
    assert is_exact(result, Gated())


@pytest.mark.slow
def test_the_command_line_trains_on_ray(ray_cluster: RayCluster, tmp_path: Path) -> None:  # noqa: F811
    words = ["rainband", "train", "mylab:mine", "downpour", "--runtime", "ray", "--address", ray_cluster.address]
    words += ["--workers", "2", "--servers", "1", "--worker-resources", "CPU=1"]
    (tmp_path / "mylab.py").write_text("from helper import mine\n")
    (tmp_path / "helper.py").write_text(
        "from rainband.tasks.linear import Linear\n\ndef mine():\n    return Linear(samples=64, epochs=1)\n"
    )
    program = f"import sys; sys.argv = {words!r}; from rainband.cli.main import main; main()"
    with driver(ray_cluster, tmp_path, program) as process:
        assert process.wait(60) == 0, (tmp_path / "driver.out").read_text()
    assert "16 of 16 applied" in (tmp_path / "driver.out").read_text()
    assert not ray_cluster.processes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray Data's own code
def test_a_ray_dataset_is_the_data_of_a_task(connected_cluster: RayCluster, tmp_path: Path) -> None:  # noqa: F811
    """The gradient of sample i is targets[i] * inputs[i], so the result is -lr / batch_size * their sum, exactly."""
    import ray.data

    inputs, targets = np.arange(64 * 3, dtype=np.float32).reshape(64, 3) % 8, np.arange(64, dtype=np.float32) % 4
    rows = [{"x": x, "y": y} for x, y in zip(inputs, targets, strict=True)]
    dataset = ray.data.from_items(rows)

    def linear() -> torch.nn.Module:
        module = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(module.weight)
        return module

    task = rainband.ModuleTask(linear, dataset, lambda out, y: (out.flatten() * y).mean(), batch_size=4, epochs=2)
    strategy = rainband.Downpour(lr=LR, optimizer="sgd")
    result = rainband.fit(task, strategy, 2, 1, runtime="ray", runs=tmp_path / "runs")
    assert result.module.weight.tolist() == [(-2 * LR / 4 * (inputs * targets[:, None]).sum(0)).tolist()]
    with pytest.raises(ValueError, match="the Ray dataset has the columns x, and a task needs two"):
        rainband.fit(rainband.ModuleTask(linear, dataset.select_columns(["x"]), task.loss_fn), strategy, runtime="ray")
