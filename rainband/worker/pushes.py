"""The pushes of one worker: one message for each block, and a handle that waits for all answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rainband.codecs.pushes import CompressedPushes
from rainband.errors import Refused
from rainband.model.gradient import Gradient
from rainband.protocol.accounting import SkipReasons
from rainband.protocol.data_plan import PushId
from rainband.protocol.layout import ITEM_BYTES, BlockSpec
from rainband.protocol.messages import Ack, LeaseEnd, Push, PushResult
from rainband.protocol.steps import Handle
from rainband.worker.leases import HeldLeases
from rainband.worker.server_blocks import ServerBlocks


@dataclass(eq=False, slots=True)
class PushHandle(Handle):
    """A push that is ready when every block has answered."""

    name: PushId
    left: int  # blocks that have not answered
    sequence: int = 0
    clock: int = 0  # of the sender, with this push
    began: int = 0  # its clock when it began to compute the gradient
    at_version: int = -1  # the round or evaluation
    num_late: int = 0  # blocks that had finished the round without it
    late_at: int = -1  # the lowest version of such a block

    def ready(self) -> bool:
        return self.left == 0


class Pushes:
    """Sends gradients to the servers and settles their batches when every block has answered."""

    __slots__ = (
        "base",
        "clock",
        "compressed",
        "groups",
        "in_flight",
        "leases",
        "me",
        "reasons",
        "sequence",
        "servers",
        "terms",
        "unanswered",
        "versions",
    )

    def __init__(self, me: int, servers: ServerBlocks, leases: HeldLeases) -> None:
        self.me = me  # this worker's number
        self.servers = servers
        self.leases = leases
        self.sequence = 0  # the last number that a push or a pull was given
        self.clock = 0  # work items pushed
        self.base = 0  # the clock at which this worker joined, or returned after it was given up
        self.terms = [1] * len(servers.specs)  # of each block's server, as last read
        self.versions = [0] * len(servers.specs)  # of each block, as last read
        self.in_flight: dict[int, PushHandle] = {}
        self.unanswered: list[list[int]] = [[] for _ in servers.specs]  # sequences of pushes in flight, per block
        self.reasons = SkipReasons()
        self.groups: tuple[dict[str, Any], ...] = ()  # optimizer settings that the next push announces
        self.compressed: CompressedPushes | None = None  # None: gradients are sent as they are

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def send(self, gradient: Gradient, wanted: Callable[[int], bool] | None = None) -> PushHandle:
        """Send a gradient to every block; it may be overwritten when this returns.

        `wanted`: whether the server of a block is to reply with its new parameters.
        """
        if gradient.skip:  # checked before the first message, so that all blocks skip it or none
            return self.skip(gradient, gradient.skip, wanted)
        servers, flat, observer = self.servers, self.servers.flat, self.servers.observer
        if observer is not None:
            observer.began("push")
        handle = self._begin(gradient)
        read = self.versions if gradient.read is None else gradient.read
        loss = gradient.loss if self.leases.plan.coordinated else 0.0
        # Some blocks may have the batches of an earlier lease already, and ignore all that this push brings.
        compressed = self.compressed if all(map(self.leases.is_new_to_all, gradient.batches)) else None
        for block in servers.blocks:
            index = block.index
            absent = flat.absent(block, gradient.tensors)
            numel = block.numel_without(absent)
            values, encoded = gradient.block_values(flat, block), 0
            if compressed is not None and gradient.tensors:  # none are computed for time alone
                values = compressed.encode(values, block, absent, numel, handle.sequence)
                encoded = values.encoded
            message = Push(
                index,
                self.me,
                handle.sequence,  # not self.sequence: answers arrive while a port waits, and may start a pull
                handle.name,
                gradient.samples,
                handle.clock,
                self.terms[index],
                read[index],
                block.dtype,
                numel,
                handle.at_version,
                absent,
                want=wanted is not None and wanted(index),
                groups=self.groups,
                began=handle.began,
                loss=loss,
                encoded=encoded,
            )
            self.unanswered[index].append(handle.sequence)
            servers.push(message, values)
            self._count_bytes(block, numel, encoded)
            if observer is not None:
                observer.sent(message)
        self.groups = ()
        if observer is not None:
            observer.ended("push")
        return handle

    def _count_bytes(self, block: BlockSpec, numel: int, encoded: int) -> None:
        stats, num_bytes = self.servers.stats, numel * ITEM_BYTES[block.dtype]
        stats.pushed_bytes += encoded or num_bytes
        if encoded:
            stats.saved_bytes += num_bytes - encoded
        if self.compressed is not None:
            stats.unsent_norm = self.compressed.unsent_norm

    def send_unsent(self) -> None:
        """Send, as it is, what a codec has kept of all gradients so far: no other push follows."""
        unsent = [] if self.compressed is None else self.compressed.take_unsent()
        if not unsent:
            return
        sequence = self.next_sequence()
        handle = self.in_flight[sequence] = PushHandle((), len(unsent), sequence, self.clock, self.clock)
        for block, absent, values in unsent:
            index, numel = block.index, block.numel_without(absent)
            message = Push(
                index,
                self.me,
                sequence,
                handle.name,
                1,
                handle.clock,
                self.terms[index],
                self.versions[index],
                block.dtype,
                numel,
                absent=absent,
                began=handle.began,
                residual=True,
            )
            self.unanswered[index].append(sequence)
            self.servers.push(message, values)
            self._count_bytes(block, numel, 0)
            if self.servers.observer is not None:
                self.servers.observer.sent(message)

    def skip(
        self, gradient: Gradient, reason: str, wanted: Callable[[int], bool] | None = None, ends_item: bool = True
    ) -> PushHandle:
        """Mark the gradient's batches as skipped on every block.

        `ends_item`: False for batches that are left out of a work item. The clock then stays, because the next gradient
        is computed with the parameters that were read at this clock.
        """
        handle = self._begin(gradient, ends_item)
        reason = self.reasons.bounded(reason)
        for block in self.servers.blocks:
            self._skip_block(block, handle, reason, wanted is not None and wanted(block.index))
        return handle

    def _begin(self, gradient: Gradient, ends_item: bool = True) -> PushHandle:
        sequence, plan = self.next_sequence(), self.leases.plan
        now = self.clock
        self.clock += ends_item
        name = gradient.push_id()
        at_version = plan.round_of(name[0].portion, name[0].first) if plan.items_per_round else -1
        if plan.coordinated:
            at_version = name[0].lease  # the evaluation for which the work item was assigned
        began = now if gradient.began is None else gradient.began
        handle = PushHandle(name, len(self.servers.blocks), sequence, self.clock, began, at_version)
        if self.servers.blocks:
            self.in_flight[sequence] = handle
        else:  # a submodel without parameters: no server will answer
            self._settle(handle)
        return handle

    def _skip_block(self, block: BlockSpec, handle: PushHandle, reason: str, want: bool = False) -> None:
        self.unanswered[block.index].append(handle.sequence)
        self.servers.push(
            Push(
                block.index,
                self.me,
                handle.sequence,
                handle.name,
                0,
                handle.clock,
                self.terms[block.index],
                self.versions[block.index],
                block.dtype,
                block.numel,
                handle.at_version,
                skip=reason,
                want=want,
                began=handle.began,
            ),
            None,
        )

    def answered(self, ack: Ack) -> bool:
        """Take one block's answer; return False if nothing more follows from it."""
        unanswered = self.unanswered[ack.block]
        handle = self.in_flight.get(ack.sequence)
        if handle is None or ack.sequence not in unanswered:
            return False  # answered before
        unanswered.remove(ack.sequence)
        if self.servers.unanswered is not None:
            self.servers.unanswered.pop((ack.block, ack.sequence), None)
        if self.compressed is not None:
            is_taken = ack.result in (PushResult.ACCEPTED, PushResult.DUPLICATE)
            self.compressed.answered(ack.sequence, ack.block, is_taken)
        match ack.result:
            case PushResult.ACCEPTED | PushResult.DUPLICATE:
                pass
            case PushResult.REVOKED:
                self.leases.lose(handle.name, LeaseEnd.REVOKED)
            case PushResult.OVERLAPS:
                self.leases.lose(handle.name, LeaseEnd.OVERLAPS)
            case PushResult.BAD:  # the other blocks may accept the batches, so this one must mark them too
                self._skip_block(self.servers.specs[ack.block], handle, self.reasons.bounded(f"refused: {ack.reason}"))
                return False
            case PushResult.LATE:
                handle.late_at = ack.version if not handle.num_late else min(handle.late_at, ack.version)
                handle.num_late += 1
            case PushResult.WRONG_SERVER | PushResult.EARLY:
                raise Refused(f"block {ack.block} answered {ack.result.name} {ack.reason}")
        handle.left -= 1
        if handle.left == 0:
            del self.in_flight[ack.sequence]
            self._settle(handle)
            if handle.num_late == len(self.servers.blocks):
                self.leases.skip_rounds(handle.late_at - 1)
        return True

    def _settle(self, handle: PushHandle) -> None:
        self.servers.stats.acked += 1
        self.leases.settle(handle.name)

    def has_answered_up_to(self, sequence: int, block: int) -> bool:
        """Return True if this block has answered all pushes up to that number."""
        unanswered = self.unanswered[block]
        return not unanswered or unanswered[0] > sequence

    def may_end_lease(self, ack: Ack) -> bool:
        """Return True if taking this answer could complete a lease, so that a message must be sent."""
        handle = self.in_flight.get(ack.sequence)
        if handle is None or handle.left > 1 or self.leases.plan.coordinated:
            return handle is not None
        return self.leases.may_end_with(handle.name)
