"""One worker's stage of a pipeline that is never flushed: a backward uses the weight version of its forward."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rainband.model.block_optimizer import build
from rainband.model.flat_parameters import is_finite
from rainband.model.seeds import seed_global_generators
from rainband.model_parallel.execution.engine import run_actions
from rainband.model_parallel.execution.fragment_run import FragmentRun
from rainband.model_parallel.execution.microbatch_run import Microbatch, MicrobatchRun
from rainband.model_parallel.execution.shared_in_stage import SharedInStage, stages_of
from rainband.model_parallel.execution.stage import AtVersion, Stage
from rainband.model_parallel.execution.stage_replicas import StageReplicas
from rainband.model_parallel.schedules.table import Action
from rainband.model_parallel.schedules.version_rule import VersionRule, check_stage_versions
from rainband.protocol.accounting import NOT_FINITE
from rainband.protocol.data_plan import ranges
from rainband.worker.worker import LocalAccounting

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rainband.model_parallel.execution.worker import StageWorker
    from rainband.protocol.lr_schedules import Schedule
    from rainband.protocol.optimizer_spec import OptimizerSpec
    from rainband.stage import StageVersions
    from rainband.strategy import Batch, WorkItem


@dataclass(frozen=True)
class BatchInFlight:
    """A batch between its forward and its backward."""

    number: int  # counted through the run, the same on all workers of a replica
    position: int  # counted since the pipeline last ran empty: decides which stage replicas compute it
    update: int  # the update that its gradient belongs to
    batch: Batch

    def action(self, stage: int, kind: str, version: int = 0) -> Action:
        return Action(stage, kind, self.number, version)  # type: ignore[arg-type]


# size: numbering, computing and accepting batches depend on the same counters: accepted, updates, samples, skipped
class WeightStashing:
    """The batches, versions and updates of one worker's stage."""

    def __init__(self, worker: StageWorker, spec: OptimizerSpec, schedule: Schedule, how: StageVersions) -> None:
        submodel = worker.submodel
        self.worker, self.submodel, self.links = worker, submodel, worker.links
        self.schedule, self.how = schedule, how
        self.layout = submodel.layout
        replicas = submodel.plan.plan.replicas()
        check_stage_versions(how, replicas)
        self.rule = VersionRule(how, replicas, submodel.plan.stage(submodel.machine))
        self.ahead = self.rule.ahead
        for tie in submodel.ties:
            if len(stages := stages_of(submodel, (tie.owner, *tie.others))) > 1:
                raise ValueError(
                    f"a parameter is used in stages {stages}, which update it at different times: put its units into "
                    "one stage of the placement, or choose sync batch_per_worker=true, or single."
                )
        worker.lookahead = submodel.plan.size  # replicas wait for each other's batches, which come later
        worker.before_item = None  # evaluating would require an empty pipeline
        worker.flat.release()  # versions have memory of their own
        self.stage = Stage(
            submodel.machine,
            submodel.modules,
            partial(self._optimizer, spec),
            seed=worker.plan.seed,
            recompute=how.recompute,
        )
        first = self.stage.versions.leaves(self.stage.versions.newest)
        self.shared = SharedInStage(worker, self.stage)
        self.stage_replicas = StageReplicas(submodel, worker.links, {name: first[name] for name in self.stage.trained})
        self.base = [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]
        self.accounting = LocalAccounting(worker.client)
        self.pending: deque[tuple[int, Batch]] = deque()  # (update, batch) of all stage replicas, not accepted yet
        self.accepted = 0  # batches
        self.updates = 0
        self.samples = 0  # whose gradients the next update sums
        self.skipped: dict[int, str] = {}  # update -> the reason why it changed nothing
        self.empty_at = 0, 0  # batches and updates when the pipeline last ran empty
        self.in_flight: dict[int, BatchInFlight] = {}
        self.runs: dict[int, MicrobatchRun] = {}

    def begin_at(self, accounting: LocalAccounting) -> None:
        """Continue after the batches that are accepted: random numbers depend on the number of a batch."""
        self.accepted = accounting.accepted_set.count
        self.empty_at = self.accepted, 0

    @property
    def optimizer(self) -> Optimizer | None:
        return self.stage.versions.optimizer

    def _optimizer(self, spec: OptimizerSpec, parameters: list[nn.Parameter]) -> Optimizer:
        """Build the optimizer with the user's parameter groups, as far as this stage has their parameters."""
        flat = self.worker.flat
        group_of = {id(p): s.group for p, s in zip(flat.parameters, flat.layout.parameters, strict=True)}
        groups: list[dict[str, Any]] = [{"params": [], **settings} for settings in flat.layout.groups]
        for parameter in parameters:
            groups[group_of.get(id(parameter), 0)]["params"].append(parameter)
        return build(spec, [group for group in groups if group["params"]])

    async def train(self, items: AsyncIterator[WorkItem]) -> None:
        """Process work items: `ahead` forwards, then a forward and a backward in turn; the pipeline may run empty."""
        await run_actions(self._actions(items), self)

    async def _actions(self, items: AsyncIterator[WorkItem]) -> AsyncIterator[Action]:
        waiting: deque[BatchInFlight] = deque()
        async for item in items:
            for batch in item.batches:
                turn = self._number(batch)
                if turn is None:
                    continue  # another replica of this stage computes it
                yield turn.action(self.rule.stage, "F", self._version(turn.position))
                waiting.append(turn)
                if len(waiting) > self.ahead:
                    for action in self._backward(waiting.popleft()):
                        yield action
            if not item.more:  # there may be no next item: empty the pipeline
                while waiting:
                    for action in self._backward(waiting.popleft()):
                        yield action
                for action in self._settle():
                    yield action

    def _backward(self, turn: BatchInFlight) -> Iterator[Action]:
        yield turn.action(self.rule.stage, "B")
        if self.rule.completes(turn.position):
            yield Action(self.rule.stage, "U", turn.update, 0)
        self.worker.count_samples(self._num_samples(turn.batch))

    def _settle(self) -> Iterator[Action]:
        """Make the last update of an emptied pipeline, of fewer batches, or of batches of other replicas alone."""
        self._release(self.stage.versions.newest)  # the next forward uses the newest
        if self.pending:
            yield Action(self.rule.stage, "U", self.updates, 0)
        self.empty_at = self.accepted, self.updates
        self._release(self.stage.versions.newest)

    def _number(self, batch: Batch) -> BatchInFlight | None:
        """Number the next batch; None: another replica of this stage computes it."""
        number, position = self.accepted + len(self.pending), self._next_position()
        update = self.empty_at[1] + self.rule.update(position)
        self.pending.append((update, batch))
        self._accept()  # other replicas may have been faster, and made the update with it already
        if position % self.stage_replicas.count != self.submodel.replica:
            return None
        self.in_flight[number] = turn = BatchInFlight(number, position, update, batch)
        return turn

    def _next_position(self) -> int:
        return self.accepted + len(self.pending) - self.empty_at[0]

    def _version(self, position: int, newest: int | None = None) -> int:
        """Return the version that a batch uses; none is older than when the pipeline last ran empty."""
        emptied = self.empty_at[1]
        newest = self.stage.versions.newest if newest is None else newest
        return emptied + self.rule.version(position, newest - emptied)

    def fragments(self, action: Action) -> list[int]:
        return self.submodel.first.mine

    def run_of(self, action: Action) -> MicrobatchRun:
        if action.kind == "F":
            self.runs[action.microbatch] = self._start(self.in_flight[action.microbatch], action.version)
        return self.runs[action.microbatch]

    def _start(self, turn: BatchInFlight, version: int) -> MicrobatchRun:
        worker, submodel = self.worker, self.submodel
        seed_global_generators(worker.seed_of(turn.batch))  # the same samples on all of the replica
        samples = worker.data.batch(worker.sampler.indices(turn.batch))
        call, answer = submodel.loss_call(worker.task, samples), submodel.cut.answer
        weight = self._num_samples(turn.batch) / self._full_update() if self.how.pipedream_2bw else 1.0
        compute = AtVersion(self.stage, turn.number, version, turn.update, weight, self.how.stash)
        inputs = submodel.cut.bind(call.args, call.kwargs)
        return MicrobatchRun(
            FragmentRun(submodel.cut, self.layout, submodel.machine, submodel.modules, compute),
            self.links,
            lambda machine: submodel.plan.rank_of(machine, turn.position),
            Microbatch((turn.number,), inputs, lambda outputs: call.loss(answer(outputs)), 1.0, None),
            submodel.shares,
        )

    def finish(self, action: Action, run: MicrobatchRun) -> None:
        turn = self.in_flight.pop(action.microbatch)
        del self.runs[action.microbatch]
        if self.submodel.machine == self.layout.answer_machine:
            self.worker.count_loss(turn.batch, run.loss)
        self.samples += self._num_samples(turn.batch)

    def _num_samples(self, batch: Batch) -> int:
        return self.worker.plan.samples_in(batch.portion, batch.k)

    def _full_update(self) -> int:
        """Return the samples of an update of which no batch is short or missing."""
        return self.rule.batches * self.worker.plan.batch_size

    async def update(self, action: Action) -> None:
        """Step with the mean over the samples of an update's batches, on this worker and its stage replicas."""
        update = action.microbatch
        total = self.stage.totals.pop(update, {})
        samples, self.samples = self.samples, 0
        if self.shared.users:
            total = await self.shared.sum(update, total)
        if self.stage_replicas.others and self.stage.trained:
            total = await self.stage_replicas.mean(update, total, samples)
        elif self.how.pipedream_2bw and samples != self._full_update():
            total = {name: gradient * (self._full_update() / samples) for name, gradient in total.items()}
        first = next(b for u, b in self.pending if u == update)
        finite = is_finite(list(total.values()))
        if self.shared.others:
            finite = await self.shared.agree(update, finite)
        self._step(total if finite else {}, first)
        self.updates += 1
        if not finite:
            self.skipped[update] = NOT_FINITE
        self._accept()

    def _step(self, total: Mapping[str, Tensor], batch: Batch) -> None:
        if self.optimizer is not None:
            scale = self.schedule.scale(self.worker.plan.progress(batch.portion, batch.k))
            for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
                group["lr"] = lr * scale
        lowest = self._version(self._next_position(), self.stage.versions.newest + 1)
        self._release(lowest)  # first: its memory serves the next version
        self.stage.update(total, _from(lowest), self.how.stash)

    def _release(self, lowest: int) -> None:
        """Release versions that no backward needs, older than the one that the next forward uses."""
        self.stage.versions.release(_from(lowest))

    def _accept(self) -> None:
        """Report the batches of finished updates, also those that other replicas of this stage computed."""
        while self.pending and self.pending[0][0] < self.updates:
            update, batch = self.pending.popleft()
            self.accepted += 1
            self.accounting.add(ranges(batch.portion, [batch.k], batch.lease), self.skipped.get(update, ""))


def _from(version: int) -> range:
    return range(version, sys.maxsize)
