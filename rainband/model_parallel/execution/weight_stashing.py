"""One worker's stage of a pipeline that is never flushed: every batch goes back through the parameters it came by."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rainband.model.block_optimizer import build
from rainband.model.flat_parameters import is_finite
from rainband.model_parallel.execution.fragment_run import FragmentRun
from rainband.model_parallel.execution.microbatch_run import Microbatch, MicrobatchRun
from rainband.model_parallel.execution.stage import AtVersion, Stage
from rainband.model_parallel.execution.stage_replicas import StageReplicas
from rainband.model_parallel.execution.version_counter import Counting, check_stashes
from rainband.model_parallel.graph.split_loss import inputs_of, loss_of
from rainband.protocol.data_plan import ranges
from rainband.stage import Turn
from rainband.worker.worker import LocalAccounting

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rainband.model_parallel.execution.worker import ShareWorker
    from rainband.protocol.lr_schedules import Schedule
    from rainband.protocol.optimizer_spec import OptimizerSpec
    from rainband.stage import StageVersions
    from rainband.strategy import Batch


@dataclass
class Passing(Turn):
    """A batch on its way."""

    number: int  # counted through the run, the same on all of the team
    place: int  # counted from when the pipeline was empty last: says which replicas it goes through
    update: int  # that it is part of
    batch: Batch
    version: int = 0  # of the parameters of its forward
    passage: MicrobatchRun | None = None


class Stashing:
    """Forward, backward and update of a stage, in whatever order its strategy has."""

    def __init__(self, worker: ShareWorker, spec: OptimizerSpec, schedule: Schedule, how: StageVersions) -> None:
        share = worker.share
        self.worker, self.share, self.links = worker, share, worker.links
        self.schedule, self.how = schedule, how
        self.layout = share.layout
        self.replicas = share.plan.plan.replicas()
        check_stashes(how, self.replicas)
        self.counting = Counting(how, self.replicas, share.plan.stage(share.machine))
        self.ahead = self.counting.ahead
        if share.ties:
            raise ValueError(
                f"a parameter is used in stages {(share.ties[0].owner, *share.ties[0].others)}, which update it at "
                "different times: put its units into one stage (--placement), or choose sync or single."
            )
        worker.lookahead = share.plan.size  # replicas wait for each other's batches, which come later
        worker.before_item = None  # the pipeline would have to be emptied for it
        worker.flat.release()  # versions are kept in memory of their own
        self.stage = Stage(
            share.machine,
            share.modules,
            partial(self._optimizer, spec),
            seed=worker.plan.seed,
            recompute=how.recompute,
        )
        first = self.stage.versions.leaves(self.stage.versions.newest)
        self.stage_replicas = StageReplicas(share, worker.links, {name: first[name] for name in self.stage.trained})
        self.base = [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]
        self.accounting = LocalAccounting(worker.client)
        self.batches: deque[tuple[int, Batch]] = deque()  # with their updates; by any replica, and not marked yet
        self.marked = 0
        self.updates = 0
        self.gathered = 0  # samples whose gradients wait for an update
        self.skipped: dict[int, str] = {}  # update -> why it was none
        self.empty_at = 0, 0  # batches and updates when the pipeline was empty last
        self.in_use: dict[int, int] = {}  # batch number -> the version it goes back through

    @property
    def optimizer(self) -> Optimizer | None:
        return self.stage.versions.optimizer

    def _optimizer(self, spec: OptimizerSpec, parameters: list[nn.Parameter]) -> Optimizer:
        """In the user's parameter groups, as far as they are held here."""
        flat = self.worker.flat
        group_of = {id(p): s.group for p, s in zip(flat.parameters, flat.layout.parameters, strict=True)}
        groups: list[dict[str, Any]] = [{"params": [], **settings} for settings in flat.layout.groups]
        for parameter in parameters:
            groups[group_of.get(id(parameter), 0)]["params"].append(parameter)
        return build(spec, [group for group in groups if group["params"]])

    # ---- which batches ---------------------------------------------------------------------------------------------

    def turn(self, batch: Batch) -> Passing | None:
        """Number the next batch; None: it goes through another replica of this stage."""
        number, place = self.marked + len(self.batches), self._next_place()
        update = self.empty_at[1] + self.counting.update(place)
        self.batches.append((update, batch))
        self._mark()  # the others of its round may have been faster, and have made the update with it
        return (
            Passing(number, place, update, batch) if place % self.stage_replicas.count == self.share.replica else None
        )

    def _next_place(self) -> int:
        return self.marked + len(self.batches) - self.empty_at[0]

    # ---- forward ---------------------------------------------------------------------------------------------------

    async def forward(self, turn: Turn) -> None:
        assert isinstance(turn, Passing)
        passing = turn
        passing.version = self.in_use[passing.number] = self._version(passing.place)
        passing.passage = self._passage(passing)
        await passing.passage.forward(self.share.first.mine)

    def _passage(self, passing: Passing) -> MicrobatchRun:
        worker, share = self.worker, self.share
        torch.default_generator.manual_seed(worker.seed_of(passing.batch))  # the same samples on all of the team
        data = worker.data.batch(worker.sampler.indices(passing.batch))
        args, kwargs = inputs_of(worker.task, data)
        loss, answer = loss_of(worker.task, data), share.cut.answer
        weight = self._samples(passing) / self._full_round() if self.how.pipedream_2bw else 1.0
        compute = AtVersion(self.stage, passing.number, passing.version, passing.update, weight, self.how.stash)
        part = FragmentRun(share.cut, self.layout, share.machine, share.modules, compute)
        microbatch = Microbatch(
            (passing.number,), share.cut.bind(args, kwargs), lambda outputs: loss(answer(outputs)), 1.0, None
        )
        return MicrobatchRun(
            part, self.links, lambda stage: share.plan.home(stage, passing.place), microbatch, share.shares
        )

    def _version(self, place: int) -> int:
        """Of the parameters for a batch; there is none that is older than the last time the pipeline was empty."""
        emptied = self.empty_at[1]
        return emptied + self.counting.version(place, self.stage.versions.newest - emptied)

    # ---- backward --------------------------------------------------------------------------------------------------

    async def backward(self, turn: Turn) -> None:
        assert isinstance(turn, Passing)
        passing = turn
        assert passing.passage is not None
        await passing.passage.backward(self.share.first.mine)
        if self.share.machine == self.layout.answer_machine:
            self.worker.count_loss(passing.batch, passing.passage.loss)
        del self.in_use[passing.number]
        samples = self._samples(passing)
        self.gathered += samples
        if self.counting.completes(passing.place):
            await self._update(passing.update)
        self.worker.count_samples(samples)

    def _samples(self, passing: Passing) -> int:
        return self.worker.plan.samples_in(passing.batch.portion, passing.batch.k)

    def _full_round(self) -> int:
        """Samples of an update, if none of its batches is short or missing."""
        return self.counting.batches * self.worker.plan.batch_size

    # ---- update ----------------------------------------------------------------------------------------------------

    async def _update(self, update: int) -> None:
        """One step with the mean over the samples of a round of batches, by this worker and its mates."""
        total = self.stage.totals.pop(update, {})
        samples, self.gathered = self.gathered, 0
        if self.stage_replicas.others and self.stage.trained:
            total = await self.stage_replicas.mean(update, total, samples)
        elif self.how.pipedream_2bw and samples != self._full_round():
            total = {name: gradient * (self._full_round() / samples) for name, gradient in total.items()}
        first = next(b for u, b in self.batches if u == update)
        finite = is_finite(list(total.values()))
        self._release(self._version(self._next_place()))  # first: its memory serves the next version
        self._step(total if finite else {}, first)
        self.updates += 1
        if not finite:
            self.skipped[update] = "not finite"
        self._mark()

    def _step(self, total: Mapping[str, Tensor], batch: Batch) -> None:
        """In the same memory where nobody needs the version that is there."""
        versions = self.stage.versions
        if self.optimizer is not None:
            scale = self.schedule.scale(self.worker.plan.progress(batch.portion, batch.k))
            for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
                group["lr"] = lr * scale
        needed = versions.newest in self.in_use.values() or self.counting.lags
        overwrite = not self.how.stash or not needed
        versions.update(total, overwrite)

    def _release(self, coming: int) -> None:
        """Let go of what nobody goes back through, before the version that the next forward takes."""
        versions = self.stage.versions
        needed = {*self.in_use.values(), versions.newest}
        for version in sorted(versions.live):
            if version not in needed and version < coming:
                versions.release(version)

    def _mark(self) -> None:
        """What is in an update is done: the batches of the other replicas, too."""
        while self.batches and self.batches[0][0] < self.updates:
            update, batch = self.batches.popleft()
            self.marked += 1
            self.accounting.add(ranges(batch.portion, [batch.k], batch.lease), self.skipped.get(update, ""))

    async def settle(self) -> None:
        """All are home. A last round of fewer batches makes an update, too, even if this replica had none of them."""
        self._release(self.stage.versions.newest)  # the next forward takes the newest: there is no other on the way
        if self.batches:
            await self._update(self.updates)
        self.empty_at = self.marked, self.updates
        self._release(self.stage.versions.newest)
