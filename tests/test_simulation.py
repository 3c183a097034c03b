"""Runs in virtual time: who waits for whom, real gradients, the same bits from the same seed, and no hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from rainband.cli.main import build_app
from rainband.coordinator.coordinator import RunSettings
from rainband.errors import Deadlock
from rainband.model.flat_parameters import Flat
from rainband.plugins import load_strategy
from rainband.protocol import events
from rainband.rules import ApplyOnArrival
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation import run as sim
from rainband.runtimes.simulation.aggregated import AggregatedServersNode, make_aggregated
from rainband.runtimes.simulation.cluster import Notes, SimulatedCluster
from rainband.runtimes.simulation.gradients import TimingOnly
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.runtimes.simulation.models.trace import Line, read_lines
from rainband.runtimes.simulation.run import scenario_of
from rainband.runtimes.simulation.worker import WorkerNode
from rainband.strategies.downpour import Downpour
from rainband.strategy import ServerPart
from rainband.tasks.linear import Linear
from rainband.tasks.load import load_task
from rainband.views.spans import Span

PER_WORKER = {"batch_per_worker": True}  # sync with servers
INSTANT = ClusterModel(
    NetworkModel(latency_s=0.0, bytes_per_s=inf),
    ComputeModel(kind="constant", step_s=1.0),
    NodeModel(apply_bytes_per_s=inf, read_bytes_per_s=inf, push_bytes_per_s=inf, pull_bytes_per_s=inf, message_s=0.0),
)
TASK = Linear(dimension=48, samples=32, batch_size=2, epochs=1)  # 16 batches


def cluster_of(
    strategy: object,
    num_workers: int,
    model: ClusterModel = INSTANT,
    num_servers: int = 2,
    real: bool = True,
    task: Linear = TASK,
) -> SimulatedCluster:
    scenario = scenario_of(strategy, task, Flat(task.model()), task.data(), num_workers)  # type: ignore[arg-type]
    if not real:
        empty = TimingOnly(num_workers)
        scenario = replace(scenario, make_compute=lambda: empty, real=False)
    settings = RunSettings(num_workers=num_workers, num_servers=num_servers)
    spans: list[Span] = []
    return SimulatedCluster(scenario, settings, model, Notes(spans=spans))


def parameters(cluster: SimulatedCluster, dimension: int = TASK.dimension) -> torch.Tensor:
    values = torch.zeros(dimension)
    for node in cluster.servers.values():
        for block in node.server.blocks.values():
            values[block.spec.start : block.spec.stop] = block.buffer.at(block.version)
    return values


def steps_of(cluster: SimulatedCluster, worker: int) -> int:
    assert cluster.spans is not None
    return sum(span.what == "compute" and span.node == f"worker {worker}" for span in cluster.spans)


# ---- who waits for whom ----


def test_two_workers_take_half_the_steps_each_and_half_the_time() -> None:
    cluster = cluster_of(Downpour(), 2)
    cluster.start()
    cluster.run()
    assert (cluster.clock.now, steps_of(cluster, 0), steps_of(cluster, 1)) == (8.0, 8, 8)


def test_with_downpour_a_fast_worker_does_the_slow_ones_work() -> None:
    slow = ComputeModel(kind="constant", step_s=1.0, slow_workers=(1,), slow_factor=3.0)
    cluster = cluster_of(Downpour(), 2, ClusterModel(INSTANT.network, slow, INSTANT.nodes))
    cluster.start()
    cluster.run()
    assert (steps_of(cluster, 0), steps_of(cluster, 1), cluster.clock.now) == (12, 4, 12.0)
    assert cluster.workers[0].stats.waited_s == 0.0


def test_with_sync_everyone_waits_for_the_slow_one() -> None:
    slow = ComputeModel(kind="constant", step_s=1.0, slow_workers=(1,), slow_factor=3.0)
    cluster = cluster_of(load_strategy("sync", PER_WORKER), 2, ClusterModel(INSTANT.network, slow, INSTANT.nodes))
    cluster.start()
    cluster.run()
    assert (steps_of(cluster, 0), steps_of(cluster, 1), cluster.clock.now) == (8, 8, 24.0)
    assert cluster.workers[0].stats.waited_s == 8 * 2.0  # in every round


def test_with_sync_who_comes_later_shares_the_work_at_once() -> None:
    """Rounds of two batches, a second each. Until 2.5 s the first worker is alone: it has made one, and begun the next.

    It learns of the other when it next waits: both compute the second batch of that round, until 3.5 and 4 s. From then
    on they share: six more rounds of one second. Without that it would compute all 16 batches alone.
    """
    cluster = cluster_of(load_strategy("sync", PER_WORKER), 2)
    for server in range(2):
        cluster.add_server(server)
    cluster.add_worker(0)
    cluster.clock.at(2.5, lambda: cluster.add_worker(1))
    cluster.run()
    assert (steps_of(cluster, 0), steps_of(cluster, 1), cluster.clock.now) == (10, 7, 10.0)


def test_a_slow_network_adds_what_it_should() -> None:
    """One worker, no overlap: per step a push of 192 bytes and a pull of as many, at 2 x 10 ms latency."""
    model = ClusterModel(NetworkModel(latency_s=0.01, bytes_per_s=inf), INSTANT.compute, INSTANT.nodes)
    cluster = cluster_of(Downpour(overlap=False), 1, model)
    cluster.start()
    cluster.run()
    span_s = [span.from_s for span in cluster.spans or [] if span.what == "compute"]
    between = [round(later - earlier, 6) for earlier, later in pairwise(span_s)]
    assert between[:10] == [1.02] * 10  # towards the end it waits for leases, too


def test_every_message_that_a_worker_sends_or_takes_costs_it_time() -> None:
    """Per step it sends a push to each of two servers, and takes an answer and parameters from each: six messages."""
    nodes = replace(INSTANT.nodes, worker_message_s=0.125)
    cluster = cluster_of(Downpour(overlap=False), 1, ClusterModel(INSTANT.network, INSTANT.compute, nodes))
    cluster.start()
    cluster.run()
    starts = [span.from_s for span in cluster.spans or [] if span.what == "compute"]
    assert [later - earlier for earlier, later in pairwise(starts)][1:3] == [1.0 + 6 * 0.125] * 2


def test_on_one_core_copying_is_work_like_any_other() -> None:
    """16 steps of two workers: a second to compute and a second to copy what is pushed, one after the other."""
    nodes = replace(INSTANT.nodes, push_bytes_per_s=192, cores=1)
    cluster = cluster_of(Downpour(), 2, ClusterModel(INSTANT.network, INSTANT.compute, nodes))
    cluster.start()
    cluster.run()
    assert 16 * 2.0 <= cluster.clock.now <= 16 * 2.0 + 3.0  # and a second for the first values


def starts_of(cluster: SimulatedCluster, worker: int) -> list[float]:
    return [s.from_s for s in cluster.spans or [] if s.what == "compute" and s.node == f"worker {worker}"]


@pytest.mark.parametrize(("gather_bytes_per_s", "round_s"), [(768, 1.0 + 0.25 + 1.0), (0, 1.0 + 1.0 + 1.0)])
def test_only_the_last_push_of_a_round_makes_a_step(gather_bytes_per_s: float, round_s: float) -> None:
    """A second to compute, a quarter to add a gradient of 192 bytes to another, a second to make the step."""
    nodes = replace(INSTANT.nodes, apply_bytes_per_s=192, gather_bytes_per_s=gather_bytes_per_s)
    model = ClusterModel(INSTANT.network, INSTANT.compute, nodes)
    cluster = cluster_of(load_strategy("sync", PER_WORKER), 2, model, num_servers=1)
    cluster.start()
    cluster.run()
    starts = starts_of(cluster, 0)
    assert [later - earlier for earlier, later in pairwise(starts)][:5] == pytest.approx([round_s] * 5)


@pytest.mark.parametrize(("cores", "apart"), [(0, [0.0, 1.0, 2.0]), (6, [0.0, 0.0, 0.0])])
def test_on_one_machine_answers_to_what_came_meanwhile_leave_together(cores: int, apart: list[float]) -> None:
    """All three push at once, then ask for parameters; a step takes a second. When the first is done, the server finds
    the other two pushes and what all three ask."""
    nodes = replace(INSTANT.nodes, apply_bytes_per_s=192, cores=cores)
    model = ClusterModel(INSTANT.network, INSTANT.compute, nodes)
    cluster = cluster_of(Downpour(overlap=False), 3, model, num_servers=1)
    cluster.start()
    cluster.run()
    second = [starts_of(cluster, worker)[1] for worker in range(3)]
    assert [at_s - min(second) for at_s in sorted(second)] == pytest.approx(apart)


def test_taking_parameters_over_counts_as_waiting_as_it_does_for_a_real_worker() -> None:
    """192 bytes at 768 a second, 16 times and once before the first step."""
    nodes = replace(INSTANT.nodes, pull_bytes_per_s=768)
    cluster = cluster_of(Downpour(overlap=False), 1, ClusterModel(INSTANT.network, INSTANT.compute, nodes))
    cluster.start()
    cluster.run()
    assert cluster.workers[0].stats.waited_s == pytest.approx(17 * 0.25, abs=0.3)


def test_copying_a_reply_keeps_a_server_from_its_next_message() -> None:
    """The larger of two blocks has 128 bytes, and its server copies 960 bytes a second."""
    nodes = NodeModel(
        apply_bytes_per_s=inf, read_bytes_per_s=960, push_bytes_per_s=inf, pull_bytes_per_s=inf, message_s=0.0
    )
    cluster = cluster_of(Downpour(overlap=False), 2, ClusterModel(INSTANT.network, INSTANT.compute, nodes))
    cluster.start()
    cluster.run()
    first = {f"worker {i}": inf for i in range(2)}
    for span in cluster.spans or []:
        if span.what == "compute":
            first[span.node] = min(first[span.node], span.from_s)
    assert round(first["worker 1"] - first["worker 0"], 6) == round(128 / 960, 6)


def test_what_a_killed_worker_had_not_sent_is_gone() -> None:
    """Copying 192 bytes takes a second: at 2.75 s one server's block has left, the other's has not."""
    nodes = NodeModel(
        apply_bytes_per_s=inf, read_bytes_per_s=inf, push_bytes_per_s=192, pull_bytes_per_s=inf, message_s=0.0
    )
    cluster = cluster_of(Downpour(), 1, ClusterModel(INSTANT.network, INSTANT.compute, nodes))
    cluster.clock.at(
        2.75, lambda: cluster.kill(cluster.workers[0], keep=lambda in_flight: True)
    )  # 1 s to load, 1 to compute
    cluster.start()
    cluster.run()
    versions = [block.version for node in cluster.servers.values() for block in node.server.blocks.values()]
    assert sorted(versions) == [0, 1]
    assert cluster.coordinator.state.outcome == "failed" and "no worker is left" in cluster.coordinator.state.reason


def test_time_passes_alike_with_and_without_gradients() -> None:
    ends = []
    for real in (True, False):
        model = ClusterModel(NetworkModel(latency_s=0.01, bytes_per_s=1e4), ComputeModel(), NodeModel())
        cluster = cluster_of(Downpour(), 3, model, real=real)
        cluster.start()
        cluster.run()
        ends.append((cluster.clock.now, [w.stats.waited_s for w in cluster.workers.values()]))
    assert ends[0] == ends[1]


# ---- learning ----


@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_batch_arrives_once_to_the_last_bit(num_workers: int) -> None:
    model = ClusterModel(NetworkModel(jitter_s=0.1), ComputeModel(kind="exponential"), NodeModel())
    cluster = cluster_of(Downpour(optimizer="sgd", lr=0.25), num_workers, model)
    cluster.start()
    cluster.run()
    assert torch.equal(parameters(cluster), TASK.after(0.25))
    accounting = cluster.coordinator.reporting.accounting()
    assert accounting is not None and accounting.balanced and accounting.applied == 16


def test_a_gradient_is_computed_at_the_parameters_its_worker_has_at_that_moment(tmp_path: Path) -> None:
    """With exact rounds the result is that of one process, so no worker has seen another's parameters."""
    runs = [
        sim.run(config_of(tmp_path / str(n), "sync", n, epochs=2, batch_size=32 // n), lambda event: None)
        for n in (1, 4)
    ]
    assert [run.outcome for run in runs] == ["finished", "finished"]
    assert runs[0].metrics["loss"] == pytest.approx(runs[1].metrics["loss"], rel=1e-4)


def config_of(directory: Path, strategy: str, num_workers: int, **given: Any) -> RunConfig:
    directory.mkdir()
    settings = {
        "task": "quadratic",
        "strategy": strategy,
        "num_workers": num_workers,
        "num_servers": 2,
        "directory": str(directory),
        "strategy_settings": PER_WORKER if strategy == "sync" else {},
        **given,
    }
    return RunConfig(**settings)


@dataclass(frozen=True)
class Normed(Linear):
    """A task whose model keeps statistics of its own."""

    def model(self) -> torch.nn.Sequential:  # type: ignore[override]
        return torch.nn.Sequential(torch.nn.BatchNorm1d(self.dimension), torch.nn.Linear(self.dimension, 1))


def test_every_worker_has_its_own_batchnorm_statistics() -> None:
    task = Normed(dimension=48, samples=32, batch_size=2, epochs=1)
    cluster = cluster_of(Downpour(), 2, task=task)
    cluster.start()
    cluster.run()
    first, second = (cluster.workers[i].compute.memory.buffers for i in (0, 1))  # type: ignore[attr-defined]
    assert not torch.equal(first[0], second[0])
    assert (first[2].item(), second[2].item()) == (8, 8)  # batches each has seen


# ---- the same seed, the same run ----


def run_twice(tmp_path: Path, **given: Any) -> list[sim.Simulated]:
    found = []
    for name in ("a", "b"):
        sim.run(config_of(tmp_path / name, "downpour", 5, **given), lambda event: None)
        data = (tmp_path / name / "simulation.json").read_bytes()
        found.append(msgspec.json.decode(data, type=sim.Simulated))
    return found


@pytest.mark.parametrize("settings", [{}, {"time_only": True}, {"time_only": True, "aggregated": True}])
def test_the_same_seed_gives_the_same_hash(tmp_path: Path, settings: dict[str, Any]) -> None:
    a, b = run_twice(tmp_path, sim=SimSettings(**settings), epochs=1)
    assert a.trace_hash == b.trace_hash
    assert a.events == b.events > 100


def test_another_seed_gives_another_hash(tmp_path: Path) -> None:
    hashes = set()
    for seed in range(3):
        config = config_of(tmp_path / str(seed), "downpour", 3, seed=seed, epochs=1, sim=SimSettings(time_only=True))
        sim.run(config, lambda event: None)
        hashes.add(msgspec.json.decode((tmp_path / str(seed) / "simulation.json").read_bytes())["trace_hash"])
    assert len(hashes) == 3


# ---- the run as others see it ----


def test_a_simulated_run_leaves_what_a_real_one_does(tmp_path: Path) -> None:
    seen: list[events.AnyEvent] = []
    result = sim.run(config_of(tmp_path / "run", "downpour", 3, epochs=2), seen.append)
    kinds = [type(event).__name__ for event in seen]
    assert kinds[0] == "RunStarted" and kinds[-1] == "RunEnded"
    assert {"PlanMade", "Joined", "Progress", "PhaseChanged"} <= set(kinds)
    assert (result.outcome, result.samples, result.workers) == ("finished", 2048, 3)
    assert result.accounting["not_processed"] == 0 and result.metrics["loss"] > 0
    assert {"config.json", "events.jsonl", "model.safetensors"} <= {f.name for f in (tmp_path / "run").iterdir()}
    losses = [event.loss for event in seen if isinstance(event, events.Progress) and event.loss is not None]
    assert losses[-1] < losses[0]  # against virtual time
    assert [event.at_s for event in seen] == sorted(event.at_s for event in seen)


def test_the_bytes_to_and_from_the_servers_are_counted(tmp_path: Path) -> None:
    """32 batches, each with a push and a pull of the whole model."""
    seen: list[events.Progress] = []
    config = config_of(tmp_path / "run", "sync", 2)
    sim.run(config, lambda event: seen.append(event) if isinstance(event, events.Progress) else None)
    model = sum(4 * p.numel() for p in load_task(config.task, config.task_settings).model().parameters())
    assert seen[-1].pushed_bytes == seen[-1].batches * model
    assert seen[-1].pulled_bytes == seen[-1].batches * model


def test_an_error_of_the_users_code_ends_the_run_and_is_reported_once(tmp_path: Path) -> None:
    seen: list[events.AnyEvent] = []
    config = config_of(tmp_path / "run", "downpour", 3, task=f"{__name__}:Broken")
    result = sim.run(config, seen.append)
    assert result.outcome == "failed" and "the data is gone" in result.reason
    assert sum(isinstance(event, events.UserError) for event in seen) == 1


@dataclass(frozen=True)
class Broken(Linear):
    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("the data is gone")


# ---- no hang ----


class Stubborn(ApplyOnArrival):
    """Never lets anyone read."""

    def admits(self, block: Any, pull: Any, reader: int) -> bool:
        return False


def test_a_deadlock_names_who_waits_for_whom_and_since_when() -> None:
    cluster = cluster_of(Stuck(), 2)
    cluster.start()
    with pytest.raises(Deadlock) as caught:
        cluster.run()
    told = str(caught.value)
    assert "worker 0 waits for the servers: 2 of 2 blocks of the parameters, since 0.000 s" in told
    assert "server 0 delays replies to worker 0, worker 1" in told
    assert "coordinator: running, 0 of 16 batches done" in told


@dataclass(frozen=True)
class Stuck(Downpour):
    def server(self, num_replicas: int) -> ServerPart:
        half = super().server(num_replicas)
        return ServerPart(Stubborn, half.optimizer, half.schedule)


def test_a_long_step_is_no_deadlock() -> None:
    model = ClusterModel(INSTANT.network, ComputeModel(kind="constant", step_s=200.0), INSTANT.nodes)
    cluster = cluster_of(load_strategy("sync", PER_WORKER), 2, model)
    cluster.start()
    cluster.run()
    assert cluster.coordinator.state.outcome == "finished"


# ---- measuring while it trains ----


def measured_at(directory: Path, **given: Any) -> tuple[float, list[float]]:
    """Return the end of the run, and the virtual times of its evaluations."""
    seen: dict[float, float] = {}

    def view(event: events.AnyEvent) -> None:
        if isinstance(event, events.Progress) and event.metrics:
            seen.setdefault(event.metrics["loss"], event.at_s)

    compute = {"kind": "constant", "step_s": 1.0, **given.pop("compute", {})}
    config = config_of(directory, "downpour", 2, epochs=2, batch_size=64, sim=SimSettings(compute=compute), **given)
    result = sim.run(config, view)
    assert result.outcome == "finished"
    return result.seconds, sorted(seen.values())


def test_a_simulated_run_evaluates_at_virtual_intervals_and_that_takes_no_time(tmp_path: Path) -> None:
    """1024 samples in batches of 64, twice, by 2 workers: 16 steps of a second each."""
    never_s, never = measured_at(tmp_path / "never", eval_every_s=0.0)
    often_s, often = measured_at(tmp_path / "often", eval_every_s=4.0)
    assert never == [] and len(often) == 3
    assert often_s == never_s  # to the last bit: nothing came earlier or later


def test_measuring_takes_the_time_that_the_model_says(tmp_path: Path) -> None:
    free_s, _ = measured_at(tmp_path / "free", eval_every_s=4.0)
    dear_s, _ = measured_at(tmp_path / "dear", eval_every_s=4.0, compute={"measure_s": 2.0})
    assert free_s < dear_s < free_s + 3 * 2.0  # the other worker goes on meanwhile


# ---- in bulk ----


@pytest.mark.parametrize("strategy", ["downpour", "sync"])
@pytest.mark.parametrize("network", ["lan", "1gbit"])
def test_servers_as_vectors_take_about_as_long_as_servers_one_by_one(
    tmp_path: Path, strategy: str, network: str
) -> None:
    seconds = {}
    for aggregated in (False, True):
        settings = SimSettings(time_only=True, aggregated=aggregated, steps=10, model=network, compute={"step_s": 0.02})
        config = config_of(
            tmp_path / str(aggregated), strategy, 8, task="mlp", task_settings={"parameters": "0.7M"}, sim=settings
        )
        result = sim.run(msgspec.structs.replace(config, num_servers=4), lambda event: None)
        assert result.accounting["applied"] == 80 and result.outcome == "finished"
        seconds[aggregated] = result.seconds
    assert seconds[True] == pytest.approx(seconds[False], rel=0.06)


@pytest.mark.parametrize("setting", [{"cores": 2}, {"shared_memory": True}, {"gather_bytes_per_s": 1e9}])
def test_in_bulk_what_would_not_count_is_refused(setting: dict[str, Any]) -> None:
    layout = Flat(TASK.model()).layout
    with pytest.raises(ValueError, match=f"do not support .*{next(iter(setting))}"):
        make_aggregated(replace(INSTANT, nodes=NodeModel(**setting)), layout, num_servers=2)


def test_aggregated_servers_report_the_accounting_of_every_server(tmp_path: Path) -> None:
    settings = SimSettings(time_only=True, aggregated=True, steps=3)
    config = config_of(tmp_path / "run", "downpour", 200, sim=settings)
    result = sim.run(config, lambda event: None)
    assert (result.accounting["applied"], result.accounting["not_processed"], result.accounting["updates"]) == (
        600,
        0,
        600,
    )


def bulk_run(directory: Path, strategy: str) -> tuple[list[Line], dict[str, Any]]:
    """Every message with its moment, and what was measured."""
    settings = SimSettings(time_only=True, aggregated=True, steps=7, trace=True)
    told: list[events.Progress] = []
    result = sim.run(
        config_of(directory, strategy, 30, task="digits", sim=settings),
        lambda event: told.append(event) if isinstance(event, events.Progress) else None,
    )
    assert result.outcome == "finished"
    lines = sorted(read_lines(directory), key=lambda line: (line.at_s, line.source, line.target, line.what))
    return lines, {"waited": told[-1].waited_s, **result.staleness}


@pytest.mark.parametrize("strategy", ["downpour", "stale_sync", "soft_sync", "sync"])
def test_in_bulk_an_answer_that_lies_until_the_next_message_changes_nothing(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it when servers look at every message by itself, and not once in a latency."""
    lying = bulk_run(tmp_path / "lying", strategy)
    monkeypatch.setattr(WorkerNode, "can_wait_with", lambda node, ack: False)
    assert bulk_run(tmp_path / "at once", strategy) == lying
    expect = AggregatedServersNode.expect

    def one_by_one(node: AggregatedServersNode, arrives: float, *rest: Any) -> None:
        expect(node, arrives, *rest)
        node.clock.at(arrives, node._catch_up)

    monkeypatch.setattr(AggregatedServersNode, "expect", one_by_one)
    assert bulk_run(tmp_path / "one by one", strategy) == lying


@pytest.mark.parametrize("strategy", ["downpour", "stale_sync", "soft_sync", "sync"])
def test_in_bulk_a_worker_that_goes_ahead_of_its_gradient_changes_nothing(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = bulk_run(tmp_path / "ahead", strategy)
    monkeypatch.setattr(
        SimulatedCluster, "goes_ahead", property(lambda cluster: False, lambda cluster, value: None), raising=False
    )
    assert bulk_run(tmp_path / "one after the other", strategy) == ahead


# ---- as it is typed ----


def typed(*words: str) -> Any:
    return CliRunner().invoke(build_app(), ["train", *words])


@pytest.mark.parametrize(
    "words, told",
    [
        (["--time-only"], "--time-only requires --runtime sim."),
        (["--faults", "x"], "--faults requires --runtime sim."),
        (["--runtime", "sim", "--network", "moon"], "no network named 'moon': choose from lan, 1gbit, wan, datacenter"),
        (["--runtime", "sim", "compute.stepp=1"], "compute has no setting 'stepp'"),
        (["--runtime", "sim", "--steps", "3"], "--steps requires --time-only"),
        (["--runtime", "sim", "--record"], "needs no --record"),
        (["--record", "--transport", "shm"], "omit --transport shm"),
    ],
)
def test_what_cannot_be_is_said_before_a_directory_is_made(tmp_path: Path, words: list[str], told: str) -> None:
    result = typed("linear", "downpour", "--runs", str(tmp_path / "runs"), *words)
    assert result.exit_code == 2 and told in " ".join(result.output.split()), result.output
    assert not (tmp_path / "runs").exists()


def test_a_run_is_typed_with_its_network_its_paces_and_its_faults_and_again_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text("[network]\nlike = 'wan'\nlatency_s = 0.5\n")
    (tmp_path / "faults").write_text("8.2 kill worker 2\n")
    words = ["linear", "downpour", "task.samples=64", "compute.kind=constant", "compute.step_s=1", "--batch-size", "2"]
    options = [
        "--workers",
        "3",
        "--runtime",
        "sim",
        "--network",
        str(tmp_path / "slow.toml"),
        "--faults",
        str(tmp_path / "faults"),
    ]
    runs = ["--runs", str(tmp_path / "runs"), "--json"]
    first = typed(*words, *options, *runs)
    assert first.exit_code == 0, first.output
    found = json.loads(first.output.splitlines()[-1])
    assert found["accounting"]["reassigned"] >= 1 and found["accounting"]["lost"] == 0
    again = typed("--config", found["directory"], *runs)  # the configuration has the runtime, too
    assert json.loads(again.output.splitlines()[-1])["trace_hash"] == found["trace_hash"]


@pytest.mark.slow
def test_the_hash_is_the_same_in_another_process_whatever_python_hashes(tmp_path: Path) -> None:
    hashes = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", "from rainband.cli.main import main; main()", "train", "linear", "downpour"]
        options = ["--workers", "3", "--runtime", "sim", "--runs", str(tmp_path), "--json"]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([*command, *options], capture_output=True, env=environment, check=True, timeout=120)
        hashes.add(json.loads(done.stdout.splitlines()[-1])["trace_hash"])
    assert len(hashes) == 1


def test_the_schedule_does_not_depend_on_the_values_of_gradients() -> None:
    """Other data, the same messages at the same moments."""
    digests = set()
    for seed in (0, 1):
        model = ClusterModel(NetworkModel(jitter_s=0.01), ComputeModel(), NodeModel())
        cluster = cluster_of(
            Downpour(), 3, model, task=Linear(dimension=48, samples=32, batch_size=2, epochs=1, seed=seed)
        )
        cluster.start()
        cluster.run()
        digests.add((cluster.trace.digest(), cluster.clock.now))
    assert len(digests) == 1


def test_a_deadlock_is_reported_without_a_traceback_and_written_down(tmp_path: Path) -> None:
    result = typed("linear", f"{__name__}:Stuck", "--runtime", "sim", "--runs", str(tmp_path))
    assert result.exit_code == 1 and "the run cannot go on" in result.output, result.output
    assert "worker 0 waits for the servers" in result.output and "Traceback" not in result.output
    [directory] = tmp_path.iterdir()
    assert "every node waits" in (directory / "events.jsonl").read_text().splitlines()[-1]
