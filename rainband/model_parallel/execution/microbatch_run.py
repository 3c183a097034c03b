"""One microbatch on one machine, forward and backward, and the values it exchanges with other machines."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from rainband.model_parallel.execution.fragment_run import FragmentMessage, FragmentRun
from rainband.model_parallel.graph.graph import tensors_in
from rainband.protocol.steps import Handle, Work
from rainband.protocol.worker_stats import Stats

if TYPE_CHECKING:
    from rainband.protocol.peer_inbox import Arrival, Peers, Tag


END: Tag = ("end",)


class FragmentWork(Work):
    """The computation of one fragment; awaiting it returns its result."""

    def __init__(self, compute: Callable[[], Any], share: float, label: str) -> None:
        self.compute, self.share, self.label = compute, share, label
        self.done = False
        self.result: Any = None

    def perform(self) -> None:
        self.result = self.compute()
        self.done = True

    def __await__(self) -> Generator[FragmentWork, None, Any]:
        while not self.done:
            yield self
        return self.result


class RunHooks(Protocol):
    """Something that can be waited for, such as a message."""

    def ready(self) -> bool: ...


class AnyOf(Handle):
    """Waits until one of several things is ready."""

    def __init__(self, arrivals: Sequence[RunHooks], links: ReplicaLinks, source: int | None = None) -> None:
        """`source`: the rank that must act for it; None: any of the others may have to."""
        assert arrivals, "nothing to wait for"
        self.arrivals, self.links, self.source = arrivals, links, source

    def ready(self) -> bool:
        return any(arrival.ready() for arrival in self.arrivals)

    def may_never_complete(self, stopping: bool) -> bool:
        """Return True if a sender has ended: it sends nothing more. What others sent may still arrive."""
        return self.links.has_ended(self.source)


class ReplicaLinks:
    """The links of a worker to the others of its replica, by rank, and which of them have ended."""

    def __init__(self, peers: Peers, rank: int, size: int) -> None:
        self.peers = peers
        self.others = [other for other in range(size) if other != rank]
        self.ends: dict[int, Arrival] = {}
        self.stats = Stats()

    def send(self, to: int, tag: Tag, payload: Any) -> None:
        if tag[0] != "answer":  # evaluation is not counted
            self.stats.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(payload))
        self.peers.send(to, tag, payload)

    def tell_all(self, tag: Tag, payload: Any) -> None:
        for other in self.others:
            self.peers.send(other, tag, payload)

    def recv(self, source: int, tag: Tag) -> Arrival:
        return self.peers.recv(source, tag)

    async def receive(self, source: int, tag: Tag) -> Any:
        arrival = self.peers.recv(source, tag)
        await AnyOf([arrival], self, source)
        return await arrival

    def watch_ends(self) -> None:
        self.ends = {other: self.peers.recv(other, END) for other in self.others}

    def forget_ends(self) -> None:
        """Accept messages of workers that have ended, too: they save the model together."""
        self.ends = {}

    def say_end(self) -> None:
        """Tell the others that this worker's strategy has ended, so that they do not wait for it."""
        self.tell_all(END, None)

    def has_ended(self, other: int | None = None) -> bool:
        """Return True if this one of the others has ended; None: if any has."""
        return any(end.ready() for rank, end in self.ends.items() if other in (None, rank))


@dataclass(frozen=True)
class Microbatch:
    """A microbatch, as every worker of a replica knows it."""

    tag: Tag  # distinguishes it from the others that are under way
    inputs: Mapping[str, Any]
    loss: Callable[[Mapping[str, Any]], Tensor]  # of the model's output values
    weight: float  # its fraction of the batch's samples
    seed: int | None  # None: the compute policy seeds itself
    goes_back: bool = True  # False: no backward, as for an evaluation
    factor: float | None = None  # multiplies its loss, in place of the weight; 0: it has no loss


@dataclass(frozen=True)
class TimeShares:
    """The fraction of a whole gradient's time that each fragment's forward and backward take."""

    forward: Mapping[int, float]
    backward: Mapping[int, float]


class MicrobatchRun:
    """Runs fragments when their inputs have arrived. A value goes once to each machine that reads it."""

    def __init__(
        self,
        fragment_run: FragmentRun,
        links: ReplicaLinks,
        rank_of: Callable[[int], int],
        microbatch: Microbatch,
        shares: TimeShares,
    ) -> None:
        """`rank_of`: the rank of the worker that takes this microbatch through a machine of the placement."""
        self.fragment_run, self.links, self.rank_of = fragment_run, links, rank_of
        self.microbatch, self.shares = microbatch, shares
        self.loss = 0.0  # on the answer machine: the microbatch's summand of the batch's mean loss
        fragment_run.give(microbatch.inputs)
        self.values = self._coming("value", fragment_run.values_to_come().items())
        self.gradients: dict[tuple[str, int], Arrival] | None = None  # known after the forwards

    def _coming(self, kind: str, expected: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Arrival]:
        return {(value, at): self.links.recv(self.rank_of(at), self._tag(kind, value)) for value, at in expected}

    async def forward(self, fragments: Sequence[int]) -> None:
        """Run these fragments of the run."""
        run = self.fragment_run
        while not run.is_forward_done(fragments):
            await self._take("value", self.values, wait=run.next_forward(fragments) is None)
            while (index := run.next_forward(fragments)) is not None:
                share = self.microbatch.weight * self.shares.forward[index]
                self._send(await FragmentWork(partial(self._run, index), share, f"F{self.microbatch.tag[-1]}"))

    def _run(self, index: int) -> list[FragmentMessage]:
        # Dropout draws the same numbers in every schedule, on whichever worker computes this microbatch.
        if self.microbatch.seed is not None:
            torch.default_generator.manual_seed(self.microbatch.seed + index)
        with torch.set_grad_enabled(self.microbatch.goes_back):
            return self.fragment_run.forward(index)

    async def backward(self, fragments: Sequence[int]) -> None:
        """Run the backward of these fragments; all forwards of the machine are done."""
        run, label = self.fragment_run, f"B{self.microbatch.tag[-1]}"
        if run.layout.answer_fragment in fragments:
            self._send(await FragmentWork(self._answer, 0.0, label))
        if self.gradients is None:
            self.gradients = self._coming("gradient", run.gradients_to_come())
        while not run.is_backward_done(fragments):
            await self._take("gradient", self.gradients, wait=run.next_backward(fragments) is None)
            while (index := run.next_backward(fragments)) is not None:
                share = self.microbatch.weight * self.shares.backward[index]
                self._send(await FragmentWork(partial(run.backward, index), share, label))
        if run.is_backward_done(run.mine):
            run.give({})  # frees what the backward needed

    def _answer(self) -> list[FragmentMessage]:
        factor = self.microbatch.weight if self.microbatch.factor is None else self.microbatch.factor
        if not factor:
            return self.fragment_run.answered()
        loss = self.microbatch.loss(self.fragment_run.outputs()) * factor
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        self.loss = loss.item()
        return self.fragment_run.answered()

    async def _take(self, kind: str, coming: dict[tuple[str, int], Arrival], wait: bool) -> None:
        """Take the messages that have arrived; with `wait`, first wait for one."""
        if wait:
            await AnyOf(list(coming.values()), self.links)
        for key in [key for key, arrival in coming.items() if arrival.ready()]:
            payload = await coming.pop(key)
            run, (value, source) = self.fragment_run, key
            if kind == "value":
                pytree, wants = payload
                run.take(FragmentMessage("value", value, source, run.machine, pytree, tuple(wants)))
            else:
                run.take(FragmentMessage("gradient", value, source, run.machine, payload))

    def _send(self, messages: Sequence[FragmentMessage]) -> None:
        for message in messages:
            is_value = message.kind == "value"
            payload = [message.payload, list(message.wants_gradient)] if is_value else message.payload
            self.links.send(self.rank_of(message.destination), self._tag(message.kind, message.value), payload)

    def _tag(self, kind: str, value: str) -> Tag:
        return (*self.microbatch.tag, kind, value)
