"""An inner server of a tree: adds the gradients of its children, and passes parameters down. A state machine.

It owns no block. A push is answered when the root has accepted it, so what an inner server holds is never the only
copy of anything accepted. While one sum of a block is under way to the parent, the gradients that arrive are added to
the next one: the busier the parent, the more it gets at once. So a lost or late worker delays no other.

Gradients are kept until their sum is answered. If the root refuses a sum, because a lease of a lost worker was revoked,
for example, each of its gradients is sent again by itself, and gets an answer of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from rainband.protocol.messages import (
    Ack,
    Assign,
    Message,
    Params,
    Peer,
    Pull,
    Push,
    PushResult,
    RelayedMember,
    RelayedPush,
)
from rainband.server.block_parameters import FULL_PRECISION
from rainband.server.readers import Readers, ServerOutput
from rainband.server.validation import unpack

if TYPE_CHECKING:
    from rainband.protocol.layout import BlockSpec
    from rainband.protocol.parameter_buffers import ParameterBuffer

Publish = Callable[[Sequence["BlockSpec"], int], "list[ParameterBuffer]"]
TERM = 1


class ChildPush(NamedTuple):
    """A gradient of a block that one child has sent, or a sum."""

    child: Peer
    sequence: int  # the child's
    slot: int
    members: tuple[RelayedMember, ...]
    absent: tuple[int, ...]
    payload: Tensor | None  # None: its batches are skipped

    def batches(self) -> Iterator[tuple[int, int]]:
        return ((r.portion, k) for member in self.members for r in member.push.push_id for k in range(r.first, r.last))


class RelayedBlock:
    """A block of the parent: the newest parameters received, the readers that wait, and the sums on their way up."""

    clocked = keeps_reads = False
    loaded = True

    def __init__(self, spec: BlockSpec, buffer: ParameterBuffer) -> None:
        self.spec, self.index, self.buffer = spec, spec.index, buffer
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.rule = self  # it decides about reads itself
        self.version = -1  # the newest received
        self.held = [-1] * len(buffer.tensors)  # the version in each tensor
        self.rounds_over = -1  # the last round of which the parent has no parameters any more
        self.answered = 0  # the last request to the parent that it has answered for this block
        self.waiting: dict[Peer, Pull] = {}
        self.needs: dict[Peer, int] = {}  # waiting reader -> the request to the parent that is late enough for it
        self.next: deque[list[ChildPush]] = deque()  # sums that have not left, the first one first
        self.under_way: list[ChildPush] = []
        self.sequence = 0  # of the sum under way

    def admits(self, block: RelayedBlock, pull: Pull, reader: int) -> bool:
        if pull.at_version < 0:
            return False  # see `_admit_newest`: what is here may be old
        return pull.at_version in self.held or pull.at_version <= self.rounds_over

    def publish(self, version: int, values: Tensor) -> None:
        """Show these parameters to readers."""
        number = version % len(self.held)
        if version <= self.held[number]:
            return
        self.version = max(self.version, version)
        self.buffer.begin_write()
        self.buffer.tensors[number].copy_(values.view(self.dtype))
        self.buffer.begin_at(self.version)
        self.held[number] = version

    def has(self, child: Peer, sequence: int) -> bool:
        """Return True if this message of a child is here already: it arrived twice."""
        here = (*self.under_way, *(one for bundle in self.next for one in bundle))
        return any(one.child == child and one.sequence == sequence for one in here)

    def add(self, one: ChildPush) -> None:
        """Add a gradient to the sum that leaves last; if it shares batches with it, it leaves by itself."""
        mine = set(one.batches())
        bundle = self.next[-1] if self.next else None
        if bundle is None or any(mine.intersection(other.batches()) for other in bundle):
            self.next.append([one])
        else:
            bundle.append(one)


class Relay:
    """The blocks of an inner server, its children's pushes and pulls, and its link to the server above it."""

    def __init__(self, assign: Assign, rounds: bool, publish: Publish) -> None:
        self.parent = Peer("server", assign.parent)
        buffers = publish(assign.blocks, 2 if rounds else 1)
        self.blocks = {
            spec.index: RelayedBlock(spec, buffer) for spec, buffer in zip(assign.blocks, buffers, strict=True)
        }
        self.readers = Readers(self.blocks)  # type: ignore[arg-type]
        self.readers.asks = True  # what is published here may be old
        self.sequence = 0  # the last number that a request or a sum was given
        self.request = Pull(0)  # the one that the parent has not answered for all blocks

    def receive(self, sender: Peer, message: Message, payload: Tensor | None) -> list[ServerOutput]:
        match message:
            case Push():
                return self._push(sender, message, payload)
            case RelayedPush():
                return self._add(sender, message, -1, message.members, payload)
            case Pull():
                return self._pull(sender, message)
            case Ack() if sender.index == self.parent.index:
                return self._answered(message)
            case Params() if sender.index == self.parent.index:
                return self._received(message, payload)
        return []

    def lost(self, peer: Peer) -> None:
        """Forget a reader; what it has pushed goes on."""
        self.readers.lost(peer)
        for block in self.blocks.values():
            block.needs.pop(peer, None)

    # ---- gradients, upwards ------------------------------------------------------------------------------------------

    def _push(self, sender: Peer, push: Push, payload: Tensor | None) -> list[ServerOutput]:
        if sender.role != "worker" or sender.index != push.worker:
            return [_answer(sender, push, PushResult.BAD, f"a push of worker {push.worker} came from {sender}")]
        outs = self._add(sender, push, push.slot, (RelayedMember(sender.incarnation, push),), payload)
        block = self.blocks.get(push.block)
        if push.want and block is not None:
            outs += self._wait([block], sender, Pull(push.sequence, push.clock, push.at_version))
        return outs

    def _add(
        self,
        child: Peer,
        message: Push | RelayedPush,
        slot: int,
        members: tuple[RelayedMember, ...],
        payload: Tensor | None,
    ) -> list[ServerOutput]:
        block = self.blocks.get(message.block)
        if block is None:
            return [_answer(child, message, PushResult.WRONG_SERVER, "not my block")]
        if block.has(child, message.sequence):
            return []
        gradient = None
        if any(not member.push.skip for member in members):
            gradient, wrong = unpack(block.spec, block.dtype, message, payload)
            if wrong:
                return [_answer(child, message, PushResult.BAD, wrong)]
            if gradient is not None and slot < 0:
                gradient = gradient.clone()  # the bytes of a message are lent; a slot is the server's until its answer
        block.add(ChildPush(child, message.sequence, slot, members, message.absent, gradient))
        return self._send_next(block)

    def _send_next(self, block: RelayedBlock) -> list[ServerOutput]:
        if block.under_way or not block.next:
            return []
        self.sequence += 1
        block.under_way, block.sequence = block.next.popleft(), self.sequence
        spec, parts = block.spec, block.under_way
        given = [set(one.absent) for one in parts if one.payload is not None]
        absent = tuple(sorted(set.intersection(*given))) if given else ()
        numel = spec.numel_without(absent) if given else 0
        members = tuple(member for one in parts for member in one.members)
        message = RelayedPush(spec.index, self.sequence, spec.dtype, numel, members, absent)
        return [ServerOutput(self.parent, message, read=bool(given))]

    def fill(self, message: Message) -> tuple[Message, Tensor | None]:
        """Return a message that is about to leave, with the parameters or the sum that it carries."""
        if isinstance(message, RelayedPush):
            return message, self._sum(message)
        assert isinstance(message, Params)
        block = self.blocks[message.block]
        if message.at_version >= 0 and message.at_version not in block.held:
            return replace(message, round_over=True, version=block.version), None
        version = message.at_version if message.at_version >= 0 else block.version
        return replace(message, version=version), block.buffer.at(version)

    def _sum(self, message: RelayedPush) -> Tensor | None:
        """Add what is under way, each gradient times its samples; of 16 bits, return the mean."""
        block = self.blocks[message.block]
        if block.sequence != message.sequence:
            return None  # its connection broke, and it was answered meanwhile
        total: Tensor | None = None
        samples = 0
        for one in block.under_way:
            if one.payload is None:
                continue
            of_child = samples_of(one.members)
            is_sum = one.child.role == "server" and block.dtype in FULL_PRECISION
            weighted = one.payload if is_sum else one.payload * of_child
            samples += of_child
            total = weighted.clone() if total is None else total.add_(weighted)
        assert total is not None, "a message without values is not read"
        if block.dtype not in FULL_PRECISION:
            total = total.div_(samples).to(block.dtype)
        if message.absent:
            total = torch.cat([total[s.start : s.stop] for s in block.spec.present(message.absent)] or [total[:0]])
        return total

    def _answered(self, ack: Ack) -> list[ServerOutput]:
        """Pass the parent's answer on; if it refuses a sum, send each of its parts by itself."""
        block = self.blocks.get(ack.block)
        if block is None or not block.under_way or ack.sequence != block.sequence:
            return []
        parts, block.under_way = block.under_way, []
        if len(parts) > 1 and ack.result is not PushResult.ACCEPTED:
            block.next.extendleft([one] for one in reversed(parts))
            return self._send_next(block)
        outs = [
            ServerOutput(one.child, Ack(ack.block, one.sequence, ack.result, TERM, ack.version, one.slot, ack.reason))
            for one in parts
        ]
        return [*outs, *self._send_next(block)]

    # ---- parameters, downwards ---------------------------------------------------------------------------------------

    def _pull(self, sender: Peer, pull: Pull) -> list[ServerOutput]:
        return self._wait([block for block in self.blocks.values() if block.spec.part == pull.part], sender, pull)

    def _wait(self, blocks: Sequence[RelayedBlock], sender: Peer, pull: Pull) -> list[ServerOutput]:
        for block in blocks:
            block.waiting.pop(sender, None)
            block.waiting[sender] = pull
            # To train, parameters that are on their way are new enough; the last ones must have all that was pushed.
            block.needs[sender] = self.request.sequence + (pull.clock < 0 or block.answered == self.request.sequence)
        return [*self.readers.admit_all(), *self._request()]

    def _request(self) -> list[ServerOutput]:
        """Request parameters for the readers that wait: those of the lowest round first, or the newest ones."""
        wanted = min(
            (pull.at_version for block in self.blocks.values() for pull in block.waiting.values()), default=None
        )
        if wanted is None:
            return []
        under_way = any(block.answered < self.request.sequence for block in self.blocks.values())
        if under_way and wanted >= self.request.at_version:
            return []
        self.sequence += 1
        self.request = Pull(self.sequence, clock=0, at_version=wanted)
        return [ServerOutput(self.parent, self.request)]

    def _received(self, params: Params, payload: Tensor | None) -> list[ServerOutput]:
        block = self.blocks.get(params.block)
        if block is None or params.sequence <= block.answered or params.sequence > self.request.sequence:
            return []
        if params.round_over:
            block.rounds_over = max(block.rounds_over, params.at_version)
        elif payload is not None or not block.spec.numel:
            block.publish(params.version, block.buffer.tensors[0][:0] if payload is None else payload)
        block.answered = params.sequence
        return [*self._admit_newest(block), *self.readers.admit(block), *self._request()]  # type: ignore[arg-type]

    def _admit_newest(self, block: RelayedBlock) -> list[ServerOutput]:
        """Answer readers of the newest parameters whose request the parent has answered."""
        ready = [
            (reader, pull)
            for reader, pull in block.waiting.items()
            if pull.at_version < 0 and block.needs[reader] <= block.answered
        ]
        for reader, _ in ready:
            del block.waiting[reader], block.needs[reader]
        replies = [
            (reader, Params(block.index, pull.sequence, TERM, block.version, asks=True)) for reader, pull in ready
        ]
        return [ServerOutput(reader, reply, read=True) for reader, reply in replies]


def samples_of(members: Sequence[RelayedMember]) -> int:
    """Return the samples of the gradients in a sum."""
    return sum(member.push.samples for member in members if not member.push.skip)


def _answer(child: Peer, message: Push | RelayedPush, result: PushResult, reason: str) -> ServerOutput:
    slot = message.slot if isinstance(message, Push) else -1
    return ServerOutput(child, Ack(message.block, message.sequence, result, TERM, 0, slot, reason))
