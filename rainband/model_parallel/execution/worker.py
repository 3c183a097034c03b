"""A worker that computes a submodel together with the others of its replica; strategies see an ordinary worker.

Every worker of a replica runs the strategy's whole coroutine on the blocks of its own submodel. The worker of rank 0
leads: it has the leases, and sends the others orders with the next work item. They compute one gradient together: all
get its loss, and if it is not finite on one worker, all skip it. A round is read by all workers of a replica, or none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
import xxhash

from rainband.model.flat_parameters import is_finite
from rainband.model.gradient import Gradient
from rainband.model.loss_parts import states_weight, weight_of
from rainband.model.seeds import seed_global_generators
from rainband.model_parallel.execution.engine import run_actions
from rainband.model_parallel.execution.fragment_run import FragmentRun
from rainband.model_parallel.execution.microbatch_run import AnyOf, Microbatch, MicrobatchRun, ReplicaLinks
from rainband.model_parallel.execution.submodel import Submodel, copy_tied
from rainband.model_parallel.execution.weight_stashing import WeightStashing
from rainband.model_parallel.graph.eval_graph import evaluating
from rainband.protocol.accounting import NO_WEIGHT
from rainband.protocol.messages import TakeSnapshot
from rainband.strategy import Batch, BatchPart, WorkItem
from rainband.worker.worker import ModuleWorker

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rainband.model_parallel.schedules.table import Action
    from rainband.protocol.lr_schedules import Schedule
    from rainband.protocol.optimizer_spec import OptimizerSpec
    from rainband.protocol.peer_inbox import Arrival, Tag
    from rainband.stage import StageVersions
    from rainband.tasks.task import Data, Task
    from rainband.worker.client import Client
    from rainband.worker.pulls import PullHandle

LEADER = 0  # the rank of the worker that has the leases
FLUSH = WorkItem((), more=False)  # empties a pipeline


class StageServers:
    """The servers that hold the blocks of one worker's submodel."""

    def __init__(self, client: Client, links: ReplicaLinks) -> None:
        self.client, self.links = client, links
        self.push, self.exchange, self.refresh = client.push, client.exchange, client.refresh

    def pull(self, round: int | None = None, ahead: int = 0) -> Any:
        handle = self.client.pull(round, ahead)
        return handle if round is None else ReplicaPull(handle, self.links)


class ReplicaPull:
    """A pull of a round's parameters that succeeds on all workers of a replica, or on none."""

    def __init__(self, handle: PullHandle, links: ReplicaLinks) -> None:
        self.handle, self.links = handle, links

    def has_every(self) -> bool:
        return self.handle.has_every()  # for observers of the worker

    @property
    def late(self) -> bool:
        return self.handle.late

    def __await__(self) -> Generator[Any, None, bool]:
        return self._together().__await__()

    async def _together(self) -> bool:
        round_, mine = self.handle.at_version, await self.handle
        self.links.tell_all(("open", round_), mine)
        theirs = [await self.links.receive(other, ("open", round_)) for other in self.links.others]
        if mine and all(theirs):
            return True
        self.handle.pulls.leases.skip_rounds(round_)
        return False


class RoundQuery:
    """The leader's question whether a round has opened on all blocks of this worker."""

    def __init__(self, number: int, client: Client) -> None:
        self.number, self.client = number, client

    def ready(self) -> bool:
        return self.client.pulls.has_opened()


# size: it inherits all that a worker with the whole model has, and adds what its replica agrees on
class StageWorker(ModuleWorker):
    """One worker of a replica."""

    def __init__(
        self,
        rank: int,
        num_replicas: int,
        task: Task,
        data: Data,
        submodel: Submodel,
        client: Client,
        links: ReplicaLinks,
    ) -> None:
        super().__init__(rank, num_replicas, task, data, submodel.module, client)
        self.submodel, self.links = submodel, links
        self.servers = StageServers(client, links)
        links.stats = client.stats  # so that sent bytes are counted
        self.orders = 0
        self.wanted = 0  # questions whether a work item is still needed
        self.order_to_come: Arrival | None = None
        self.lookahead = 0  # work items announced before the leader begins them
        self.resting = False
        self.asked_round = -1  # the round that the leader asked about, and the answers
        self.opening: list[Arrival] = []
        self.question: RoundQuery | None = None  # of the leader, not answered yet
        if self.leads and client.plan.items_per_round:
            client.open_rounds_with(self._opened_for_all)
        self.samples_seen = 0  # samples
        self.before_item: Callable[[], None] | None = None  # evaluates now and then; on the leader
        self.stashing: WeightStashing | None = None  # of a stage that steps by itself
        self.is_flushed = True  # no batch of an announced work item is in the pipeline
        self.fragment_runs = [self.submodel.new_run()]
        links.watch_ends()

    @property
    def seen(self) -> int:
        return self.samples_seen

    @property
    def stage_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer of this worker's stage; None: servers have it, or the stage has no parameters."""
        if self.stashing is not None:
            return self.stashing.optimizer
        return None if self.local_optimizer is None else self.local_optimizer.optimizer

    @property
    def leads(self) -> bool:
        return self.submodel.rank == LEADER

    async def work_items(self) -> AsyncIterator[WorkItem]:
        if not self.leads:
            async for work_item in self._told_items():
                yield work_item
            return
        async for work_item in self._announced():
            yield work_item
        self.order("over", None)

    async def _announced(self) -> AsyncIterator[WorkItem]:
        """Yield the leader's work items, each announced to the others `lookahead` items before."""
        client = self.client
        announced: deque[WorkItem] = deque()
        while not client.finished and not client.stopping:
            if self.before_item is not None and not announced:  # while no batch is under way
                self.before_item()
            while self._announces_more(announced) and (work_item := client.next_item()) is not None:
                announced.append(self._announce(work_item))
            if self._wants_snapshot() and not self.is_flushed:  # now: replicas wait for each other's batches
                announced.append(self._announce(FLUSH))
            if announced:
                yield announced.popleft()
            elif self._wants_snapshot():
                self._take_together()
            else:
                self.idle()
                await AnyOf([client.state_changed(), *(a for a in self.opening if not a.ready())], self.links)

        if self.stashing is not None:  # what the others were told is done, so that all stages end at one update
            if not self.is_flushed:
                announced.append(self._announce(FLUSH))
            for work_item in announced:
                yield work_item
        if self._wants_snapshot():
            self._take_together()

    def _announces_more(self, announced: Sequence[WorkItem]) -> bool:
        return len(announced) <= self.lookahead and not self._wants_snapshot()

    def _announce(self, work_item: WorkItem) -> WorkItem:
        batches = [[batch.portion, batch.k, batch.lease] for batch in work_item.batches]
        self.order("item", [batches, work_item.round, work_item.more])
        self.resting = False
        self.asked_round, self.opening = -1, []
        self.is_flushed = self.stashing is None or not work_item.more
        return work_item

    def _wants_snapshot(self) -> bool:
        snapshots = self.snapshots
        return snapshots is not None and snapshots.steps_itself and snapshots.wanted is not None

    def _take_together(self) -> None:
        """Copy the state of all workers of the replica, for a checkpoint: no batch is in the pipeline."""
        assert self.snapshots is not None and self.snapshots.wanted is not None
        wanted = self.snapshots.wanted
        self.order("snapshot", [wanted.number, wanted.folder])
        self.snapshots.take(wanted)

    def _opened_for_all(self, round_: int) -> bool:
        """Return True if the round has opened on the others' blocks, too; asks them. A new work item ends the question.

        Otherwise the leader could begin a round that cannot open for them before it has done more for the last one.
        """
        if self.asked_round != round_:
            self.asked_round = round_
            number = self.orders
            self.order("round", round_)
            self.opening = [self.links.recv(other, ("opened", number)) for other in self.links.others]
        return all(arrival.ready() for arrival in self.opening)

    def idle(self) -> None:
        """Tell the others that there is no work item now, so that servers do not wait for their pushes either."""
        if self.leads and not self.client.pulls.entered and not self.resting:
            self.resting = True
            self.order("rest", None)

    def order(self, what: str, payload: Any) -> None:
        """Send the others an order: what to do next."""
        self.links.tell_all(("order", self.orders), [what, payload])
        self.orders += 1

    def next_order(self) -> Arrival:
        """Return the arrival of the leader's next order. One per order: it gets the message, awaited or not."""
        if self.order_to_come is None:
            self.order_to_come = self.links.recv(LEADER, ("order", self.orders))
        return self.order_to_come

    def take_order(self) -> None:
        """Count the order that has arrived."""
        self.orders += 1
        self.order_to_come = None

    async def _next_order(self) -> tuple[str, Any]:
        arrival = self.next_order()
        while not arrival.ready():
            await AnyOf([arrival, *([self.question] if self.question else [])], self.links, LEADER)
            if self.question is not None and self.question.ready():
                self.links.send(LEADER, ("opened", self.question.number), None)
                self.question = None
        self.take_order()
        what, payload = await arrival
        return what, payload

    async def _told_items(self) -> AsyncIterator[WorkItem]:
        while True:
            what, payload = await self._next_order()
            if what == "over":
                if self._wants_snapshot():  # of the end: this worker is there
                    self.at_boundary()
                return
            if what == "snapshot":
                assert self.snapshots is not None
                self.snapshots.take(TakeSnapshot(*payload))
                continue
            if what == "round":
                self.client.pulls.round(payload)
                self.question = RoundQuery(self.orders - 1, self.client)
                continue
            if what == "rest":
                if self.client.pulls.entered:
                    self.client.rest()
            elif what == "answer":
                await self.answer(payload)
            else:
                self.question = None  # the leader asks again if it needs to
                batches, round_, more = payload
                yield WorkItem(tuple(Batch(*batch) for batch in batches), round_, more)

    async def still_needed(self, work_item: WorkItem) -> bool:  # type: ignore[override]
        """Let the leader decide for all: otherwise one could leave a batch that the others have begun."""
        tag: Tag = ("wanted", self.wanted)
        self.wanted += 1
        if not self.leads:
            decided: bool = await self.links.receive(LEADER, tag)
            return decided
        wanted = await self.client.still_needed(work_item)
        self.links.tell_all(tag, wanted)
        return wanted

    def gradient(self, batch: Batch | BatchPart) -> Awaitable[Gradient]:  # type: ignore[override]
        assert isinstance(batch, Batch), "stages compute whole batches"
        return self._gradient(batch)

    async def _gradient(self, batch: Batch) -> Gradient:
        began, read = self.client.pushes.clock, tuple(self.client.pulls.versions)
        tag: Tag = (batch.portion, batch.k, batch.lease)
        for parameter in self.submodel.model.parameters():
            parameter.grad = None
        await self._give_ties(tag)
        flushed = FlushedBatch(self, batch)
        await run_actions(self.submodel.plan.row(self.submodel.rank, len(flushed.samples)), flushed)
        await self._gather_ties(tag)
        self.flat.check()
        tensors = self.flat.gradients()
        summands = sum(run.loss for run in flushed.runs.values())
        finite, loss, weights = await self._agree(tag, is_finite(tensors), summands, flushed.weights)
        gradient = Gradient(tensors, (batch,), self.plan.samples_in(batch.portion, batch.k), loss)
        gradient.is_finite = finite  # on all workers of the replica, or on none
        if weights and sum(weights):
            gradient.divide(sum(weights))
        elif weights:
            gradient.left_out = NO_WEIGHT
        gradient.began, gradient.read = began, read
        self._count(gradient)
        return gradient

    async def _agree(
        self, tag: Tag, finite: bool, loss: float, weights: Sequence[float]
    ) -> tuple[bool, float, Sequence[float]]:
        """Return whether the gradient is finite on all workers, its loss, and the weights of the microbatches.

        The leader collects them. Of each microbatch, all workers that compute it know the same weight.
        """
        if not self.leads:
            self.links.send(LEADER, (*tag, "done"), [finite, loss, list(weights)])
            finite, loss, weights = await self.links.receive(LEADER, (*tag, "verdict"))
            return finite, loss, weights
        for other in self.links.others:
            theirs, lost, known = await self.links.receive(other, (*tag, "done"))
            finite, loss = finite and theirs, loss + lost
            weights = [max(pair) for pair in zip(weights, known, strict=True)]
        self.links.tell_all((*tag, "verdict"), [finite, loss, list(weights)])
        return finite, loss, weights

    async def _give_ties(self, tag: Tag, among: Collection[int] | None = None) -> None:
        """Send the others the parameters that several workers use; one of them holds each. `among`: those to serve."""
        rank = self.submodel.rank
        for number, tie in enumerate(self.submodel.ties):
            others = [other for other in tie.others if among is None or other in among]
            if tie.owner == rank:
                for other in others:
                    self.links.send(other, (*tag, "tie", number), tie.parameter.detach())
            elif rank in others:
                copy_tied(tie.parameter, await self.links.receive(tie.owner, (*tag, "tie", number)))

    async def _gather_ties(self, tag: Tag) -> None:
        """Sum gradients of tied parameters where they are held, in the order of the ranks, so that bits repeat."""
        for number, tie in enumerate(self.submodel.ties):
            if self.submodel.rank in tie.others:
                self.links.send(tie.owner, (*tag, "tied", number), tie.parameter.grad)
            elif tie.owner == self.submodel.rank:
                for other in tie.others:
                    theirs = await self.links.receive(other, (*tag, "tied", number))
                    if theirs is not None:
                        mine = tie.parameter.grad
                        tie.parameter.grad = theirs if mine is None else mine + theirs

    def _count(self, gradient: Gradient) -> None:
        self.samples_seen += gradient.samples
        if self.leads:
            super()._count(gradient)
        else:  # the leader counts the samples
            self.client.stats.steps += 1

    def stage(self, spec: OptimizerSpec, schedule: Schedule, how: StageVersions) -> WeightStashing:
        self.stashing = stashing = WeightStashing(self, spec, schedule, how)
        self.accounting = stashing.accounting
        if self.snapshots is not None:
            self.snapshots.put_training()
            stashing.begin_at(self.accounting)
        return stashing

    def fragment_run(self, number: int) -> FragmentRun:
        """Return the run for microbatch `number` of a batch; they are reused by later batches."""
        while len(self.fragment_runs) <= number:
            self.fragment_runs.append(self.submodel.new_run())
        return self.fragment_runs[number]

    def count_loss(self, batch: Batch, loss: float) -> None:
        """Report the loss of a batch; on the worker that has the answer."""
        samples = self.plan.samples_in(batch.portion, batch.k)
        self.client.stats.loss_sum += loss * samples
        self.client.stats.loss_samples += samples

    def count_samples(self, samples: int) -> None:
        """Count a batch; its samples are counted by the workers of the first stage."""
        stats = self.client.stats
        stats.steps += 1
        self.samples_seen += samples
        if self.submodel.machine == 0:
            stats.samples += samples
        if stats.steps == 1:
            self.client.tell(stats.heartbeat())

    async def answer(self, call: Any) -> Any:
        """Compute the model's answer together, without gradients; return it on the leader, None elsewhere."""
        if self.submodel.replica:
            return None  # the first replica of each stage computes it
        number, training, args, kwargs = call
        answers = self.submodel.answers(training)
        run, layout, rank_of = answers.new_run(), answers.layout, self.submodel.plan.rank_of
        await self._give_ties(("answer", number), self.submodel.plan.first_replicas)  # the last ones are an update old
        inputs = answers.cut.bind(args, kwargs)
        microbatch = Microbatch(("answer", number), inputs, lambda _: torch.zeros(()), 1.0, 0, goes_back=False)
        with evaluating(*run.modules.values()) if not training else nullcontext():
            await MicrobatchRun(run, self.links, rank_of, microbatch, answers.shares).forward(run.mine)
        outputs = run.outputs() if self.submodel.machine == layout.answer_machine else None
        if layout.answer_machine != LEADER:
            if outputs is not None:
                self.links.send(LEADER, ("answer", number), outputs)
            elif self.leads:
                outputs = await self.links.receive(rank_of(layout.answer_machine), ("answer", number))
        return answers.cut.answer(outputs) if self.leads and outputs is not None else None


def _seed_of(seed: int, number: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed} {number}".encode()) >> 2


class FlushedBatch:
    """A batch of which every microbatch is done before the parameters change."""

    def __init__(self, worker: StageWorker, batch: Batch) -> None:
        self.worker, self.batch = worker, batch
        indices, most = worker.sampler.indices(batch), worker.submodel.plan.microbatches
        self.samples: list[NDArray[np.int64]] = np.array_split(indices, min(most, len(indices)))
        self.rank_of = worker.submodel.plan.rank_of
        self.runs: dict[int, MicrobatchRun] = {}
        stated = states_weight(worker.task) is not None
        self.weights = [0.0] * len(self.samples) if stated else []  # of the microbatches computed here

    def fragments(self, action: Action) -> Sequence[int]:
        return self.worker.submodel.fragments(action)

    def run_of(self, action: Action) -> MicrobatchRun:
        number = action.microbatch
        if number not in self.runs:  # its samples are read when they are needed, so that other workers can begin
            self.runs[number] = self._start(number)
        return self.runs[number]

    def finish(self, action: Action, run: MicrobatchRun) -> None:
        """Keep the run: its loss is read at the end."""

    async def update(self, action: Action) -> None:
        raise AssertionError("updates are the strategy's")

    def _start(self, number: int) -> MicrobatchRun:
        """Read a microbatch, with the same samples and random numbers on all workers of the replica."""
        worker, batch, submodel = self.worker, self.batch, self.worker.submodel
        seed = worker.seed_of(batch) if len(self.samples) == 1 else _seed_of(worker.seed_of(batch), number)
        seed_global_generators(seed)
        samples = worker.data.batch(self.samples[number])
        if self.weights:  # before the loss, which may change its batch
            self.weights[number] = weight_of(worker.task, samples, len(self.samples[number]))
        call, answer = submodel.loss_call(worker.task, samples), submodel.cut.answer
        microbatch = Microbatch(
            tag=(batch.portion, batch.k, batch.lease, number),
            inputs=submodel.cut.bind(call.args, call.kwargs),
            loss=lambda outputs: call.loss(answer(outputs)),
            weight=len(self.samples[number]) / sum(map(len, self.samples)),
            seed=_seed_of(seed, number),
            factor=self._factor(number),
        )
        run = worker.fragment_run(number)
        return MicrobatchRun(run, worker.links, lambda at: self.rank_of(at, number), microbatch, submodel.shares)

    def _factor(self, number: int) -> float | None:
        """Return what the microbatch's loss is multiplied by; None: its fraction of the samples.

        With weights, the sum of the products is divided by the weight of the batch, which is known at the end.
        """
        if self.weights:
            return self.weights[number]
        return 1.0 if self.worker.submodel.plan.loss_is_sum else None


class WholeModel(torch.nn.Module):
    """Stands for the whole model on the leader: a call lets all workers of the replica compute it."""

    def __init__(self, worker: StageWorker, drive: Callable[[Any], Any]) -> None:
        """`drive` runs a coroutine of the worker to completion."""
        super().__init__()
        self.submodel = worker.module  # so that it has parameters, and a device
        self.worker = [worker]
        self.drive = drive

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield one parameter, which has the device; the others are on other workers."""
        yield from islice(super().named_parameters(*args, **kwargs), 1)
        _refuse_parts("parameters")

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_parts("a state_dict")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (worker,) = self.worker
        call = [worker.orders, self.training, list(args), kwargs]
        worker.order("answer", call)
        return self.drive(worker.answer(call))


def _refuse_parts(what: str) -> NoReturn:
    raise ValueError(
        f"the task's evaluate uses {what} of its model, which is on several workers: there it may only call the model. "
        "Compute what needs them from the saved model.safetensors."
    )
