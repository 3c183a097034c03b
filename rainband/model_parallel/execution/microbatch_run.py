"""One microbatch on its way through one worker's share of a model, forward and back, and what crosses to the others."""

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


class Piece(Work):
    """A piece of a gradient; awaiting gives what computing it returned."""

    def __init__(self, compute: Callable[[], Any], share: float, label: str) -> None:
        self.compute = compute
        self.share = share
        self.label = label
        self.done = False
        self.result: Any = None

    def perform(self) -> None:
        self.result = self.compute()
        self.done = True

    def __await__(self) -> Generator[Piece, None, Any]:
        while not self.done:
            yield self
        return self.result


class RunHooks(Protocol):
    """A message, or anything else that is there or not."""

    def ready(self) -> bool: ...


class AnyOf(Handle):
    """Waits until one of several messages is there, or something else has happened."""

    def __init__(self, arrivals: Sequence[RunHooks], links: ReplicaLinks, source: int | None = None) -> None:
        """`source`: who has to send it; None: any of the others may have to do something for it."""
        assert arrivals, "waiting for nothing would never end"
        self.arrivals = arrivals
        self.links = links
        self.source = source

    def ready(self) -> bool:
        return any(arrival.ready() for arrival in self.arrivals)

    def may_never_complete(self, stopping: bool) -> bool:
        """What one who has come to its end did not send before will not come; others may still have sent theirs."""
        return self.links.has_ended(self.source)

    def __await__(self) -> Generator[Handle, None, None]:
        return self._wait()


class ReplicaLinks:
    """The others who compute the same model: what they send, and who of them has come to its end."""

    def __init__(self, peers: Peers, place: int, size: int) -> None:
        self.peers = peers
        self.others = [other for other in range(size) if other != place]
        self.ends: dict[int, Arrival] = {}
        self.stats = Stats()

    def send(self, to: int, tag: Tag, payload: Any) -> None:
        if tag[0] != "answer":  # measuring is no part of training
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
        """What comes from now on comes from those who have ended, too."""
        self.ends = {}

    def say_end(self) -> None:
        """The strategy has come to its end here, regularly or not: nobody must wait for us."""
        self.tell_all(END, None)

    def has_ended(self, other: int | None = None) -> bool:
        """Has one of the others come to its end? None: has any of them?"""
        return any(end.ready() for place, end in self.ends.items() if other in (None, place))


@dataclass(frozen=True)
class Microbatch:
    """What every worker of a team knows of a microbatch."""

    tag: Tag  # says which it is, among all that are on their way
    inputs: Mapping[str, Any]
    loss: Callable[[Mapping[str, Any]], Tensor]  # of the model's output values
    weight: float  # its part of the batch's samples
    seed: int | None  # None: what computes has its own
    goes_back: bool = True  # no: its answer is all that is wanted


@dataclass(frozen=True)
class Shares:
    """Of the time of a whole gradient: what each fragment takes forward and back."""

    forward: Mapping[int, float]
    backward: Mapping[int, float]


class MicrobatchRun:
    """Fragments run when it is their turn and what they read is there; a value goes once to each reading machine."""

    def __init__(
        self, part: FragmentRun, links: ReplicaLinks, home: Callable[[int], int], microbatch: Microbatch, shares: Shares
    ) -> None:
        """`home`: the place in the team of a machine of the plan."""
        self.part = part
        self.links = links
        self.home = home
        self.microbatch = microbatch
        self.shares = shares
        self.loss = 0.0  # where the answer is: the microbatch's share of the batch's mean loss
        part.give(microbatch.inputs)
        self.values = self._coming("value", part.values_to_come().items())
        self.gradients: dict[tuple[str, int], Arrival] | None = None  # which there will be is known after the forwards

    def _coming(self, kind: str, expected: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Arrival]:
        return {
            (value, source): self.links.recv(self.home(source), self._tag(kind, value)) for value, source in expected
        }

    async def forward(self, fragments: Sequence[int]) -> None:
        """Run these fragments of the part."""
        part = self.part
        while not part.is_forward_done(fragments):
            await self._take("value", self.values, wait=part.next_forward(fragments) is None)
            while (index := part.next_forward(fragments)) is not None:
                share = self.microbatch.weight * self.shares.forward[index]
                self._send(await Piece(partial(self._run, index), share, f"F{self.microbatch.tag[-1]}"))

    def _run(self, index: int) -> list[FragmentMessage]:
        # Dropout draws the same numbers in every schedule, whoever computes this microbatch.
        if self.microbatch.seed is not None:
            torch.default_generator.manual_seed(self.microbatch.seed + index)
        with torch.set_grad_enabled(self.microbatch.goes_back):
            return self.part.forward(index)

    async def backward(self, fragments: Sequence[int]) -> None:
        """Go back through these fragments; all forwards of the part are done."""
        part, label = self.part, f"B{self.microbatch.tag[-1]}"
        if part.layout.answer_fragment in fragments:
            self._send(await Piece(self._answer, 0.0, label))
        if self.gradients is None:
            self.gradients = self._coming("gradient", part.gradients_to_come())
        while not part.is_backward_done(fragments):
            await self._take("gradient", self.gradients, wait=part.next_backward(fragments) is None)
            while (index := part.next_backward(fragments)) is not None:
                share = self.microbatch.weight * self.shares.backward[index]
                self._send(await Piece(partial(part.backward_of, index), share, label))
        if part.is_backward_done(part.mine):
            part.give({})  # what was kept for it is of no use any more

    def _answer(self) -> list[FragmentMessage]:
        loss = self.microbatch.loss(self.part.outputs()) * self.microbatch.weight
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        self.loss = loss.item()
        return self.part.answered()

    async def _take(self, kind: str, coming: dict[tuple[str, int], Arrival], wait: bool) -> None:
        """Hand the part what has come; wait until something has, if it can do nothing before."""
        if wait:
            await AnyOf(list(coming.values()), self.links)
        for key in [key for key, arrival in coming.items() if arrival.ready()]:
            payload = await coming.pop(key)
            value, source = key
            if kind == "value":
                pytree, wants = payload
                self.part.take(FragmentMessage("value", value, source, self.part.machine, pytree, tuple(wants)))
            else:
                self.part.take(FragmentMessage("gradient", value, source, self.part.machine, payload))

    def _send(self, messages: Sequence[FragmentMessage]) -> None:
        for message in messages:
            payload = message.payload
            if message.kind == "value":
                payload = [message.payload, list(message.wants_gradient)]
            self.links.send(self.home(message.destination), self._tag(message.kind, message.value), payload)

    def _tag(self, kind: str, value: str) -> Tag:
        return (*self.microbatch.tag, kind, value)
