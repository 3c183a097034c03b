"""A worker that computes its share of a model, with the others of its team; strategies see an ordinary worker.

Every worker of a team runs the strategy's whole coroutine on the blocks of its own share. The first one leads: it has
the leases, and tells the others which cell comes next. A gradient is computed together, and is one for all: its loss is
told to all, and if it is not finite anywhere it is skipped everywhere. A round is read by the whole team, or by nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from rainband.model.flat_parameters import is_finite
from rainband.model.gradient import Gradient
from rainband.model_parallel.execution.fragment_run import FragmentRun
from rainband.model_parallel.execution.microbatch_run import AnyOf, Microbatch, MicrobatchRun, ReplicaLinks
from rainband.model_parallel.execution.submodel import Submodel, same_on_all
from rainband.model_parallel.execution.weight_stashing import Stashing
from rainband.model_parallel.graph.eval_graph import evaluating
from rainband.model_parallel.graph.split_loss import inputs_of, loss_of
from rainband.strategy import Batch, WorkItem
from rainband.worker.worker import ModuleWorker, ServerSide

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rainband.protocol.lr_schedules import Schedule
    from rainband.protocol.optimizer_spec import OptimizerSpec
    from rainband.protocol.peer_inbox import Arrival, Tag
    from rainband.stage import StageVersions
    from rainband.tasks.task import Data, Task
    from rainband.worker.client import Client
    from rainband.worker.pulls import PullHandle

FIRST = 0  # the place of the worker that leads


class StageServers(ServerSide):
    """The servers of one worker's own blocks."""

    def __init__(self, client: Client, links: ReplicaLinks) -> None:
        super().__init__(client)
        self.links = links

    def pull(self, round: int | None = None, ahead: int = 0) -> Any:
        handle = self.client.pull(round, ahead)
        return handle if round is None else PullTogether(handle, self.links)


class PullTogether:
    """A round's parameters: it is still open for all of the team, or for none of it."""

    def __init__(self, handle: PullHandle, links: ReplicaLinks) -> None:
        self.handle = handle
        self.links = links

    def has_every(self) -> bool:
        return self.handle.has_every()  # those who watch a worker ask

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


class Question:
    """Has the round that was asked for opened on all our blocks?"""

    def __init__(self, number: int, client: Client) -> None:
        self.number = number
        self.client = client

    def ready(self) -> bool:
        return self.client.pulls.has_opened()


class ShareWorker(ModuleWorker):
    """One worker of a team."""

    def __init__(
        self,
        rank: int,
        num_replicas: int,
        task: Task,
        data: Data,
        share: Submodel,
        client: Client,
        links: ReplicaLinks,
    ) -> None:
        super().__init__(rank, num_replicas, task, data, share.module, client)
        self.share = share
        self.links = links
        self.servers = StageServers(client, links)
        links.stats = client.stats  # what goes to the others is counted
        self.orders = 0
        self.wanted = 0  # questions whether a cell is still wanted
        self.order_to_come: Arrival | None = None
        self.lookahead = 0  # cells that the others are told of before the first begins them
        self.resting = False
        self.asked_round = -1  # what the first asks the others, and their answers
        self.opening: list[Arrival] = []
        self.question: Question | None = None  # what we were asked
        if self.leads and client.plan.items_per_round:
            client.open_rounds_with(self._opened_for_all)
        self.gone_through = 0  # samples
        self.before_item: Callable[[], None] | None = None  # of the first: measures now and then
        self.parts = [share.first]
        links.watch_ends()

    @property
    def seen(self) -> int:
        return self.gone_through

    @property
    def leads(self) -> bool:
        return self.share.place == FIRST

    # ---- which cells -----------------------------------------------------------------------------------------------

    async def work_items(self) -> AsyncIterator[WorkItem]:
        if not self.leads:
            async for work_item in self._told_items():
                yield work_item
            return
        async for work_item in self._announced():
            yield work_item
        self.order("over", None)

    async def _announced(self) -> AsyncIterator[WorkItem]:
        """The cells of the first worker; the others are told of them, a few ahead of its own if they need that."""
        client = self.client
        announced: deque[WorkItem] = deque()
        while not client.finished and not client.stopping:
            if self.before_item is not None and not announced:  # while nobody is at work
                self.before_item()
            while len(announced) <= self.lookahead and (work_item := client.next_item()) is not None:
                announced.append(work_item)
                batches = [[batch.portion, batch.k, batch.lease] for batch in work_item.batches]
                self.order("cell", [batches, work_item.round, work_item.more])
                self.resting = False
                self.asked_round, self.opening = -1, []
            if announced:
                yield announced.popleft()
            else:
                self.idle()
                await AnyOf([client.state_changed(), *(a for a in self.opening if not a.ready())], self.links)

    def _opened_for_all(self, round_: int) -> bool:
        """Have the others' blocks the version of this round, too? Asks them; a cell that is told resets the question.

        Otherwise we could begin a round that cannot open for them before we have done more for the one before it.
        """
        if self.asked_round != round_:
            self.asked_round = round_
            number = self.orders
            self.order("round", round_)
            self.opening = [self.links.recv(other, ("opened", number)) for other in self.links.others]
        return all(arrival.ready() for arrival in self.opening)

    def idle(self) -> None:
        """There is no cell now. If the servers were told not to wait for us, they must not wait for the others."""
        if self.leads and not self.client.pulls.entered and not self.resting:
            self.resting = True
            self.order("rest", None)

    def order(self, what: str, payload: Any) -> None:
        """The first tells the others what to do next."""
        self.links.tell_all(("order", self.orders), [what, payload])
        self.orders += 1

    def next_order(self) -> Arrival:
        """What the first says next. Asked for once: a message goes to one asker, also to one who waits no more."""
        if self.order_to_come is None:
            self.order_to_come = self.links.recv(FIRST, ("order", self.orders))
        return self.order_to_come

    def take_order(self) -> None:
        """The one that was waited for has come."""
        self.orders += 1
        self.order_to_come = None

    async def _next_order(self) -> tuple[str, Any]:
        arrival = self.next_order()
        while not arrival.ready():
            await AnyOf([arrival, *([self.question] if self.question else [])], self.links, FIRST)
            if self.question is not None and self.question.ready():
                self.links.send(FIRST, ("opened", self.question.number), None)
                self.question = None
        self.take_order()
        what, payload = await arrival
        return what, payload

    async def _told_items(self) -> AsyncIterator[WorkItem]:
        while True:
            what, payload = await self._next_order()
            if what == "over":
                return
            if what == "round":
                self.client.pulls.round(payload)
                self.question = Question(self.orders - 1, self.client)
                continue
            if what == "rest":
                if self.client.pulls.entered:
                    self.client.rest()
            elif what == "answer":
                await self.answer(payload)
            else:
                self.question = None  # the first asks again, if it still wants to know
                batches, round_, more = payload
                yield WorkItem(tuple(Batch(*batch) for batch in batches), round_, more)

    async def still_needed(self, work_item: WorkItem) -> bool:  # type: ignore[override]
        """The first decides for all: otherwise one could leave a batch that the others have begun."""
        tag: Tag = ("wanted", self.wanted)
        self.wanted += 1
        if not self.leads:
            told: bool = await self.links.receive(FIRST, tag)
            return told
        wanted = await self.client.still_needed(work_item)
        self.links.tell_all(tag, wanted)
        return wanted

    # ---- a gradient ------------------------------------------------------------------------------------------------

    def gradient(self, batch: Batch) -> Awaitable[Gradient]:  # type: ignore[override]
        return self._gradient(batch)

    async def _gradient(self, batch: Batch) -> Gradient:
        began, read = self.client.pushes.clock, tuple(self.client.pulls.versions)
        tag: Tag = (batch.portion, batch.k, batch.lease)
        for parameter in self.share.model.parameters():
            parameter.grad = None
        await self._give_ties(tag)
        pieces = self._pieces(batch)
        passages: dict[int, MicrobatchRun] = {}
        for action in self.share.plan.row(self.share.machine, len(pieces)):
            if (
                action.microbatch not in passages
            ):  # its samples are read when they are needed: meanwhile others can begin
                passages[action.microbatch] = self._begun(batch, action.microbatch, pieces)
            passage, fragments = passages[action.microbatch], self.share.fragments(action)
            await (passage.forward(fragments) if action.kind == "F" else passage.backward(fragments))
        await self._gather_ties(tag)
        self.flat.check()
        tensors = self.flat.gradients()
        finite, loss = await self._agree(tag, is_finite(tensors), sum(passage.loss for passage in passages.values()))
        gradient = Gradient(tensors, (batch,), self.plan.samples_in(batch.portion, batch.k), loss)
        gradient.is_finite = finite  # on all of the team, or on none
        gradient.began, gradient.read = began, read
        self._count(gradient)
        return gradient

    def _pieces(self, batch: Batch) -> list[NDArray[np.int64]]:
        """The samples of each microbatch."""
        indices = self.sampler.indices(batch)
        pieces = np.array_split(indices, min(self.share.plan.microbatches, len(indices)))
        while len(self.parts) < len(pieces):
            self.parts.append(self.share.part())
        return pieces

    def _begun(self, batch: Batch, number: int, pieces: list[NDArray[np.int64]]) -> MicrobatchRun:
        """A microbatch, with the same samples and random numbers on all of the team."""
        seed = self._seed(batch) if len(pieces) == 1 else _seed_of(self._seed(batch), number)
        torch.default_generator.manual_seed(seed)
        data = self.data.batch(pieces[number])
        args, kwargs = inputs_of(self.task, data)
        loss, answer = loss_of(self.task, data), self.share.cut.answer
        microbatch = Microbatch(
            tag=(batch.portion, batch.k, batch.lease, number),
            inputs=self.share.cut.bind(args, kwargs),
            loss=lambda outputs: loss(answer(outputs)),
            weight=len(pieces[number]) / sum(map(len, pieces)),
            seed=_seed_of(seed, number),
        )
        return self._passage(self.parts[number], microbatch)

    def _passage(self, part: FragmentRun, microbatch: Microbatch) -> MicrobatchRun:
        return MicrobatchRun(part, self.links, self.share.plan.home, microbatch, self.share.shares)

    async def _agree(self, tag: Tag, finite: bool, loss: float) -> tuple[bool, float]:
        """Is it finite everywhere, and what is its loss? The last machine may not know of the first one's trouble."""
        if not self.leads:
            self.links.send(FIRST, (*tag, "done"), [finite, loss])
            finite, loss = await self.links.receive(FIRST, (*tag, "verdict"))
            return finite, loss
        for other in self.links.others:
            theirs, lost = await self.links.receive(other, (*tag, "done"))
            finite, loss = finite and theirs, loss + lost
        self.links.tell_all((*tag, "verdict"), [finite, loss])
        return finite, loss

    async def _give_ties(self, tag: Tag) -> None:
        """Parameters that several machines use are held by one, which gives them to the others."""
        for number, tie in enumerate(self.share.ties):
            if tie.owner == self.share.machine:
                for other in tie.others:
                    self.links.send(other, (*tag, "tie", number), tie.parameter.detach())
            elif self.share.machine in tie.others:
                same_on_all(tie.parameter, await self.links.receive(tie.owner, (*tag, "tie", number)))

    async def _gather_ties(self, tag: Tag) -> None:
        """Their gradients are summed where they are held, in the order of the machines, so that bits repeat."""
        for number, tie in enumerate(self.share.ties):
            if self.share.machine in tie.others:
                self.links.send(tie.owner, (*tag, "tied", number), tie.parameter.grad)
            elif tie.owner == self.share.machine:
                for other in tie.others:
                    theirs = await self.links.receive(other, (*tag, "tied", number))
                    if theirs is not None:
                        mine = tie.parameter.grad
                        tie.parameter.grad = theirs if mine is None else mine + theirs

    def _count(self, gradient: Gradient) -> None:
        self.gone_through += gradient.samples
        if self.leads:
            super()._count(gradient)
        else:  # samples are counted once
            self.client.stats.steps += 1

    # ---- a stage of a pipeline that is never flushed -----------------------------------------------------------------

    def stage(self, spec: OptimizerSpec, schedule: Schedule, how: StageVersions) -> Stashing:
        return Stashing(self, spec, schedule, how)

    def seed_of(self, batch: Batch) -> int:
        return self._seed(batch)

    def count_loss(self, batch: Batch, loss: float) -> None:
        """Told by the worker that has the answer."""
        samples = self.plan.samples_in(batch.portion, batch.k)
        self.client.stats.loss_sum += loss * samples
        self.client.stats.loss_samples += samples

    def count_samples(self, samples: int) -> None:
        """Counted once, by the workers of the first stage."""
        stats = self.client.stats
        stats.steps += 1
        self.gone_through += samples
        if self.share.machine == 0:
            stats.samples += samples
        if stats.steps == 1:
            self.client.tell(stats.heartbeat())

    # ---- the model's answer, for measuring -------------------------------------------------------------------------

    async def answer(self, call: Any) -> Any:
        """Compute the model's answer together, without gradients; only the first gets it."""
        if self.share.replica:
            return None  # the first of each stage is enough
        number, training, args, kwargs = call
        answers = self.share.answers(training)
        part, layout = answers.part(), answers.layout
        await self._give_ties(("answer", number))  # those of the last batch are an update old
        inputs = answers.cut.bind(args, kwargs)
        microbatch = Microbatch(("answer", number), inputs, lambda _: torch.zeros(()), 1.0, 0, goes_back=False)
        with evaluating(*part.modules.values()) if not training else nullcontext():
            await MicrobatchRun(part, self.links, self.share.plan.home, microbatch, answers.shares).forward(part.mine)
        outputs = part.outputs() if self.share.machine == layout.answer_machine else None
        if layout.answer_machine != FIRST:
            if outputs is not None:
                self.links.send(FIRST, ("answer", number), outputs)
            elif self.leads:
                outputs = await self.links.receive(self.share.plan.home(layout.answer_machine), ("answer", number))
        return answers.cut.answer(outputs) if self.leads and outputs is not None else None


def _seed_of(seed: int, number: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed} {number}".encode()) >> 2


class WholeModel(torch.nn.Module):
    """Stands for the whole model on the first worker of a team: calling it has all of them compute."""

    def __init__(self, worker: ShareWorker, drive: Callable[[Any], Any]) -> None:
        """`drive` runs a coroutine of the worker to its end."""
        super().__init__()
        self.share = worker.module  # so that it has parameters, and a device
        self.worker = [worker]
        self.drive = drive

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (worker,) = self.worker
        call = [worker.orders, self.training, list(args), kwargs]
        worker.order("answer", call)
        return self.drive(worker.answer(call))
