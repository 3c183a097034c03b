"""A server accepts a push in one fixed order, and what it refuses changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from rainband.protocol.data_plan import DataPlan, PushId
from rainband.protocol.layout import BlockSegment, BlockSpec
from rainband.protocol.messages import (
    COORDINATOR,
    AcceptedBatches,
    Ack,
    Assign,
    BlockReady,
    Failed,
    Flush,
    Forget,
    InitBlock,
    Params,
    Peer,
    Pull,
    Push,
    PushResult,
    Ready,
    Report,
    ReportRequest,
    Revoke,
    Tally,
)
from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.server.block import Block
from rainband.server.readers import ServerOutput
from rainband.server.server import Server
from tests.builders import (
    NUMEL,
    WORKERS,
    answer,
    full,
    item_push,
    make_buffer,
    make_plan,
    make_push,
    make_server_part,
    named,
    rounds_plan,
    send,
    specs_of,
    value_of,
)
from tests.builders import make_server as new_server
from tests.harness import replaced


def messages(outs: list[ServerOutput], kind: type) -> list[Any]:
    return [out.message for out in outs if isinstance(out.message, kind)]


def revoke(server: Server, portion: int, lease: int) -> AcceptedBatches:
    (sets,) = messages(server.receive(COORDINATOR, Revoke(portion, lease)), AcceptedBatches)
    assert isinstance(sets, AcceptedBatches)
    return sets


def report(server: Server) -> Report:
    (out,) = server.receive(COORDINATOR, ReportRequest())
    assert out.to == COORDINATOR and isinstance(out.message, Report)
    return out.message


# ---- accepting ----


def test_a_push_is_applied_once_and_then_had() -> None:
    server = new_server()

    assert send(server, make_push(named(0, 0))) == PushResult.ACCEPTED
    assert send(server, make_push(named(0, 0))) == PushResult.DUPLICATE

    assert value_of(server.blocks[0]) == -0.5
    assert server.blocks[0].version == server.updates == 1


def test_what_another_worker_has_done_is_had_whatever_its_lease() -> None:
    server = new_server()

    assert send(server, make_push(named(0, 0, 2, lease=1), worker=0)) == PushResult.ACCEPTED
    assert send(server, make_push(named(0, 1, lease=5), worker=1)) == PushResult.DUPLICATE

    assert value_of(server.blocks[0]) == -0.5


def test_batches_may_come_in_any_order() -> None:
    server = new_server()

    assert [send(server, make_push(named(0, k))) for k in (2, 0, 3, 1)] == [PushResult.ACCEPTED] * 4

    assert value_of(server.blocks[0]) == -2.0


def test_what_meets_the_marks_halfway_is_crossed() -> None:
    server = new_server()
    send(server, make_push(named(0, 0, 2)))

    assert send(server, make_push(named(0, 1, 3))) == PushResult.OVERLAPS
    assert send(server, make_push(named(0, 2, 4))) == PushResult.ACCEPTED


def test_a_name_may_be_ranges_of_several_portions() -> None:
    server = new_server()
    name = named(0, 2, 4) + named(1, 0)

    assert send(server, make_push(name)) == PushResult.ACCEPTED

    assert (
        server.blocks[0].accounting.accepted_set.of(0) == 0b1100
        and server.blocks[0].accounting.accepted_set.of(1) == 0b0001
    )
    assert send(server, make_push(named(0, 3) + named(1, 0))) == PushResult.DUPLICATE


def test_a_skip_marks_without_a_step() -> None:
    server = new_server()

    assert send(server, make_push(named(0, 0, 2), skip="not finite"), None) == PushResult.ACCEPTED
    assert send(server, make_push(named(0, 0, 2))) == PushResult.DUPLICATE

    assert value_of(server.blocks[0]) == 0.0 and server.blocks[0].version == 0
    assert report(server).skipped == {"not finite": 2}
    assert report(server).blocks == (Tally(accepted=2, applied=0, skipped=2, buffered=0),)


def test_a_push_without_name_is_named_by_its_sender() -> None:
    server = new_server()
    again = Peer("worker", 0, incarnation=1)

    assert send(server, make_push((), sequence=7)) == PushResult.ACCEPTED
    assert send(server, make_push((), sequence=7)) == PushResult.DUPLICATE
    assert send(server, make_push((), sequence=7, worker=1)) == PushResult.ACCEPTED
    assert answer(server.receive(again, make_push((), sequence=7), full(1.0))).result == PushResult.ACCEPTED

    assert value_of(server.blocks[0]) == -1.5 and server.blocks[0].accounting.accepted_set.count == 0


def settings(server: Server, lr: float) -> tuple[dict[str, Any], ...]:
    return ({**server.blocks[0].parameters.first_groups[0], "lr": lr},)


def test_a_worker_that_sent_no_settings_keeps_the_first_rate_when_another_has_changed_its_own() -> None:
    server = new_server(lr=0.5)

    send(server, make_push(named(0, 0), worker=0))
    send(server, make_push(named(0, 1), worker=1, groups=settings(server, 0.125)))
    assert value_of(server.blocks[0]) == -0.625
    send(server, make_push(named(0, 2), worker=0, sequence=2))
    assert value_of(server.blocks[0]) == -1.125  # 0.5, as at the start
    send(server, make_push(named(0, 3), worker=1, sequence=2))
    assert value_of(server.blocks[0]) == -1.25


def test_a_skipped_work_item_does_not_decide_the_rate_of_its_round() -> None:
    server = new_server(plan=(plan := rounds_plan(items_per_round=2)), lr=0.5)

    send(server, item_push(plan, 0, 0, worker=0, skip="not finite", samples=0), None)
    send(server, item_push(plan, 0, 1, worker=1, groups=settings(server, 0.125)))

    assert value_of(server.blocks[0]) == -0.125


def test_a_round_of_different_rates_uses_that_of_its_first_batch_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = new_server(num_blocks=2, plan=(plan := rounds_plan(items_per_round=2)), lr=0.5)

    for step in range(2):
        for index in range(2):
            send(server, item_push(plan, step, 0, worker=0, block=index))
            changed = settings(server, 0.125) if step == 0 else ()
            send(server, item_push(plan, step, 1, worker=1, block=index, groups=changed))

    assert value_of(server.blocks[0]) == -1.0  # two steps of 0.5
    (message,) = [record.getMessage() for record in caplog.records]
    assert (
        "different optimizer settings (worker 0 lr=0.5, worker 1 lr=0.125): this update uses those of worker 0"
        in message
    )
    assert "Set the learning rate by the epoch or by run.progress" in message


def test_a_round_of_equal_rates_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server = new_server(plan=(plan := rounds_plan(items_per_round=2)), lr=0.5)

    for worker in range(2):
        send(server, item_push(plan, 0, worker, worker=worker, groups=settings(server, 0.125)))

    assert value_of(server.blocks[0]) == -0.125
    assert not caplog.records


def test_the_answer_says_which_push_which_version_and_whose_slot() -> None:
    server = new_server()
    outs = server.receive(WORKERS[0], make_push(named(0, 0), sequence=9, slot=3), full(1.0))

    assert outs[0] == ServerOutput(
        WORKERS[0], Ack(block=0, sequence=9, result=PushResult.ACCEPTED, term=1, version=1, slot=3)
    )


# ---- refusing ----


def a_server_in_the_middle() -> Server:
    """Portion 0 is fenced below lease 2; the first of two blocks has had batch 0 of portion 1, so is at version 1."""
    server = new_server(num_blocks=2)
    send(server, make_push(named(1, 0), worker=0))
    revoke(server, portion=0, lease=2)
    return server


def optimizer_state(block: Block) -> dict[str, list[list[float]]]:
    assert block.parameters.optimizer is not None
    return {part: [tensor.tolist() for tensor in of] for part, of in block.parameters.optimizer.state().items()}


def state(server: Server) -> dict[str, Any]:
    """All that a server remembers, but for the count of what it refused."""
    blocks = {
        index: {
            "values": block.values.tolist(),
            "published": [buffer.tolist() for buffer in block.buffer.tensors],
            "word": block.buffer.words[0],
            "version": block.version,
            "marks": (
                block.accounting.accepted_set.first_open,
                dict(block.accounting.accepted_set.open),
                block.accounting.accepted_set.count,
            ),
            "untracked_pushes": dict(block.accounting.last_untracked),
            "skipped": dict(block.accounting.skipped),
            PushResult.ACCEPTED: block.accounting.applied,
            "staleness": copy.deepcopy(dict(block.accounting.staleness)),
            "buffered": block.rule.buffered,
            "waiting": dict(block.waiting),
            "optimizer": optimizer_state(block),
        }
        for index, block in server.blocks.items()
    }
    return {
        "blocks": blocks,
        "floor": dict(server.validator.min_lease),
        "complete": dict(server.progress.complete),
        "updates": server.updates,
    }


GOOD = make_push(named(1, 1), worker=0, block=0, clock=9)


@pytest.mark.parametrize(
    "push, payload, result, reason",
    [
        (replaced(GOOD, block=7), full(1.0), PushResult.WRONG_SERVER, "not my block"),
        (replaced(GOOD, term=2), full(1.0), PushResult.WRONG_SERVER, "term 2 has not begun here"),
        (replaced(GOOD, push_id=named(0, 0, lease=1)), full(1.0), PushResult.REVOKED, ""),
        (replaced(GOOD, push_id=named(1, 1) + named(0, 0, lease=1)), full(1.0), PushResult.REVOKED, ""),
        (replaced(GOOD, worker=1), full(1.0), PushResult.BAD, "a push of worker 1 came from worker 0"),
        (replaced(GOOD, push_id=named(9, 0)), full(1.0), PushResult.BAD, "portion 9 is not in the plan of 2"),
        (replaced(GOOD, push_id=named(1, 3, 5)), full(1.0), PushResult.BAD, "batches 3-5 are not in portion 1 of 4"),
        (
            replaced(GOOD, push_id=named(1, 1, 3) + named(1, 2)),
            full(1.0),
            PushResult.BAD,
            "batches of portion 1 are named twice",
        ),
        (replaced(GOOD, samples=0), full(1.0), PushResult.BAD, "a gradient of 0 samples has no weight"),
        (
            replaced(GOOD, dtype="float64"),
            full(1.0),
            PushResult.BAD,
            "block 0 is 32 x float32, the push is 32 x float64",
        ),
        (replaced(GOOD, numel=16), full(1.0), PushResult.BAD, "block 0 is 32 x float32, the push is 16 x float32"),
        (GOOD, full(1.0)[:5], PushResult.BAD, "the payload is not the 128 bytes of block 0"),
        (GOOD, None, PushResult.BAD, "the payload is not the 128 bytes of block 0"),
        (replaced(GOOD, at_version=0), full(1.0), PushResult.LATE, ""),
        (replaced(GOOD, at_version=2), full(1.0), PushResult.EARLY, "at version 1"),
        (replaced(GOOD, push_id=named(1, 0, 2)), full(1.0), PushResult.OVERLAPS, ""),
    ],
)
def test_what_is_refused_changes_nothing(push: Push, payload: Tensor | None, result: str, reason: str) -> None:
    server = a_server_in_the_middle()
    before = state(server)

    ack = answer(server.receive(WORKERS[0], push, payload))

    assert (ack.result, ack.reason) == (result, reason)
    assert state(server) == before
    assert server.progress.refused == {result.name.lower(): 1}
    assert send(server, GOOD) == PushResult.ACCEPTED


def test_a_push_leaves_out_the_parameters_that_have_no_gradient() -> None:
    segments = (BlockSegment(0, 0, 0, 10, 0), BlockSegment(1, 0, 16, 20, 0), BlockSegment(2, 0, 20, 32, 0))
    server_part = make_server_part(optimizer=OptimizerSpec("sgd", {"lr": 0.5, "weight_decay": 1.0}))
    server = Server(lambda _: server_part, lambda specs, buffers: [make_buffer(spec, buffers) for spec in specs])
    block = BlockSpec(0, 0, "float32", 0, NUMEL, segments)
    server.receive(COORDINATOR, Assign(make_plan(), (block,), ({},), num_replicas=1))
    server.receive(WORKERS[0], InitBlock(0, "float32", NUMEL), full(1.0))

    def pushed(k: int, absent: tuple[int, ...], *values: float) -> list[float]:
        push = make_push(named(0, k), sequence=k, absent=absent, numel=len(values))
        ack = answer(server.receive(WORKERS[0], push, torch.tensor(values) if values else None))
        assert ack.result == PushResult.ACCEPTED, ack.reason
        return server.blocks[0].values.tolist()

    assert pushed(0, (0, 2), 1.0, 1.0, 1.0, 3.0) == [1.0] * 16 + [0.0, 0.0, 0.0, -1.0] + [1.0] * 12
    assert pushed(1, (0, 1, 2)) == [1.0] * 16 + [0.0, 0.0, 0.0, -1.0] + [1.0] * 12
    wrong = server.receive(WORKERS[0], make_push(named(0, 2), absent=(1,)), full(1.0))
    assert (answer(wrong).result, answer(wrong).reason) == (
        PushResult.BAD,
        "block 0 is 22 x float32, the push is 32 x float32",
    )


def test_a_push_from_anyone_but_a_worker_is_refused() -> None:
    server = new_server()
    before = state(server)
    for stranger in (Peer("server", 0), Peer("coordinator", 0)):
        assert answer(server.receive(stranger, GOOD, full(1.0))).result == PushResult.BAD
    assert state(server) == before


FENCED: PushId = named(0, 0, lease=1)


@pytest.mark.parametrize(
    "first, second, push, payload",
    [
        (PushResult.WRONG_SERVER, PushResult.REVOKED, replaced(GOOD, term=2, push_id=FENCED), full(1.0)),
        (PushResult.REVOKED, PushResult.BAD, replaced(GOOD, push_id=FENCED), full(1.0)[:5]),
        (PushResult.REVOKED, PushResult.BAD, replaced(GOOD, push_id=named(0, 9, 99, lease=1)), full(1.0)),
        (PushResult.BAD, PushResult.DUPLICATE, replaced(GOOD, push_id=named(1, 0)), full(1.0)[:5]),
        (PushResult.BAD, PushResult.OVERLAPS, replaced(GOOD, push_id=named(1, 0, 2)), full(1.0)[:5]),
    ],
)
def test_of_two_reasons_the_first_in_order_is_reported(first: str, second: str, push: Push, payload: Tensor) -> None:
    assert answer(a_server_in_the_middle().receive(WORKERS[0], push, payload)).result == first


def test_in_rounds_late_comes_before_had_and_bad_before_late() -> None:
    server, plan = a_server_in_round(1)
    before = state(server)

    assert send(server, item_push(plan, 0, position=0)) == PushResult.LATE
    assert send(server, replaced(item_push(plan, 0, position=0), samples=0)) == PushResult.BAD
    assert state(server) == before


# ---- fences ----


def test_revoke_answers_with_the_sets_of_every_block_and_fences_smaller_leases() -> None:
    server = new_server(num_blocks=2)
    send(server, make_push(named(0, 0, 2, lease=1), block=0))
    send(server, make_push(named(0, 0, lease=1), block=1))

    assert revoke(server, portion=0, lease=2) == AcceptedBatches(portion=0, lease=2, masks=(0b11, 0b01))

    assert send(server, make_push(named(0, 2, lease=1))) == PushResult.REVOKED
    assert send(server, make_push(named(0, 2, lease=2))) == PushResult.ACCEPTED
    assert send(server, make_push(named(1, 0, lease=1))) == PushResult.ACCEPTED


def test_a_skip_under_a_lease_that_was_taken_back_is_refused_too() -> None:
    server = new_server()
    revoke(server, portion=0, lease=2)
    assert send(server, make_push(named(0, 0, lease=1), skip="not finite"), None) == PushResult.REVOKED
    assert server.blocks[0].accounting.accepted_set.count == 0


def test_a_fence_is_never_lowered() -> None:
    server = new_server()
    revoke(server, portion=0, lease=5)
    revoke(server, portion=0, lease=3)
    assert send(server, make_push(named(0, 0, lease=4))) == PushResult.REVOKED


def test_what_is_complete_needs_no_fence_any_more() -> None:
    """Its number is forgotten, so that fences do not add up; a push that comes late is had."""
    server = new_server()
    revoke(server, portion=0, lease=2)
    send(server, make_push(named(0, 0, 4, lease=2)))

    report(server)

    assert server.validator.min_lease == {}
    assert send(server, make_push(named(0, 0, lease=1))) == PushResult.DUPLICATE


# ---- rounds ----


def a_server_in_round(round_: int, num_blocks: int = 1, items_per_round: int = 2) -> tuple[Server, DataPlan]:
    plan = rounds_plan(num_batches=8, items_per_round=items_per_round, portion_batches=4)
    server = new_server(num_blocks, plan)
    for done in range(round_):
        for block in range(num_blocks):
            for position in range(items_per_round):
                assert send(server, item_push(plan, done, position, block=block)) == PushResult.ACCEPTED
    return server, plan


def test_a_round_is_one_update_when_all_its_work_items_are_there() -> None:
    server, plan = a_server_in_round(0)

    assert send(server, item_push(plan, 0, position=1, samples=3), 2.0) == PushResult.ACCEPTED
    assert server.blocks[0].version == 0 and server.updates == 0
    assert send(server, item_push(plan, 0, position=0, samples=1, worker=1), 6.0) == PushResult.ACCEPTED

    assert server.blocks[0].version == server.updates == 1
    assert value_of(server.blocks[0]) == -1.5  # half of (3 * 2 + 1 * 6) / 4


def test_a_work_item_of_a_round_that_is_over_is_late_and_of_one_to_come_early() -> None:
    server, plan = a_server_in_round(1)
    before = state(server)

    assert send(server, item_push(plan, 0, position=1)) == PushResult.LATE
    assert send(server, item_push(plan, 2, position=1)) == PushResult.EARLY

    assert state(server) == before
    assert send(server, item_push(plan, 1, position=1)) == PushResult.ACCEPTED


def test_the_same_work_item_from_two_workers_counts_once() -> None:
    server, plan = a_server_in_round(0, items_per_round=2)

    assert send(server, item_push(plan, 0, position=1, worker=0), 4.0) == PushResult.ACCEPTED
    assert send(server, item_push(plan, 0, position=1, worker=1), 4.0) == PushResult.DUPLICATE
    assert send(server, item_push(plan, 0, position=0), 2.0) == PushResult.ACCEPTED

    assert value_of(server.blocks[0]) == -1.5


@pytest.mark.parametrize(
    "push",
    [
        make_push(named(0, 1), at_version=0),  # a work item of round 1, said to be of round 0
        make_push(named(0, 0), at_version=-1),
        make_push((), at_version=0),
        make_push(named(0, 0) + named(1, 0), at_version=0),
        make_push(named(0, 0, 2), at_version=0),
    ],
)
def test_what_is_no_work_item_of_its_round_is_bad(push: Push) -> None:
    server, _ = a_server_in_round(0)
    before = state(server)

    assert send(server, push) == PushResult.BAD

    assert state(server) == before


# ---- reading ----


def params(outs: list[ServerOutput]) -> list[tuple[Peer, Params]]:
    return [(out.to, out.message) for out in outs if isinstance(out.message, Params) and out.read]


def test_a_pull_is_answered_with_every_block_read_when_its_bytes_leave() -> None:
    server = new_server(num_blocks=2)

    (to, first), (_, second) = params(server.receive(WORKERS[1], Pull(sequence=4)))
    assert to == WORKERS[1] and (first.block, second.block) == (0, 1)

    send(server, make_push(named(0, 0)))  # before the bytes have left
    message, values = server.read(first)
    assert (message.sequence, message.version, message.round_over) == (4, 1, False)
    assert values is not None and set(values.tolist()) == {-0.5}


def test_a_pull_is_held_until_the_first_values_are_there() -> None:
    server = new_server(num_blocks=2, loaded=False)

    assert server.receive(WORKERS[1], Pull(sequence=1)) == []
    assert params(server.receive(WORKERS[0], InitBlock(0, "float32", NUMEL), full(7.0))) == []
    outs = server.receive(WORKERS[0], InitBlock(1, "float32", NUMEL), full(8.0))

    assert [p.block for _, p in params(outs)] == [0, 1]
    assert [out.message for out in outs if out.to == COORDINATOR] == [Ready()]


def test_a_pull_of_a_round_is_held_until_the_round_is_there_block_by_block() -> None:
    server, plan = a_server_in_round(0, num_blocks=2, items_per_round=1)

    assert server.receive(WORKERS[1], Pull(sequence=1, at_version=1)) == []
    outs = server.receive(WORKERS[0], item_push(plan, 0, 0, block=1), full(1.0))
    assert [p.block for _, p in params(outs)] == [1]
    outs = server.receive(WORKERS[0], item_push(plan, 0, 0, block=0), full(1.0))
    assert [p.block for _, p in params(outs)] == [0]


def test_version_r_is_kept_beside_r_plus_1_and_then_late() -> None:
    server, plan = a_server_in_round(1, items_per_round=1)
    ask = Params(block=0, sequence=1, term=1, version=0, at_version=0)

    message, values = server.read(ask)
    assert (message.version, message.round_over) == (0, False)
    assert values is not None and set(values.tolist()) == {0.0}

    send(server, item_push(plan, 1, 0))
    message, values = server.read(ask)
    assert message.round_over and values is None
    message, values = server.read(replaced(ask, at_version=1))
    assert values is not None and set(values.tolist()) == {-0.5}


def test_a_push_may_want_the_block_back_also_when_it_is_refused() -> None:
    server = new_server(num_blocks=2)
    revoke(server, portion=0, lease=2)

    for lease, value in ((1, 0.0), (2, -0.5)):
        outs = server.receive(WORKERS[0], make_push(named(0, 0, lease=lease), sequence=5, want=True), full(1.0))
        ((to, wanted),) = params(outs)
        assert (to, wanted.block, wanted.sequence) == (WORKERS[0], 0, 5)
        values = server.read(wanted)[1]
        assert values is not None and set(values.tolist()) == {value}


def test_a_readers_newer_question_takes_the_place_of_its_older_one() -> None:
    server, plan = a_server_in_round(0, items_per_round=1)
    server.receive(WORKERS[0], Pull(sequence=1, at_version=1))
    server.receive(WORKERS[1], Pull(sequence=1, at_version=1))

    assert [p.sequence for _, p in params(server.receive(WORKERS[0], Pull(sequence=2, at_version=0)))] == [2]
    outs = server.receive(WORKERS[2], item_push(plan, 0, 0, worker=2), full(1.0))

    assert [to for to, _ in params(outs)] == [WORKERS[1]]


def test_nobody_answers_a_reader_that_is_gone() -> None:
    server, plan = a_server_in_round(0, items_per_round=1)
    server.receive(WORKERS[1], Pull(sequence=1, at_version=1))
    server.lost(WORKERS[1])
    assert params(server.receive(WORKERS[0], item_push(plan, 0, 0), full(1.0))) == []


# ---- first values ----


def test_first_values_that_come_before_the_blocks_wait_for_them() -> None:
    server_part = make_server_part()
    server = Server(lambda _: server_part, lambda specs, buffers: [make_buffer(spec, buffers) for spec in specs])
    lent = full(7.0)

    assert server.receive(WORKERS[0], InitBlock(0, "float32", NUMEL, slot=2), lent) == []
    lent.zero_()
    outs = server.receive(COORDINATOR, Assign(make_plan(), specs_of(1), ({},), num_replicas=1))

    assert outs == [ServerOutput(WORKERS[0], BlockReady(0, slot=2)), ServerOutput(COORDINATOR, Ready())]
    assert value_of(server.blocks[0]) == 7.0


def test_optimizer_state_that_does_not_fit_is_reported_to_the_coordinator_instead_of_killing_the_server() -> None:
    server = new_server(loaded=False)
    server.receive(WORKERS[0], InitBlock(0, "float32", NUMEL, part="exp_avg"), full(0.5))

    outs = server.receive(WORKERS[0], InitBlock(0, "float32", NUMEL), full(1.0))

    reason = (
        "block 0 was not loaded: the state of a segment is exp_avg, but this optimizer keeps none: load it into an "
        "optimizer with the same settings."
    )
    assert outs == [ServerOutput(COORDINATOR, Failed(0, reason, ""))]


def test_a_server_without_blocks_is_ready_at_once() -> None:
    server_part = make_server_part()
    server = Server(lambda _: server_part, lambda specs, buffers: [])
    assert server.receive(COORDINATOR, Assign(make_plan(), (), ({},), num_replicas=1)) == [
        ServerOutput(COORDINATOR, Ready())
    ]
    assert report(server).blocks == ()


def test_first_values_are_not_taken_over_what_was_learnt_but_their_slot_is_given_back() -> None:
    server = new_server()
    send(server, make_push(named(0, 0)))

    outs = server.receive(WORKERS[1], InitBlock(0, "float32", NUMEL, slot=4), full(9.0))

    assert outs == [ServerOutput(WORKERS[1], BlockReady(0, slot=4))]
    assert value_of(server.blocks[0]) == -0.5


@pytest.mark.parametrize(
    "load, payload",
    [
        (InitBlock(9, "float32", NUMEL), full(1.0)),
        (InitBlock(0, "float64", NUMEL), full(1.0)),
        (InitBlock(0, "float32", NUMEL - 1), full(1.0)),
        (InitBlock(0, "float32", NUMEL), full(1.0)[1:]),
        (InitBlock(0, "float32", NUMEL), None),
    ],
)
def test_first_values_that_do_not_fit_are_refused(load: InitBlock, payload: Tensor | None) -> None:
    server = new_server(loaded=False)
    assert server.receive(WORKERS[0], load, payload) == []
    assert not server.blocks[0].loaded and server.progress.refused == {"load": 1}


# ---- reports ----


def test_a_report_comes_by_itself_when_a_portion_is_complete_on_the_last_block() -> None:
    server = new_server(num_blocks=2)

    outs = server.receive(WORKERS[0], make_push(named(0, 0, 4), block=0), full(1.0))
    assert messages(outs, Report) == []
    outs = server.receive(WORKERS[0], make_push(named(0, 0, 4), block=1), full(1.0))

    (told,) = messages(outs, Report)
    assert (told.first_open, told.full, told.accepted) == (1, (), 4)


def test_of_very_many_portions_some_are_reported_at_once_and_the_last_without_delay() -> None:
    """125 portions, 50 reports: of every second one, and of the last."""
    server = new_server(plan=make_plan(num_batches=125, portion_batches=1))
    told = [
        messages(server.receive(WORKERS[0], make_push(named(portion, 0)), full(1.0)), Report) for portion in range(125)
    ]
    assert [len(reports) for reports in told[:4]] == [0, 1, 0, 1]
    assert told[-1][0].first_open == 125


def test_in_rounds_every_portion_is_reported_at_once() -> None:
    assert (
        new_server(plan=rounds_plan(num_batches=600, items_per_round=3, portion_batches=1)).progress.report_every == 1
    )


def test_portions_complete_above_the_lowest_open_one_are_listed() -> None:
    server = new_server(num_blocks=2, plan=make_plan(num_batches=6, portion_batches=2))
    for block in range(2):
        send(server, make_push(named(2, 0, 2), block=block))
    send(server, make_push(named(1, 0, 2), block=0))

    told = report(server)

    assert (told.first_open, told.full) == (0, (2,))
    assert told.accepted == 2  # the least over its blocks
    assert told.blocks == (Tally(4, 4, 0, 0), Tally(2, 2, 0, 0))
    assert told.updates == 3


def test_a_report_counts_what_was_refused_and_how_stale_what_was_applied_was() -> None:
    server = new_server()
    revoke(server, portion=1, lease=2)
    for k in range(3):
        send(server, make_push(named(0, k), worker=k % 2, version=0))
    send(server, make_push(named(1, 0, lease=1)))
    send(server, make_push(named(0, 2, 4)))

    told = report(server)

    assert told.refused == {"revoked": 1, "overlaps": 1}
    assert told.staleness == {0: {0: 1, 2: 1}, 1: {1: 1}}


def test_a_flush_refuses_later_pushes_of_lost_workers_and_of_their_earlier_processes() -> None:
    server = new_server()
    server.receive(COORDINATOR, Flush(((0, 1),)))
    server.receive(COORDINATOR, Flush())  # a second one forgets nothing

    def result(worker: int, incarnation: int, k: int) -> PushResult:
        outs = server.receive(Peer("worker", worker, incarnation), make_push(named(0, k), worker=worker), full(1.0))
        return next(out.message.result for out in outs if isinstance(out.message, Ack))

    assert result(0, 0, 0) == result(0, 1, 0) == PushResult.REVOKED
    assert report(server).blocks[0].accepted == 0
    assert result(0, 2, 0) == result(1, 0, 1) == PushResult.ACCEPTED


def test_flush_and_forget_change_no_round_that_is_not_complete() -> None:
    server, plan = a_server_in_round(0, items_per_round=2)
    send(server, item_push(plan, 0, position=0, worker=1))
    before = state(server)

    assert server.receive(COORDINATOR, Forget(worker=1)) == []
    (out,) = server.receive(COORDINATOR, Flush())

    assert isinstance(out.message, Report) and out.message.flushed
    assert out.message.blocks == (Tally(accepted=1, applied=0, skipped=0, buffered=1),)
    assert state(server) == before


@pytest.mark.parametrize("message", [Revoke(0, 9), Forget(1), ReportRequest(), Flush()])
def test_a_worker_may_not_say_what_a_coordinator_says(message: Any) -> None:
    server = new_server()
    before = state(server)

    assert server.receive(WORKERS[0], message) == []

    assert state(server) == before
    assert server.progress.refused == {f"{type(message).__name__} from a worker": 1}


def test_the_same_messages_in_the_same_order_make_the_same_bits() -> None:
    """That is what makes a copy of a server possible."""
    servers = [new_server(num_blocks=2) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for k in range(4):
        gradient = torch.randn(NUMEL, generator=generator)
        answers = [s.receive(WORKERS[0], make_push(named(0, k), block=k % 2), gradient) for s in servers]
        assert answers[0] == answers[1]
    assert state(servers[0]) == state(servers[1])
