"""Break the protocol on purpose, one piece at a time: the harness must notice, or its silence means nothing.

Not here, because they need what is not built yet (a server that is lost and comes back from a snapshot or a copy):
marks saved later or earlier than their parameters, marks forgotten when a portion is complete, acknowledging before
the copies have it, restoring without announcing clocks. They come with snapshots and copies.

No fence alone, and applying what crosses alone, are no mutations here: each covers for the other, as intended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

import rainband.coordinator
from rainband.block import Block
from rainband.blocks import BlockSpec
from rainband.client import Client
from rainband.coordinator import Coordinator
from rainband.gradient import ModuleGradient
from rainband.messages import Params, Peer, Push, Return
from rainband.portions import Marks, Name, num_batches
from rainband.rules import MeanOfRound
from rainband.server import Server
from tests import harness
from tests.harness import LinePort, run_seed

Mutation = Callable[[pytest.MonkeyPatch], None]

MAX_STEPS = 6_000  # a sound run takes some hundred, so more is a run that hangs


def no_dedup(patch: pytest.MonkeyPatch) -> None:
    """A push that was had is applied again."""
    patch.setattr(Server, "_has_had", lambda *_: False)
    patch.setattr(Marks, "has_some", lambda *_: False)


def high_water_mark(patch: pytest.MonkeyPatch) -> None:
    """A block remembers how far it got in a portion, not which batches it had."""

    def has_all(marks: Marks, name: Name) -> bool:
        return all(marks.of(r.portion).bit_length() >= r.last for r in name)

    def add(marks: Marks, name: Name) -> list[int]:
        return true_add(marks, tuple(r.__class__(r.portion, 0, r.last, r.lease) for r in name))

    true_add = Marks.add
    patch.setattr(Marks, "has_all", has_all)
    patch.setattr(Marks, "has_some", lambda *_: False)
    patch.setattr(Marks, "add", add)


def no_groups(patch: pytest.MonkeyPatch) -> None:
    """What is missing somewhere is leased again in one piece, whichever blocks have it."""

    def groups(full: int, masks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        missing = [k for k in range(full.bit_length()) if not all(mask >> k & 1 for mask in masks)]
        return (tuple(range(missing[0], full.bit_length())),) if missing else ()

    patch.setattr(rainband.coordinator, "groups", groups)


def forget_drops_buffer(patch: pytest.MonkeyPatch) -> None:
    """What a dead worker gave to an unfinished round is thrown away."""

    def forget(rule: MeanOfRound, block: Block, worker: int) -> None:
        rule.early = {column: kept for column, kept in rule.early.items() if kept[0].worker != worker}

    patch.setattr(MeanOfRound, "forget", forget)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A lease that was taken back is still good."""
    true_revoke = Server._revoke

    def revoke(server: Server, message: Any) -> Any:
        outs = true_revoke(server, message)
        server.floor.clear()
        return outs

    patch.setattr(Server, "_revoke", revoke)


def what_crosses_is_applied(patch: pytest.MonkeyPatch) -> None:
    no_fence(patch)
    patch.setattr(Marks, "has_some", lambda *_: False)


def what_crosses_counts_as_had(patch: pytest.MonkeyPatch) -> None:
    no_fence(patch)

    def has_all(marks: Marks, name: Name) -> bool:
        meets = marks.has_some(name)
        if meets:
            marks.add(name)
        return meets

    patch.setattr(Marks, "has_all", has_all)


def sum_for_mean(patch: pytest.MonkeyPatch) -> None:
    """A round applies the sum of its cells."""

    def finish(rule: MeanOfRound, block: Block) -> None:
        rule.samples = 1
        true_finish(rule, block)

    true_finish = MeanOfRound._finish
    patch.setattr(MeanOfRound, "_finish", finish)


def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    """Every cell counts alike, short or not."""
    true_add = MeanOfRound._add

    def add(rule: MeanOfRound, push: Push, gradient: Tensor | None) -> None:
        true_add(rule, harness.replaced(push, samples=1), gradient)

    patch.setattr(MeanOfRound, "_add", add)


def block_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A block is filled with its neighbour's gradient."""

    def filler(client: Client, block: BlockSpec, gradient: ModuleGradient) -> Callable[[Tensor], None]:
        other = client.blocks[(block.index + 1) % len(client.blocks)]

        def fill(out: Tensor) -> None:
            wrong = out.new_empty(other.numel, dtype=client.views[other.index].dtype)
            client.flat.write(other, gradient.tensors, wrong)
            out.copy_(wrong)

        return fill

    patch.setattr(Client, "_filler", filler)


def each_server_forgets_the_dead(patch: pytest.MonkeyPatch) -> None:
    """A round is the mean over those who are there: each block by itself stops waiting for a dead worker."""

    def forget(rule: MeanOfRound, block: Block, worker: int) -> None:
        for column in sorted(rule.early):
            rule._add(*rule.early.pop(column))
        if rule.pushes:
            rule._finish(block)

    patch.setattr(MeanOfRound, "forget", forget)


def inexact_round_reads(patch: pytest.MonkeyPatch) -> None:
    """Who asks for version r gets whatever is newest."""

    def read(server: Server, params: Params) -> tuple[Params, Tensor]:
        block = server.blocks[params.block]
        return harness.replaced(params, version=block.version), block.place.of(block.version)

    def read_in_place(port: LinePort, spec: BlockSpec, point: int, out: Tensor) -> int:
        block = port.world.servers[port.server].blocks[spec.index]
        out.copy_(block.place.of(block.version))
        return block.version

    patch.setattr(Server, "read", read)
    patch.setattr(LinePort, "read", read_in_place)


def version_r_dropped_early(patch: pytest.MonkeyPatch) -> None:
    """A block keeps version r only until it has r + 1."""

    def read(server: Server, params: Params) -> tuple[Params, Tensor | None]:
        if params.point >= 0 and server.blocks[params.block].version > params.point:
            return harness.replaced(params, late=True), None
        return true_read(server, params)

    def read_in_place(port: LinePort, spec: BlockSpec, point: int, out: Tensor) -> int | None:
        if point >= 0 and port.world.servers[port.server].blocks[spec.index].version > point:
            return None
        return true_read_in_place(port, spec, point, out)

    true_read, true_read_in_place = Server.read, LinePort.read
    patch.setattr(Server, "read", read)
    patch.setattr(LinePort, "read", read_in_place)


def a_refused_push_holds_the_reader(patch: pytest.MonkeyPatch) -> None:
    """A reader waits for its own pushes by their clock, which a refused one never ticks."""
    from rainband.rules import ApplyOnArrival

    patch.setattr(
        ApplyOnArrival, "admits", lambda self, block, pull, reader: block.clocks.get(reader, 0) >= pull.clock
    )


def the_lost_are_not_asked_about(patch: pytest.MonkeyPatch) -> None:
    """What a dead worker had leased is not leased again."""
    patch.setattr(Coordinator, "_gather", lambda *_: [])


CAUGHT_BY_SCHEDULES: list[tuple[str, Mutation]] = [
    ("downpour", no_dedup),
    ("ragged", high_water_mark),
    ("ragged", no_groups),
    ("ragged", what_crosses_is_applied),
    ("ragged", what_crosses_counts_as_had),
    ("downpour", block_off_by_one),
    ("downpour", a_refused_push_holds_the_reader),
    ("downpour", the_lost_are_not_asked_about),
    ("sync", no_dedup),
    ("sync", forget_drops_buffer),
    ("sync", sum_for_mean),
    ("sync", mean_of_means),
    ("sync", block_off_by_one),
    ("sync", each_server_forgets_the_dead),
    ("sync", inexact_round_reads),
    ("sync", version_r_dropped_early),
]
