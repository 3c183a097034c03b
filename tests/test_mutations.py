"""Break the protocol on purpose, one piece at a time: the harness must notice, or its silence means nothing.

Not here, because they need what is not built yet (a server that is lost and comes back from a snapshot or a copy):
marks saved later or earlier than their parameters, marks forgotten when a portion is complete, acknowledging before
the copies have it, restoring without announcing clocks. They come with snapshots and copies.

No fence alone, and applying what crosses alone, are no mutations here: each covers for the other, as intended.
Counting as done what workers acknowledged is caught by an exact test only: as long as no server is lost, what is
acknowledged is also marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

import rainband.coordinator.leases
import rainband.server.server
from rainband.coordinator.leases import Leases
from rainband.coordinator.state import RunState
from rainband.model.flat_parameters import BlockTensors
from rainband.model.gradient import Gradient
from rainband.protocol.accepted_set import AcceptedSet
from rainband.protocol.data_plan import PushId
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import Params, Push, PushResult, Return
from rainband.rules import ApplyEvery, Clocks, FirstArrivalsOfRound, MeanOfRound, StalenessBound
from rainband.server.block import Block
from rainband.server.server import Server
from rainband.server.validation import PushValidator
from rainband.worker.client import Client
from rainband.worker.server_blocks import ServerBlocks
from tests import test_client, test_clocks, test_coordinator, test_rules, test_server
from tests.harness import LinePort, replaced
from tests.ledger import Wrong
from tests.random_runs import run_seed

Mutation = Callable[[pytest.MonkeyPatch], None]

MAX_STEPS = 6_000  # a sound run takes some hundred, so more is a run that hangs
MAX_SEEDS = 800


def no_dedup(patch: pytest.MonkeyPatch) -> None:
    """A push that was had is applied again."""
    patch.setattr(PushValidator, "_has_accepted", lambda *_: False)
    patch.setattr(AcceptedSet, "has_some", lambda *_: False)


def high_water_mark(patch: pytest.MonkeyPatch) -> None:
    """A block remembers how far it got in a portion, not which batches it had."""

    def has_all(accepted_set: AcceptedSet, name: PushId) -> bool:
        return all(accepted_set.of(r.portion).bit_length() >= r.last for r in name)

    def add(accepted_set: AcceptedSet, name: PushId) -> list[int]:
        return true_add(accepted_set, tuple(r.__class__(r.portion, 0, r.last, r.lease) for r in name))

    true_add = AcceptedSet.add
    patch.setattr(AcceptedSet, "has_all", has_all)
    patch.setattr(AcceptedSet, "has_some", lambda *_: False)
    patch.setattr(AcceptedSet, "add", add)


def no_groups(patch: pytest.MonkeyPatch) -> None:
    """Batches that are missing somewhere are reassigned together, whichever blocks have accepted them."""

    def groups(full: int, masks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        missing = [k for k in range(full.bit_length()) if not all(mask >> k & 1 for mask in masks)]
        return (tuple(range(missing[0], full.bit_length())),) if missing else ()

    patch.setattr(rainband.coordinator.leases, "groups", groups)


def forget_drops_buffer(patch: pytest.MonkeyPatch) -> None:
    """The gradients of a dead worker in an unfinished round are discarded."""

    def forget(rule: MeanOfRound, block: Block, worker: int) -> None:
        rule.early = {position: kept for position, kept in rule.early.items() if kept[0].worker != worker}

    patch.setattr(MeanOfRound, "forget", forget)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A lease that was taken back is still good."""
    true_revoke = Server._revoke

    def revoke(server: Server, message: Any) -> Any:
        outs = true_revoke(server, message)
        server.validator.min_lease.clear()
        return outs

    patch.setattr(Server, "_revoke", revoke)


def what_crosses_is_applied(patch: pytest.MonkeyPatch) -> None:
    no_fence(patch)
    patch.setattr(AcceptedSet, "has_some", lambda *_: False)


def what_crosses_counts_as_had(patch: pytest.MonkeyPatch) -> None:
    no_fence(patch)

    def has_all(accepted_set: AcceptedSet, name: PushId) -> bool:
        meets = accepted_set.has_some(name)
        if meets:
            accepted_set.add(name)
        return meets

    patch.setattr(AcceptedSet, "has_all", has_all)


def sum_for_mean(patch: pytest.MonkeyPatch) -> None:
    """A round applies the sum of its work items."""

    def finish(rule: MeanOfRound, block: Block) -> None:
        rule.samples = 1
        true_finish(rule, block)

    true_finish = MeanOfRound._finish
    patch.setattr(MeanOfRound, "_finish", finish)


def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    """Every work item counts alike, short or not."""
    true_add = MeanOfRound._add

    def add(rule: MeanOfRound, push: Push, gradient: Tensor | None) -> None:
        true_add(rule, replaced(push, samples=1), gradient)

    patch.setattr(MeanOfRound, "_add", add)


def block_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A block is pushed with its neighbor's gradient."""
    blocks_of: dict[int, list[BlockSpec]] = {}  # by the id of the parameters
    true_init = ServerBlocks.__init__

    def init(servers: ServerBlocks, flat: Any, *rest: Any) -> None:
        true_init(servers, flat, *rest)
        blocks_of[id(flat)] = servers.blocks

    def values_of_neighbor(gradient: Gradient, flat: Any, block: BlockSpec) -> BlockTensors:
        blocks = blocks_of[id(flat)]
        return BlockTensors(flat, blocks[(blocks.index(block) + 1) % len(blocks)], gradient.tensors)

    patch.setattr(ServerBlocks, "__init__", init)
    patch.setattr(Gradient, "block_values", values_of_neighbor)


def each_server_forgets_the_dead(patch: pytest.MonkeyPatch) -> None:
    """A round is the mean over those who are there: each block by itself stops waiting for a dead worker."""

    def forget(rule: MeanOfRound, block: Block, worker: int) -> None:
        for position in sorted(rule.early):
            rule._add(*rule.early.pop(position))
        if rule.pushes:
            rule._finish(block)

    patch.setattr(MeanOfRound, "forget", forget)


def inexact_round_reads(patch: pytest.MonkeyPatch) -> None:
    """A reader that asks for version r gets the newest version."""

    def read(server: Server, params: Params) -> tuple[Params, Tensor]:
        block = server.blocks[params.block]
        return replaced(params, version=block.version), block.buffer.at(block.version)

    def read_in_place(port: LinePort, spec: BlockSpec, at_version: int, out: Tensor) -> int:
        block = port.cluster.servers[port.server].blocks[spec.index]
        out.copy_(block.buffer.at(block.version))
        return block.version

    patch.setattr(Server, "read", read)
    patch.setattr(LinePort, "read", read_in_place)


def version_r_dropped_early(patch: pytest.MonkeyPatch) -> None:
    """A block keeps version r only until it has r + 1."""

    def read(server: Server, params: Params) -> tuple[Params, Tensor | None]:
        if params.at_version >= 0 and server.blocks[params.block].version > params.at_version:
            return replaced(params, round_over=True), None
        return true_read(server, params)

    def read_in_place(port: LinePort, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        if at_version >= 0 and port.cluster.servers[port.server].blocks[spec.index].version > at_version:
            return None
        return true_read_in_place(port, spec, at_version, out)

    true_read, true_read_in_place = Server.read, LinePort.read
    patch.setattr(Server, "read", read)
    patch.setattr(LinePort, "read", read_in_place)


def a_refused_push_holds_the_reader(patch: pytest.MonkeyPatch) -> None:
    """A reader waits for its own pushes by their clock, which a refused one never ticks."""
    patch.setattr(rainband.server.server, "DONE_WITH", (PushResult.ACCEPTED, PushResult.DUPLICATE))


def the_idle_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A worker that waits for work is waited for by those who have it."""
    patch.setattr(Client, "rest", lambda client: None)
    patch.setattr(Leases, "_forget_idle_workers", lambda leases: [])


def the_dead_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StalenessBound, "forget", lambda rule, block, worker: None)


def a_push_is_numbered_anew_in_its_middle(patch: pytest.MonkeyPatch) -> None:
    """While a port waits for room, what comes may make the client ask, under the next number."""
    true_push = LinePort.push

    def push(port: LinePort, message: Any, values: Any) -> None:
        client = port.worker.client
        if isinstance(message, Push) and client is not None and client.pushes.sequence != message.sequence:
            message = replaced(message, sequence=client.pushes.sequence)
        true_push(port, message, values)

    patch.setattr(LinePort, "push", push)


def what_is_gathered_is_not_flushed(patch: pytest.MonkeyPatch) -> None:
    true_flush = ApplyEvery.flush

    def flush(rule: ApplyEvery, block: Block) -> None:
        if len(rule.pushes) == rule.gradients_per_update:
            true_flush(rule, block)

    patch.setattr(ApplyEvery, "flush", flush)


def what_the_forgotten_gave_is_dropped(patch: pytest.MonkeyPatch) -> None:
    def forget(rule: ApplyEvery, block: Block, worker: int) -> None:
        if any(push.worker == worker for push in rule.pushes):
            rule._begin()

    patch.setattr(ApplyEvery, "forget", forget)


def each_block_takes_its_own_first_work_items(patch: pytest.MonkeyPatch) -> None:
    """With backup workers each block applies the first work items that come to it."""

    def absorb(rule: FirstArrivalsOfRound, block: Block, push: Push, gradient: Tensor | None) -> None:
        index, block.index = block.index, 0
        true_absorb(rule, block, push, gradient)
        block.index = index

    true_absorb = FirstArrivalsOfRound.absorb
    patch.setattr(FirstArrivalsOfRound, "absorb", absorb)


def everyone_is_admitted(patch: pytest.MonkeyPatch) -> None:
    """The bound is not enforced, only measured."""
    patch.setattr(StalenessBound, "admits", lambda *_: True)


def one_too_far_is_admitted(patch: pytest.MonkeyPatch) -> None:
    def admits(rule: StalenessBound, block: Block, pull: Any, reader: int) -> bool:
        return pull.clock - rule.clocks.slowest <= rule.bound + 1

    patch.setattr(StalenessBound, "admits", admits)


def who_comes_back_starts_where_it_was(patch: pytest.MonkeyPatch) -> None:
    """Its clock holds up those who went on without it."""
    true_enter = Clocks.enter

    def enter(clocks: Clocks, worker: int, base: int, version: int) -> None:
        before = clocks.of.get(worker, 0)
        true_enter(clocks, worker, base, version)
        if clocks.of[worker] > max(before, base):
            clocks.there[clocks.of[worker]].pop(worker)
            clocks.of[worker] = max(before, base)
            clocks.slowest = min(clocks.slowest, clocks.of[worker])
            clocks.there.setdefault(clocks.of[worker], {})[worker] = None

    patch.setattr(Clocks, "enter", enter)


def the_lost_are_not_asked_about(patch: pytest.MonkeyPatch) -> None:
    """The batches that a dead worker had leased are not reassigned."""
    patch.setattr(Leases, "revoke", lambda *_: [])


def done_by_acknowledgements(patch: pytest.MonkeyPatch) -> None:
    """A portion is done when a worker says so."""
    acknowledged: set[int] = set()

    def returned(leases: Leases, worker: Any, message: Return, now: float) -> Any:
        if message.reason == "done":
            acknowledged.add(message.portion)
        return true_returned(leases, worker, message, now) + leases.shutdown.when_done()

    def batches_done(state: RunState) -> int:
        assert state.plan is not None
        return sum(map(state.plan.batches_in, acknowledged))

    true_returned = Leases.returned
    patch.setattr(Leases, "returned", returned)
    patch.setattr(RunState, "batches_done", batches_done)


CAUGHT_BY_SCHEDULES: list[tuple[str, Mutation]] = [
    ("downpour", no_dedup),
    ("downpour", block_off_by_one),
    ("downpour", the_lost_are_not_asked_about),
    ("ragged", high_water_mark),
    ("ragged", no_groups),
    ("ragged", what_crosses_is_applied),
    ("ragged", what_crosses_counts_as_had),
    ("per_worker", no_dedup),
    ("per_worker", forget_drops_buffer),
    ("per_worker", sum_for_mean),
    ("per_worker", mean_of_means),
    ("per_worker", block_off_by_one),
    ("per_worker", each_server_forgets_the_dead),
    ("per_worker", inexact_round_reads),
    ("per_worker", version_r_dropped_early),
    ("stale_sync", a_refused_push_holds_the_reader),
    ("stale_sync", the_idle_are_waited_for),
    ("stale_sync", the_dead_are_waited_for),
    ("stale_sync", everyone_is_admitted),
    ("stale_sync", one_too_far_is_admitted),
    ("bounded_delay", a_refused_push_holds_the_reader),
    ("bounded_delay", a_push_is_numbered_anew_in_its_middle),
    ("backup", each_block_takes_its_own_first_work_items),
    ("soft_sync", what_is_gathered_is_not_flushed),
    ("soft_sync", what_the_forgotten_gave_is_dropped),
]

FIRST_SEEDS = {a_push_is_numbered_anew_in_its_middle: 640}  # to begin with, where hundreds of schedules notice nothing

CAUGHT_BY_AN_EXACT_TEST: list[tuple[Mutation, Callable[[], None]]] = [
    (done_by_acknowledgements, test_coordinator.test_a_portion_is_done_when_the_marks_say_so_not_when_a_worker_does),
    (no_dedup, test_server.test_a_push_is_applied_once_and_then_had),
    (high_water_mark, test_server.test_batches_may_come_in_any_order),
    (
        no_groups,
        lambda: test_coordinator.test_a_lease_is_revoked_by_a_fence_and_missing_batches_are_reassigned("killed"),
    ),
    (no_fence, test_server.test_revoke_answers_with_the_sets_of_every_block_and_fences_smaller_leases),
    (what_crosses_is_applied, test_server.test_what_meets_the_marks_halfway_is_crossed),
    (what_crosses_counts_as_had, test_server.test_what_meets_the_marks_halfway_is_crossed),
    (forget_drops_buffer, test_rules.test_what_a_forgotten_worker_gave_stays),
    (each_server_forgets_the_dead, test_rules.test_what_a_forgotten_worker_gave_stays),
    (sum_for_mean, test_rules.test_1_2_and_6_give_3),
    (mean_of_means, test_rules.test_a_work_item_of_three_samples_weighs_three_times_one_of_one),
    (block_off_by_one, test_client.test_a_push_goes_to_every_block_under_one_number_with_its_own_slice),
    (inexact_round_reads, test_server.test_version_r_is_kept_beside_r_plus_1_and_then_late),
    (version_r_dropped_early, test_server.test_version_r_is_kept_beside_r_plus_1_and_then_late),
    (
        who_comes_back_starts_where_it_was,
        test_clocks.test_who_comes_back_starts_at_the_slowest_clock,
    ),
]


@pytest.mark.parametrize("kind, mutation", CAUGHT_BY_SCHEDULES, ids=lambda x: getattr(x, "__name__", x))
def test_some_schedule_notices(kind: str, mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    for seed in range(FIRST_SEEDS.get(mutation, 0), MAX_SEEDS):
        try:
            run_seed(seed, kind, MAX_STEPS)
        except Wrong:
            return
    pytest.fail(f"{mutation.__name__} ran through {MAX_SEEDS} schedules of {kind} and nobody noticed.")


@pytest.mark.parametrize("mutation, exact", CAUGHT_BY_AN_EXACT_TEST, ids=lambda x: getattr(x, "__name__", x))
def test_an_exact_test_notices(mutation: Mutation, exact: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    exact()  # as it is, it passes
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        exact()
