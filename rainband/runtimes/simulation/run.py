"""The runtime `sim`: one run in virtual time and in this process, with the nodes, strategies and rules of real runs.

Only transport and clock differ. A simulated run has the results, events and run directory of a real one; its seconds
are virtual.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import msgspec
import torch

from rainband.errors import Deadlock
from rainband.model.block_optimizer import build
from rainband.model.flat_parameters import Flat
from rainband.model.sync_batch_norm import share_statistics
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.plugins import load_strategy
from rainband.protocol.messages import Address, Dataset, Join
from rainband.record.spans import write_spans
from rainband.runtimes.checkpoints.restore import access_of, load_initial
from rainband.runtimes.codecs import codecs_of
from rainband.runtimes.config import RunConfig, dataset_of
from rainband.runtimes.hogwild.server import HogwildServer
from rainband.runtimes.processes.server_process import leave_out_the_compiler
from rainband.runtimes.run import Run, RunResult, View
from rainband.runtimes.run import settings_of as settings_of
from rainband.runtimes.simulation.cluster import Notes, Scenario, SimulatedCluster
from rainband.runtimes.simulation.fault_injector import FaultInjector
from rainband.runtimes.simulation.gradients import GradientCompute, HogwildCompute, PairCompute, TimingOnly
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, load_model
from rainband.runtimes.simulation.models.faults import parse
from rainband.runtimes.simulation.models.trace import Trace, write_lines
from rainband.runtimes.simulation.shared_module import SharedModule
from rainband.runtimes.simulation.stages import StageCompute
from rainband.runtimes.stage_forecast import predicted_of
from rainband.strategy import Strategy
from rainband.tasks.load import load_task
from rainband.tasks.task import Data, Task, drops_last, parameter_groups
from rainband.views.spans import Span
from rainband.worker.session import join_of
from rainband.worker.worker import check_optimizer

PROGRESS_POINTS = 30  # the number of progress events, and of heartbeats, in a run
AGGREGATED_POINTS = 8
HEARTBEATS = 10  # times as long between two heartbeats as sending those of all nodes takes
AGGREGATE_FROM = 10_000  # connections between workers and servers


class SimulatedResult(RunResult, frozen=True, kw_only=True):
    """The result of a simulated run."""

    trace_hash: str  # equal for equal seeds, in every process


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that two simulated runs are compared by: simulation.json in the run directory."""

    trace_hash: str  # equal if all messages arrived at equal times and the parameters are equal bit for bit
    time_only: bool
    torch: str  # with gradients, the bits depend on these three
    cpu_capability: str
    threads: int
    events: int
    model: ClusterModel


def run(
    config: RunConfig,
    view: View,
    capture: bool = False,
    model: ClusterModel | None = None,
    task: Task | None = None,
    strategy: Strategy | None = None,
) -> SimulatedResult:
    """Run to the end; a failed run returns its reason, and one that cannot continue raises Deadlock.

    `model`, `task` and `strategy` replace those that the configuration names. `capture` is ignored: there are no other
    processes.
    """
    with one_thread(), little_garbage(none_at_all=is_aggregated(config)):
        model = model or load_model(config.sim.model, config.sim.compute)
        return Simulation(config, view, model, make_scenario(config, task, strategy)).run()


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, because the bits of gradients depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def little_garbage(none_at_all: bool) -> Iterator[None]:
    """Collect garbage rarely or never: a collection visits all objects of thousands of workers and finds nothing.

    Objects that exist now are not visited again; new ones rarely, because the user's code may make cycles.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(0 if none_at_all else 100_000, 20, 100)
    try:
        yield
    finally:
        gc.freeze()  # otherwise all objects that were made meanwhile would be visited at once
        gc.set_threshold(*before)
        gc.unfreeze()


class Simulation(Run):
    """One simulated run and its directory."""

    def __init__(self, config: RunConfig, view: View, model: ClusterModel, scenario: Scenario) -> None:
        super().__init__(config, view)
        self.model = model
        self.trace = Trace(keep=config.sim.trace)
        self.spans: list[Span] = []
        self.interrupted = False
        scenario.eval_every_s = config.eval_every_s
        scenario.equal_parts = config.equal_parts
        if scenario.real and (config.checkpoint_every_s or config.resume_from):
            scenario.checkpoints = access_of(config)
        if scenario.hogwild_server is not None:
            scenario.hogwild_server.resume_from = config.resume_from
        self.expected_s = self._expected_s(scenario.join)
        settings = msgspec.structs.replace(self.settings, bounded_events=False)
        if is_aggregated(config):  # nodes never fail there, and thousands of workers send few heartbeats
            patient_s = max(config.failure_timeout_s, self.expected_s)
            settings = msgspec.structs.replace(settings, failure_timeout_s=patient_s)
        spans = None if is_aggregated(config) else self.spans
        self.cluster = SimulatedCluster(
            scenario, settings, self.model, Notes(self.trace, spans, self.emit), self._tick_s()
        )

    def _expected_s(self, join: Join) -> float:
        """Estimate the time of the run: that of computing, of the network or of the servers, whichever is longest."""
        batches = -(-join.num_samples // join.batch_size) * join.epochs
        network, nodes = self.model.network, self.model.nodes
        share = sum(p.numel for p in join.layout.parameters) * 4 / max(1, self.config.num_servers)
        on_server_s = 2 * nodes.message_s + share / nodes.apply_bytes_per_s + share / nodes.read_bytes_per_s
        step_s = self.model.compute.mean_s
        if not nodes.shared_memory:
            step_s = max(step_s, 2 * network.latency_s)
        return batches * max(step_s / self.config.num_workers, share / network.bytes_per_s, on_server_s)

    def _tick_s(self) -> float:
        """Return the time between ticks: a fifth of the failure timeout, or less for a short run."""
        points = AGGREGATED_POINTS if is_aggregated(self.config) else PROGRESS_POINTS
        between_s = max(self.expected_s / points, 1e-6)
        if (nodes := self.model.nodes).cores:  # heartbeats must leave the cores to the run
            message_s = nodes.message_s + nodes.worker_message_s
            between_s = max(between_s, HEARTBEATS * message_s * (self.config.num_workers + self.config.num_servers))
        return between_s if is_aggregated(self.config) else min(self.config.failure_timeout_s / 5, between_s)

    def run(self) -> SimulatedResult:
        self.begin()
        if (predicted := predicted_of(self.config, self.cluster.scenario.strategy, self.model)) is not None:
            self.emit(predicted)
        FaultInjector(self.cluster, parse(self.config.sim.faults), self.config.seed)
        self.cluster.start()
        try:
            self._drive()
            return self._result()
        finally:
            self.log.close()

    def _drive(self) -> None:
        try:
            with self._stopped_by_ctrl_c():
                self.cluster.run()
        except KeyboardInterrupt:  # of the user's code, or not in the main thread
            self._stop()
            self.cluster.run()
        except Deadlock as deadlock:
            self.cluster.coordinator.state.fail(str(deadlock))
            self._result()
            raise

    @contextmanager
    def _stopped_by_ctrl_c(self) -> Iterator[None]:
        """Stop between two events: an exception inside of one would leave a node that never answers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def plan_stop(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, before)  # the second Ctrl-C ends it at once
            self.cluster.clock.after(0.0, self._stop)

        signal.signal(signal.SIGINT, plan_stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _stop(self) -> None:
        self.interrupted = True
        self.cluster.stop()

    def _result(self) -> SimulatedResult:
        coordinator = self.cluster.coordinator
        self.cluster.coordinator_node.send([])  # the last events
        if self.cluster.scenario.real:
            self.save_rescued(coordinator)
        code = None
        if self.interrupted:
            code = 75 if coordinator.checkpoints.last_name else 130
        result = self.result(SimulatedResult, coordinator, self.cluster.clock.now, code, trace_hash=self._trace_hash())
        self._write_simulated(result.trace_hash)
        self.end(result)
        return result

    def _trace_hash(self) -> str:
        vectors = [b.values for server in self.cluster.servers.values() for b in server.server.blocks.values()]
        hogwild_server = self.cluster.coordinator_node.host.hogwild_server
        if hogwild_server is not None and hogwild_server.memory is not None:
            vectors += [vector for model in hogwild_server.memory.models for vector in model]
        if self.cluster.rounds is not None:
            clients = [node.client for _, node in sorted(self.cluster.workers.items())]
            vectors += [vector for client in clients if client is not None for vector in client.flat.vectors]
        for vector in vectors:
            self.trace.values(vector.view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
        return self.trace.digest()

    def _write_simulated(self, trace_hash: str) -> None:
        simulated = Simulated(
            trace_hash=trace_hash,
            time_only=self.config.sim.time_only,
            torch=str(torch.__version__),
            cpu_capability=torch.backends.cpu.get_cpu_capability(),
            threads=torch.get_num_threads(),
            events=self.cluster.clock.done,
            model=self.model,
        )
        if self.spans:
            write_spans(self.directory, self.spans)
        if self.trace.lines is not None:
            write_lines(self.directory, self.trace.lines)
        data = msgspec.json.format(msgspec.json.encode(simulated), indent=2)
        (self.directory / "simulation.json").write_bytes(data + b"\n")


def is_aggregated(config: RunConfig) -> bool:
    """Return True if all servers are simulated as one."""
    if config.sim.aggregated is not None:
        return config.sim.aggregated and config.sim.time_only
    return config.sim.time_only and config.num_workers * config.num_servers >= AGGREGATE_FROM


def make_scenario(config: RunConfig, task: Task | None = None, strategy: Strategy | None = None) -> Scenario:
    """Build the scenario of a run; `strategy` and `task` replace those that the configuration names."""
    scenario = _scenario(config, task, strategy)
    scenario.codecs = codecs_of(config)
    if any(scenario.codecs) and scenario.aggregated:
        raise ValueError(
            "--codec: thousands of servers are simulated as one, without codecs. Use fewer workers or servers."
        )
    return scenario


def _scenario(config: RunConfig, task: Task | None, strategy: Strategy | None) -> Scenario:
    strategy = strategy or load_strategy(config.strategy, config.strategy_settings)
    task = task or load_task(config.task, config.task_settings)
    check_optimizer(task, strategy)
    torch.manual_seed(config.seed)
    load_initial(module := task.model(), config.from_weights)
    if strategy.requires.computes_whole_batches and config.num_workers == 1:
        share_statistics(module)
    flat = Flat(module, parameter_groups(task, module))
    if config.sim.time_only:
        leave_out_the_compiler()
    server_part = strategy.server(config.num_replicas)
    if server_part is not None:
        build(server_part.optimizer, [torch.zeros(1)])  # reports a wrong setting here, not in a server
    if config.sim.time_only:
        if config.stage_plan is not None:
            raise ValueError("--time-only does not support stages: omit it, or use rainband placement --schedule.")
        return _time_only(config, strategy, task, flat)
    data = task.data()
    if config.stage_plan is not None:
        return _in_stages(config, config.stage_plan, strategy, task, data)
    dataset = dataset_of(task, data, config)
    return scenario_of(strategy, task, flat, data, config.num_workers, dataset, config.microbatches)


def scenario_of(
    strategy: Strategy,
    task: Task,
    flat: Flat,
    data: Data,
    num_workers: int,
    dataset: Dataset | None = None,
    microbatches: int = 1,
) -> Scenario:
    """Build a scenario whose workers compute gradients with one module; `dataset` defaults to the task's settings."""
    shared_module = SharedModule(flat)
    shared_module.microbatches = microbatches
    join = join_of(
        strategy, flat.layout, dataset or Dataset("", len(data), task.batch_size, task.epochs, drops_last(task))
    )
    if strategy.requires.shared_memory:
        in_pairs = strategy.requires.in_pairs
        hogwild_server = HogwildServer(bytearray, in_pairs)
        kind = PairCompute if in_pairs else HogwildCompute
        compute = partial(kind, shared_module, task, data, num_workers, hogwild_server)
        return Scenario(strategy, join, compute, real=True, hogwild_server=hogwild_server)
    return Scenario(strategy, join, partial(GradientCompute, shared_module, task, data, num_workers), real=True)


def _in_stages(config: RunConfig, plan: StagePlan, strategy: Strategy, task: Task, data: Data) -> Scenario:
    def stage_compute(index: int) -> StageCompute:
        return StageCompute(task, data, plan, index % plan.size, config.num_replicas, config.seed)

    dataset = dataset_of(task, data, config)
    join = join_of(strategy, stage_compute(0).flat.layout, dataset, address=Address("", 0))
    return Scenario(strategy, join, lambda: stage_compute(0), real=True, stage_compute=stage_compute)


def _time_only(config: RunConfig, strategy: Strategy, task: Task, flat: Flat) -> Scenario:
    if not config.num_servers and not strategy.requires.in_rounds:
        raise ValueError("--time-only requires servers: use --servers 1.")
    if strategy.requires.coordinated:
        raise ValueError(f"--time-only computes no loss, and {config.strategy} needs it: omit --time-only.")
    batch_size, epochs = _sizes(config, task)
    if config.sim.steps is None:
        num_samples = len(task.data())
    else:
        own = 1 if strategy.requires.split_batches else config.num_workers  # batches of a step
        num_samples, epochs = config.sim.steps * own * batch_size, 1
    join = join_of(
        strategy, flat.layout, Dataset("", num_samples, batch_size, epochs, config.drop_last or drops_last(task))
    )
    timing = TimingOnly(config.num_workers)
    return Scenario(strategy, join, lambda: timing, real=False, aggregated=is_aggregated(config))


def _sizes(config: RunConfig, task: Task) -> tuple[int, int]:
    return config.batch_size or task.batch_size, config.epochs or task.epochs
