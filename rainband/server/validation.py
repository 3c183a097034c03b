"""Validation of pushes: in this order, and before anything changes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from msgspec.structs import replace

from rainband.codecs.codec import key_of
from rainband.protocol.data_plan import PushId, validate_push_id
from rainband.protocol.messages import Peer, PushResult
from rainband.server.block_parameters import FULL_PRECISION

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.codecs.codec import Codec
    from rainband.protocol.layout import BlockSpec
    from rainband.protocol.messages import Push, RelayedPush
    from rainband.server.block import Block


class Verdict(NamedTuple):
    """The answer to a push, and its gradient if it is accepted."""

    result: PushResult
    reason: str = ""
    gradient: Tensor | None = None


class PushValidator:
    """Checks each push against leases, the data plan and what its block has accepted."""

    def __init__(self, codec: Codec | None = None) -> None:
        """`codec`: with which pushes may be encoded."""
        self.codec = codec
        self.min_lease: dict[int, int] = {}  # portion -> the lowest lease number that is still valid
        self.refused: dict[int, int] = {}  # worker -> its last incarnation whose pushes are refused
        # The last one that was checked: the messages of a push, one for each block, all carry the same.
        self.valid_push_id: tuple[PushId, int] = ((), -1)

    def revoke(self, portion: int, lease: int) -> None:
        """Reject leases on this portion with smaller numbers from now on."""
        self.min_lease[portion] = max(self.min_lease.get(portion, 0), lease)

    def refuse(self, lost: Sequence[tuple[int, int]]) -> None:
        """Reject pushes of these workers, and of their earlier incarnations, from now on."""
        self.refused = {**self.refused, **dict(lost)}

    def forget_below(self, first_open: int) -> None:
        """Forget the leases on completed portions."""
        self.min_lease = {portion: lease for portion, lease in self.min_lease.items() if portion >= first_open}

    def check(self, sender: Peer, block: Block, push: Push, payload: Tensor | None, term: int) -> Verdict:
        if push.term > term:
            return Verdict(PushResult.WRONG_SERVER, f"term {push.term} has not begun here")
        # New settings are taken even if the push is rejected: the sender does not repeat them.
        if push.groups and sender.index == push.worker:
            unfit = block.parameters.set_groups(push.worker, push.groups)
            if unfit:
                return Verdict(PushResult.BAD, unfit)
        if self.min_lease and any(self.min_lease.get(r.portion, 0) > r.lease for r in push.push_id):
            return Verdict(PushResult.REVOKED)
        if self.refused and self.refused.get(sender.index, -1) >= sender.incarnation:
            return Verdict(PushResult.REVOKED)
        if sender.role != "worker" or sender.index != push.worker:
            return Verdict(PushResult.BAD, f"a push of worker {push.worker} came from {sender}")
        if not push.residual and (push.push_id != self.valid_push_id[0] or push.at_version != self.valid_push_id[1]):
            wrong = validate_push_id(block.plan, push.push_id, push.at_version)
            if wrong:
                return Verdict(PushResult.BAD, wrong)
            self.valid_push_id = push.push_id, push.at_version
        gradient, wrong = self._gradient(block, push, payload)
        if wrong:
            return Verdict(PushResult.BAD, wrong)
        if push.at_version >= 0 and push.at_version != block.version:
            if push.at_version < block.version:
                return Verdict(PushResult.LATE)
            return Verdict(PushResult.EARLY, f"at version {block.version}")
        if self._has_accepted(sender, block, push):
            return Verdict(PushResult.DUPLICATE)
        if block.accounting.accepted_set.has_some(push.push_id):
            return Verdict(PushResult.OVERLAPS)
        return Verdict(PushResult.ACCEPTED, "", gradient)

    def _gradient(self, block: Block, push: Push, payload: Tensor | None) -> tuple[Tensor | None, str]:
        """Return the gradient in the block's working precision, or what is wrong with it."""
        if push.skip:
            return None, ""
        if push.samples < 1:
            return None, f"a gradient of {push.samples} samples has no weight"
        if push.encoded:
            wrong = _unlike(block.spec, push)
            return (None, wrong) if wrong else self._decoded(block, push, payload)
        return unpack(block.spec, block.parameters.dtype, push, payload)

    def check_sum(self, sender: Peer, block: Block, message: RelayedPush, payload: Tensor | None, term: int) -> Verdict:
        """Check a sum of gradients: each as if it came by itself. The first that is not accepted decides for all."""
        if sender.role != "server":
            return Verdict(PushResult.BAD, f"a sum of gradients came from {sender}")
        batches: set[tuple[int, int]] = set()
        for member in message.members:
            push, worker = member.push, Peer("worker", member.push.worker, member.incarnation)
            verdict = self.check(worker, block, replace(push, skip=push.skip or "checked below"), None, term)
            if verdict.result != PushResult.ACCEPTED:
                return verdict
            if not push.skip and push.samples < 1:
                return Verdict(PushResult.BAD, f"a gradient of {push.samples} samples has no weight")
            named = {(r.portion, k) for r in push.push_id for k in range(r.first, r.last)}
            if batches & named:
                return Verdict(PushResult.OVERLAPS)
            batches |= named
        if all(member.push.skip for member in message.members):
            return Verdict(PushResult.ACCEPTED)
        total, wrong = unpack(block.spec, block.parameters.dtype, message, payload)
        return Verdict(PushResult.BAD, wrong) if wrong else Verdict(PushResult.ACCEPTED, "", total)

    def _decoded(self, block: Block, push: Push, payload: Tensor | None) -> tuple[Tensor | None, str]:
        """Return what a codec has encoded."""
        if self.codec is None:
            return None, "it is encoded, and this run has no codec"
        if payload is None or payload.nbytes != push.encoded:
            return None, f"the payload is not the {push.encoded} bytes that it says"
        try:
            gradient = self.codec.decode(
                payload.view(torch.uint8), push.numel, key_of(push.worker, push.sequence, push.block)
            )
        except ValueError as error:
            return None, f"{type(self.codec).__name__} cannot decode it: {error}"
        gradient = gradient.to(block.parameters.working_dtype)
        return _spread(gradient, block.spec, push.absent) if push.absent else gradient, ""

    def _has_accepted(self, sender: Peer, block: Block, push: Push) -> bool:
        return block.accounting.has_accepted(sender, push)


def _unlike(spec: BlockSpec, message: Push | RelayedPush) -> str:
    """Return in what the values of a push differ from its block; "" if they are alike."""
    numel = spec.numel_without(message.absent)
    if message.numel == numel and message.dtype == spec.dtype:
        return ""
    return f"block {spec.index} is {numel} x {spec.dtype}, the push is {message.numel} x {message.dtype}"


def unpack(
    spec: BlockSpec, dtype: torch.dtype, message: Push | RelayedPush, payload: Tensor | None
) -> tuple[Tensor | None, str]:
    """Return the values of a push as long as its block, in working precision, or what is wrong with them."""
    if wrong := _unlike(spec, message):
        return None, wrong
    numel = message.numel
    if payload is None and not numel:
        payload = torch.empty(0, dtype=dtype)  # a transport does not deliver an empty body
    elif payload is None or payload.nbytes != numel * dtype.itemsize:
        return None, f"the payload is not the {numel * dtype.itemsize} bytes of block {spec.index}"
    gradient = payload if payload.dtype == dtype else payload.view(dtype)
    if dtype not in FULL_PRECISION:
        gradient = gradient.float()
    if message.absent:
        gradient = _spread(gradient, spec, message.absent)
    return gradient, ""  # finite: its sender has checked that, and frames have checksums


def _spread(values: Tensor, spec: BlockSpec, absent: Collection[int]) -> Tensor:
    """Return a gradient as long as its block from the values of the present parameters; zero elsewhere."""
    if not len(values):
        return values.new_zeros(1).expand(spec.numel)  # without memory: a gradient is never written to
    gradient, at = values.new_zeros(spec.numel), 0
    for segment in spec.present(absent):
        gradient[segment.start : segment.stop] = values[at : at + segment.numel]
        at += segment.numel
    return gradient
