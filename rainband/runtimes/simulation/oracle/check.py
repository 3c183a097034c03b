"""Run a case of `rainband fuzz`, and check the guarantees: exactly once, no stale reads, no deadlock, the right result.

Most runs train a task whose gradients are whole numbers that do not depend on the parameters, so with plain SGD the
final parameters are known to the last bit. Full-batch strategies are compared with the same run without faults. A
ledger counts every batch that reaches a block's optimizer, independently of the run's own batch accounting.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random

import torch
from torch import Tensor

from rainband.coordinator.coordinator import RunSettings
from rainband.coordinator.state import FailureCause
from rainband.errors import Deadlock
from rainband.protocol.data_plan import bits
from rainband.rules.rounds import TOO_LATE
from rainband.runtimes.simulation.cluster import Notes, SimulatedCluster, who_waits
from rainband.runtimes.simulation.fault_injector import FaultInjector
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.runtimes.simulation.models.faults import shrink
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.runtimes.simulation.models.trace import Trace
from rainband.runtimes.simulation.oracle.ledger import Ledger
from rainband.runtimes.simulation.oracle.scenarios import IN_ROUNDS, LR, SHARED, TASK, TIMEOUT_S, Case, setup_of

LIMIT_S = 600.0  # of virtual time: a longer run makes no progress
MODEL = ClusterModel(
    NetworkModel(latency_s=0.002, bytes_per_s=1e8, jitter_s=0.01),
    ComputeModel(kind="exponential", step_s=0.05, slow_workers=(1,), slow_factor=3.0),
    NodeModel(message_s=0.001),
)


@dataclass
class OracleVerdict:
    """The outcome of a run, and the guarantees that it violated."""

    case: Case
    violations: list[str] = field(default_factory=list)
    outcome: str = ""
    trace: Trace = field(default_factory=Trace)
    seconds: float = 0.0

    @property
    def command(self) -> str:
        """Return the command that repeats the run."""
        return f"rainband fuzz {self.case.seed} --strategy {self.case.strategy}"


def check(case: Case, keep_trace: bool = False) -> OracleVerdict:
    return _play(case, keep_trace)[0]


@lru_cache(maxsize=32)
def without_faults(case: Case) -> Tensor:
    """Return the final parameters of a case's run without faults."""
    verdict, cluster = _play(case, keep_trace=False, judge=False)
    assert verdict.outcome == "finished", f"{case} without faults: {verdict.outcome} {verdict.violations}"
    return parameters(cluster)


def _play(case: Case, keep_trace: bool, judge: bool = True) -> tuple[OracleVerdict, SimulatedCluster]:
    verdict = OracleVerdict(case, trace=Trace(keep_trace))
    settings = RunSettings(
        num_workers=case.num_workers,
        num_servers=case.num_servers,
        seed=0,  # of the data plan: equal batches in every run; times and faults follow from the case's seed
        failure_timeout_s=TIMEOUT_S,
    )
    ledger = Ledger(setup_of(case.strategy))
    scenario = ledger.setup.scenario(case.num_workers)
    shuffle = Random(f"shuffle {case.seed}")
    cluster = SimulatedCluster(
        scenario, settings, MODEL, Notes(verdict.trace, observe=lambda peer: ledger), TIMEOUT_S / 5, shuffle, case.seed
    )
    fault_injector = FaultInjector(cluster, case.script, case.seed)
    cluster.start()
    try:
        cluster.run(until_s=LIMIT_S)
    except Deadlock as deadlock:
        verdict.violations.append(f"deadlock: {deadlock}")
        verdict.outcome = "stuck"
        return verdict, cluster
    verdict.outcome, verdict.seconds = cluster.coordinator.state.outcome, cluster.clock.now
    if judge:
        verdict.violations += RunCheck(case, cluster, ledger, fault_injector).violations()
    return verdict, cluster


def parameters(cluster: SimulatedCluster) -> Tensor:
    """Return all parameters as the servers have them; without servers, those of the worker that saved them."""
    if cluster.rounds is not None:
        saver = cluster.rounds.saver  # it may have been killed since
        client = None if saver is None else saver.client
        return torch.empty(0) if client is None else torch.cat(list(client.flat.vectors))
    blocks = [block for node in cluster.servers.values() for block in node.server.blocks.values()]
    return torch.cat([block.buffer.at(block.version) for block in sorted(blocks, key=lambda block: block.index)])


@dataclass
class RunCheck:
    """Checks a run that is over."""

    case: Case
    cluster: SimulatedCluster
    ledger: Ledger
    fault_injector: FaultInjector

    def violations(self) -> list[str]:
        violations = self.ledger.violations[:1] + self._applied_twice() + self._accounting() + self._bound()
        if self.cluster.coordinator.state.phase != "over":
            return [*violations, f"not over after {self.cluster.clock.now:.1f} s: {who_waits(self.cluster)}"]
        if self.cluster.coordinator.state.outcome == "stopped":
            return violations + self._stopped()
        if self.cluster.coordinator.state.outcome != "finished":
            return violations + self._unexplained_failure()
        if self.case.known == "coordinated":
            return violations + self._same_as_without_faults()
        return violations + self._not_applied() + self._rounds() + self._parameters()

    def _applied_twice(self) -> list[str]:
        return [
            f"batch {k} of portion {portion} was applied {times} times to block {block}"
            for block, applied in self.ledger.applied.items()
            for (portion, k), times in sorted(applied.items())
            if times > 1
        ]

    def _not_applied(self) -> list[str]:
        plan = self.cluster.coordinator.state.plan
        assert plan is not None
        every = {(p, k) for p in range(plan.num_portions) for k in range(plan.batches_in(p))}
        return [
            f"batch {k} of portion {portion} was neither applied to block {block} nor skipped"
            for block, applied in self.ledger.applied.items()
            for portion, k in sorted(every - set(applied) - self._dropped(block))
        ]

    def _dropped(self, block: int) -> set[tuple[int, int]]:
        skipped = self.ledger.blocks[block].accounting.skipped
        return {(portion, k) for (portion, _), mask in skipped.items() for k in bits(mask)}

    def _accounting(self) -> list[str]:
        accounting = self.cluster.coordinator.reporting.accounting()
        if accounting is None:
            return []
        violations = (
            []
            if accounting.balanced
            else [f"the accounting does not add up: {accounting.lost} lost, {accounting.applied_twice} applied twice"]
        )
        may_skip = {TOO_LATE} if self.case.known == "first" else set()
        if self.cluster.coordinator.state.outcome == "finished" and (
            accounting.not_processed or accounting.skipped.keys() - may_skip
        ):
            violations.append(
                f"a finished run has {accounting.not_processed} batches not processed and {accounting.skipped} skipped"
            )
        return violations

    def _bound(self) -> list[str]:
        """Check that no reader missed more than its rule allows, in the rule's own unit, on any block."""
        blocks = [block for node in self.cluster.servers.values() for block in node.server.blocks.values()]
        limits = [(block.spec.index, limit) for block in blocks if (limit := block.rule.limit()) is not None]
        return [
            f"{limit.exceeded} gradients of block {block} were computed from parameters that missed up to "
            f"{limit.largest:g} {limit.unit}: the bound is {limit.bound:g}"
            for block, limit in limits
            if limit.exceeded
        ]

    def _rounds(self) -> list[str]:
        """Check that each round updates every block with the same batches, and with as many as it needs."""
        if self.case.known not in ("rounds", "first"):
            return []
        if len({tuple(updates) for updates in self.ledger.updates.values()}) > 1:
            return ["the rounds of different blocks have different batches"]
        needed = self.case.num_workers - (self.case.known == "first")
        sizes = {len(update.batches) for updates in self.ledger.updates.values() for update in updates}
        return [] if sizes == {needed} else [f"rounds have {sorted(sizes)} batches, not {needed}"]

    def _parameters(self) -> list[str]:
        got = parameters(self.cluster)[: TASK.dimension]
        match self.case.known:
            case "sum":
                expected = TASK.after(LR)
            case "shared":
                expected = SHARED.after(LR)
                same = torch.allclose(got, expected, rtol=1e-5)
                return [] if same else [f"the parameters differ: {got - expected}"]
            case "averaged" | "mixed" as known:
                # A model that is lost before neighbors have averaged it takes its part of a batch with it.
                num_models = len(self.cluster.workers) ** (2 if known == "mixed" else 1)
                most, least = -SHARED.after(LR), -SHARED.after(LR / num_models)
                within = ((-got <= most * 1.001) & (-got >= least * 0.999)).all()
                return [] if within else [f"the parameters are not sums of all batches: {got} beyond {least} to {most}"]
            case "rounds":
                expected = TASK.after(LR / self.case.num_workers)  # a round is the mean of its batches
            case "corrected":
                return []  # the ledger checks each correction
            case _:
                expected = self._after_its_updates()
                return [] if torch.allclose(got, expected, rtol=1e-5) else [f"the parameters differ: {got - expected}"]
        return [] if torch.equal(got, expected) else [f"the parameters differ: {got - expected}"]

    def _stopped(self) -> list[str]:
        """Check that the model of a run that was stopped is that of the batches which were applied."""
        shutdown = self.cluster.coordinator.shutdown
        if not shutdown.saved and not shutdown.rescue.over:
            return ["the model was not saved"] if any(self.ledger.updates.values()) else []
        buffered = [
            f"block {index} buffers gradients of {block.rule.buffered} batches, which are not in the model"
            for index, block in self.ledger.blocks.items()
            if block.rule.buffered and self.case.known not in ("rounds", "first")  # rounds are whole, or not applied
        ]
        if buffered or self.case.known in ("coordinated", "corrected", "averaged", "mixed"):
            return buffered
        got = parameters(self.cluster)[: TASK.dimension]
        if self.case.known == "shared":
            expected = self._after_shared_batches()
        else:
            expected = self._after_its_updates()
        return [] if torch.allclose(got, expected, rtol=1e-5) else [f"the parameters differ: {got - expected}"]

    def _after_shared_batches(self) -> Tensor:
        """Return the parameters that follow from the batches that the run has reported as applied."""
        accounting, gradients = self.cluster.coordinator.reporting.accounting(), self.ledger.setup.gradients
        applied = 0 if accounting is None else accounting.applied
        total = sum((gradients[number].double() for number in range(applied)), torch.zeros(TASK.dimension).double())
        return (-LR * total).float()

    def _after_its_updates(self) -> Tensor:
        """Return the parameters that follow from the updates in the ledger."""
        expected = torch.zeros(TASK.dimension, dtype=torch.float64)
        for index, updates in self.ledger.updates.items():
            block = self.ledger.blocks[index]
            piece = expected[block.spec.start : block.spec.stop]
            for update in updates:
                divisor = 1 if self.case.known == "sum" else update.divisor
                for batch in update.batches:
                    piece -= LR / divisor * self.ledger.gradient(block, batch)
        return expected.float()

    def _same_as_without_faults(self) -> list[str]:
        got, expected = parameters(self.cluster), without_faults(replace(self.case, seed=0, script=()))
        same = torch.allclose(got, expected, rtol=1e-6, atol=1e-9)
        return [] if same else [f"the parameters differ from those of the run without faults: {got - expected}"]

    def _unexplained_failure(self) -> list[str]:
        """Check that a failed run failed because of its faults."""
        state = self.cluster.coordinator.state
        server_died = self.fault_injector.servers_died
        match state.cause:
            case FailureCause.SERVER_LOST:
                explained = server_died
            case FailureCause.NO_WORKER_LEFT:
                explained = server_died or not self._members_alive() or self._state_lost()
            case FailureCause.WORKERS_DIED:
                explained = self.fault_injector.deaths >= 3
            case FailureCause.COORDINATOR_LOST:
                explained = not self.cluster.coordinator_node.alive
            case FailureCause.OTHER:
                explained = self.fault_injector.raised
            case _:
                explained = False
        if state.cause is FailureCause.OTHER and explained and server_died is False:
            return self._stopped()
        return [] if explained else [f"the run failed for no fault: {state.reason}"]

    def _state_lost(self) -> bool:
        """Return True if all workers that shared batches were killed, so that those started later find no state."""
        if self.case.known not in IN_ROUNDS or not self.fault_injector.deaths:
            return False
        workers = [getattr(node.session, "worker", None) for node in self.cluster.workers.values() if node.alive]
        return not any(worker.rounds.member.count >= 0 for worker in workers if worker is not None)

    def _members_alive(self) -> bool:
        """Return True if the coordinator could reach a worker; one that joined at the very end does not count."""
        bus, coordinator = self.cluster.bus, self.cluster.coordinator_node
        workers = [bus.nodes.get(worker.peer) for worker in self.cluster.coordinator.state.workers.values()]
        return any(node is not None and not bus.flow(node, coordinator).broken for node in workers)


def shortest(case: Case) -> Case:
    """Return a case that fails with as few faults as possible."""
    return replace(
        case, script=shrink(case.script, lambda script: bool(check(replace(case, script=script)).violations))
    )
