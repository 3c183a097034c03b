"""Random schedules with faults, and the oracle that says whether a run kept its promises.

Most runs are of a task that counts: its gradients are whole numbers that do not depend on the parameters, so with plain
SGD the final parameters are known to the last bit. What the coordinator leads is compared with the same run without
faults. Beside the books, which are the run's own, every batch that reaches a block's optimizer is counted, apart from
any name that was remembered.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random

import torch
from torch import Tensor

from rainband.coordinator.coordinator import RunSettings
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
from rainband.runtimes.simulation.oracle.scenarios import LR, TASK, TIMEOUT_S, Case, stage_of

LIMIT_S = 600.0  # of virtual time: a run that takes longer goes round in circles
MODEL = ClusterModel(
    NetworkModel(latency_s=0.002, bytes_per_s=1e8, jitter_s=0.01),
    ComputeModel(kind="exponential", step_s=0.05, slow_workers=(1,), slow_factor=3.0),
    NodeModel(message_s=0.001),
)


@dataclass
class OracleVerdict:
    """What became of a run."""

    case: Case
    wrong: list[str] = field(default_factory=list)
    outcome: str = ""
    trace: Trace = field(default_factory=Trace)
    seconds: float = 0.0

    @property
    def command(self) -> str:
        """What replays it."""
        return f"rainband fuzz {self.case.seed} --strategy {self.case.strategy}"


def check(case: Case, keep_trace: bool = False) -> OracleVerdict:
    """Run a case and judge it."""
    return _play(case, keep_trace)[0]


@lru_cache(maxsize=32)
def without_faults(case: Case) -> Tensor:
    """The parameters at the end, if nothing goes wrong."""
    verdict, cluster = _play(case, keep_trace=False, judge=False)
    assert verdict.outcome == "finished", f"{case} without faults: {verdict.outcome} {verdict.wrong}"
    return parameters(cluster)


def _play(case: Case, keep_trace: bool, judge: bool = True) -> tuple[OracleVerdict, SimulatedCluster]:
    verdict = OracleVerdict(case, trace=Trace(keep_trace))
    settings = RunSettings(
        num_workers=case.num_workers,
        num_servers=case.num_servers,
        seed=0,  # of the plan: the same batches in every run; all else follows from the case's
        failure_timeout_s=TIMEOUT_S,
    )
    ledger = Ledger(stage_of(case.strategy))
    scenario = ledger.stage.scenario(case.num_workers)
    shuffle = Random(f"shuffle {case.seed}")
    cluster = SimulatedCluster(
        scenario, settings, MODEL, Notes(verdict.trace, observe=lambda peer: ledger), TIMEOUT_S / 5, shuffle, case.seed
    )
    fault_injector = FaultInjector(cluster, case.script, case.seed)
    cluster.start()
    try:
        cluster.run(until_s=LIMIT_S)
    except Deadlock as deadlock:
        verdict.wrong.append(f"deadlock: {deadlock}")
        verdict.outcome = "stuck"
        return verdict, cluster
    verdict.outcome, verdict.seconds = cluster.coordinator.outcome, cluster.clock.now
    if judge:
        verdict.wrong += RunChecker(case, cluster, ledger, fault_injector).complaints()
    return verdict, cluster


def parameters(cluster: SimulatedCluster) -> Tensor:
    """All parameters, as the servers have them."""
    blocks = [block for node in cluster.servers.values() for block in node.server.blocks.values()]
    return torch.cat([block.buffer.at(block.version) for block in sorted(blocks, key=lambda block: block.index)])


@dataclass
class RunChecker:
    """Looks at a run that is over."""

    case: Case
    cluster: SimulatedCluster
    ledger: Ledger
    fault_injector: FaultInjector

    def complaints(self) -> list[str]:
        wrong = self.ledger.wrong[:1] + self._twice() + self._accounting() + self._bound()
        if self.cluster.coordinator.phase != "over":
            return [*wrong, f"not over after {self.cluster.clock.now:.1f} s: {who_waits(self.cluster)}"]
        if self.cluster.coordinator.outcome != "finished":
            return wrong + self._excuses()
        if self.case.known == "led":
            return wrong + self._same_as_without_faults()
        return wrong + self._missing() + self._rounds() + self._parameters()

    def _twice(self) -> list[str]:
        return [
            f"batch {k} of portion {portion} was applied {times} times to block {block}"
            for block, applied in self.ledger.applied.items()
            for (portion, k), times in sorted(applied.items())
            if times > 1
        ]

    def _missing(self) -> list[str]:
        plan = self.cluster.coordinator.plan
        assert plan is not None
        every = {(p, k) for p in range(plan.num_portions) for k in range(plan.batches_in(p))}
        return [
            f"batch {k} of portion {portion} never reached block {block}, nor was it dropped"
            for block, applied in self.ledger.applied.items()
            for portion, k in sorted(every - set(applied) - self._dropped(block))
        ]

    def _dropped(self, block: int) -> set[tuple[int, int]]:
        skipped = self.ledger.blocks[block].accounting.skipped
        return {(portion, k) for (portion, _), mask in skipped.items() for k in bits(mask)}

    def _accounting(self) -> list[str]:
        accounting = self.cluster.coordinator.accounting()
        if accounting is None:
            return []
        wrong = (
            []
            if accounting.balanced
            else [f"the books are not balanced: lost {accounting.lost}, twice {accounting.applied_twice}"]
        )
        may_skip = {TOO_LATE} if self.case.known == "first" else set()
        if self.cluster.coordinator.outcome == "finished" and (
            accounting.not_processed or accounting.skipped.keys() - may_skip
        ):
            wrong.append(
                f"the books say finished, with {accounting.not_processed} not done and {accounting.skipped} skipped"
            )
        return wrong

    def _bound(self) -> list[str]:
        """No reader missed more than its rule allows, in the rule's own unit, on any block."""
        blocks = [block for node in self.cluster.servers.values() for block in node.server.blocks.values()]
        limits = [(block.spec.index, limit) for block in blocks if (limit := block.rule.limit()) is not None]
        return [
            f"{limit.exceeded} gradients of block {block} came from readers that missed up to {limit.largest:g} "
            f"{limit.unit}: {limit.bound:g} are allowed"
            for block, limit in limits
            if limit.exceeded
        ]

    def _rounds(self) -> list[str]:
        """Each round's update is made of the same batches on every block; whoever is dropped, as many as are needed."""
        if self.case.known not in ("rounds", "first"):
            return []
        if len({tuple(updates) for updates in self.ledger.updates.values()}) > 1:
            return ["the blocks have made rounds of different batches"]
        needed = self.case.num_workers - (self.case.known == "first")
        sizes = {len(update.batches) for updates in self.ledger.updates.values() for update in updates}
        return [] if sizes == {needed} else [f"rounds are of {sorted(sizes)} batches, not of {needed}"]

    def _parameters(self) -> list[str]:
        got = parameters(self.cluster)[: TASK.dimension]
        match self.case.known:
            case "sum":
                expected = TASK.after(LR)
            case "rounds":
                expected = TASK.after(LR / self.case.num_workers)  # a round is the mean of its cells
            case "corrected":
                return []  # each correction was looked at by itself
            case _:
                expected = self._after_its_updates()
                return [] if torch.allclose(got, expected, rtol=1e-5) else [f"the parameters differ: {got - expected}"]
        return [] if torch.equal(got, expected) else [f"the parameters differ: {got - expected}"]

    def _after_its_updates(self) -> Tensor:
        """What the updates come to that were made, whatever they were made of: nothing else moved a parameter."""
        expected = torch.zeros(TASK.dimension, dtype=torch.float64)
        for index, updates in self.ledger.updates.items():
            block = self.ledger.blocks[index]
            piece = expected[block.spec.start : block.spec.stop]
            for update in updates:
                for batch in update.batches:
                    piece -= LR / update.divisor * self.ledger.gradient(block, batch)
        return expected.float()

    def _same_as_without_faults(self) -> list[str]:
        got, expected = parameters(self.cluster), without_faults(replace(self.case, seed=0, script=()))
        same = torch.allclose(got, expected, rtol=1e-6, atol=1e-9)
        return [] if same else [f"the parameters are not those without faults: {got - expected}"]

    def _excuses(self) -> list[str]:
        """A run may only fail for what was done to it."""
        reason = self.cluster.coordinator.reason
        excused = (
            ("server" in reason and any(not node.alive for node in self.cluster.servers.values()))
            or ("no worker is left" in reason and not self._members_alive())
            or ("ended 3 workers" in reason and self.fault_injector.deaths >= 3)
            or ("the coordinator was lost" in reason and not self.cluster.coordinator_node.alive)
        )
        return [] if excused else [f"it failed: {reason}"]

    def _members_alive(self) -> bool:
        """Does anyone live who took part? Who came at the end was sent away."""
        return any(worker.peer in self.cluster.bus.nodes for worker in self.cluster.coordinator.workers.values())


def shortest(case: Case) -> Case:
    """The same failure with as few faults as possible."""
    return replace(case, script=shrink(case.script, lambda script: bool(check(replace(case, script=script)).wrong)))
