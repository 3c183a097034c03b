"""A block and where it is published: readers see the old values or the new ones, never anything between."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from rainband.protocol.lr_schedules import Schedule
from rainband.protocol.messages import InitBlock, Tally
from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.protocol.parameter_buffers import ParameterBuffer
from rainband.rules import MeanOfRound
from rainband.server.block import Block
from tests.builders import (
    NUMEL,
    full,
    item_push,
    make_block,
    make_buffer,
    make_plan,
    make_push,
    make_server_part,
    named,
    rounds_plan,
    specs_of,
    value_of,
)

# ---- the buffer ----


def test_the_version_word_is_odd_while_the_block_is_written() -> None:
    words = [7, 40, 9]
    buffer = ParameterBuffer(words, 1, [full(0.0)])

    buffer.begin_write()
    assert words == [7, 41, 9]
    buffer.end_write()
    assert words == [7, 42, 9]


def test_versions_take_turns_in_two_buffers() -> None:
    even, odd = full(0.0), full(1.0)
    buffer = ParameterBuffer([0], 0, [even, odd])
    assert buffer.at(4) is even and buffer.at(5) is odd
    assert ParameterBuffer([0], 0, [even]).at(5) is even


# ---- one step ----


def test_a_step_of_1_at_rate_one_half_takes_0_to_minus_one_half() -> None:
    block = make_block()

    block.apply(full(1.0), [make_push(named(0, 0, 3))], ())

    assert value_of(block) == -0.5
    assert (block.version, block.accounting.applied, block.buffer.words[0]) == (1, 3, 2)


def test_absent_is_not_zero() -> None:
    """With momentum a parameter whose gradient is zero moves on, one that has none stays."""
    server_part = make_server_part(optimizer=OptimizerSpec("sgd", {"lr": 1.0, "momentum": 1.0}))
    block = make_block(server_part=server_part)

    block.apply(full(1.0), [make_push(named(0, 0))], ())
    block.apply(full(0.0), [make_push(named(0, 1))], {0})
    assert value_of(block) == -1.0
    block.apply(full(0.0), [make_push(named(0, 2))], ())
    assert value_of(block) == -2.0


def test_the_rate_is_that_of_the_batchs_place_in_the_plan_not_of_the_steps_so_far() -> None:
    server_part = make_server_part(lr=1.0, schedule=Schedule("linear"))
    block = make_block(make_plan(num_batches=8, portion_batches=4), server_part)

    block.apply(full(1.0), [make_push(named(1, 2))], ())  # batch 6 of 8: a quarter of the rate is left

    assert value_of(block) == -0.25


def test_a_push_without_name_is_where_the_data_is() -> None:
    block = make_block(make_plan(num_batches=4), make_server_part(lr=1.0, schedule=Schedule("linear")))
    block.accounting.accepted_set.add(named(0, 0, 2))

    block.apply(full(1.0), [make_push(())], ())

    assert value_of(block) == -0.5 and block.accounting.applied == 0


# ---- where it works ----


def watch(block: Block, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """The version word and the published values as readers would see them at the end of each step."""
    seen: list[tuple[int, float]] = []
    optimizer = block.parameters.optimizer
    assert optimizer is not None
    true_step = optimizer.step

    def step(gradient: Tensor, absent: Collection[int] = (), lr_scale: float = 1.0) -> None:
        true_step(gradient, absent, lr_scale)
        seen.append((block.buffer.words[0], block.buffer.tensors[0][0].item()))

    monkeypatch.setattr(optimizer, "step", step)
    return seen


def test_a_kernel_that_writes_once_works_in_the_published_memory_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block()
    seen = watch(block, monkeypatch)

    block.apply(full(1.0), [make_push(named(0, 0))], ())

    assert block.values is block.buffer.tensors[0]
    assert seen == [(1, -0.5)]  # the word was odd, and the memory changed under it


def test_an_optimizer_that_writes_more_than_once_works_on_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block(server_part=make_server_part(optimizer=OptimizerSpec("rmsprop", {"lr": 0.5})))
    seen = watch(block, monkeypatch)

    block.apply(full(1.0), [make_push(named(0, 0))], ())

    assert seen == [(0, 0.0)]  # readers saw the old values, and nothing was being written
    assert block.values is not block.buffer.tensors[0]
    assert torch.equal(block.values, block.buffer.tensors[0]) and value_of(block) < 0
    assert block.buffer.words[0] == 2


def test_in_rounds_version_r_is_not_touched_while_r_plus_1_is_made() -> None:
    block = make_block(plan := rounds_plan(items_per_round=1), make_server_part(MeanOfRound))

    for round_ in range(3):
        block.apply(full(1.0), [item_push(plan, round_ % 2, 0)], ())
        assert block.version == round_ + 1
        assert set(block.buffer.at(block.version).tolist()) == {-0.5 * block.version}
        assert set(block.buffer.at(block.version - 1).tolist()) == {-0.5 * round_}
        assert block.buffer.words[0] == 2 * block.version


def test_a_round_without_a_step_is_a_version_like_any_other() -> None:
    block = make_block(rounds_plan(), make_server_part(MeanOfRound))
    block.apply(full(1.0), [item_push(block.plan, 0, 0)], ())

    block.advance([])

    assert (block.version, block.buffer.words[0]) == (2, 4)
    assert [set(block.buffer.at(v).tolist()) for v in (1, 2)] == [{-0.5}, {-0.5}]


def test_sixteen_bit_parameters_are_kept_in_32() -> None:
    """256 + 1 is 256 in bfloat16: steps of 1 would be lost one by one, together they are not."""
    block = make_block(server_part=make_server_part(lr=1.0), dtype="bfloat16")
    block.load(InitBlock(0, "bfloat16", NUMEL), full(256.0, torch.bfloat16))

    for k in range(4):
        block.apply(full(-1.0), [make_push(named(0, k))], ())

    assert block.values.dtype == torch.float32 and value_of(block) == 260.0
    assert set(block.buffer.tensors[0].tolist()) == {260.0}


def test_first_values_are_in_every_buffer_and_in_the_master() -> None:
    for dtype in ("float32", "float64", "bfloat16"):
        for rule in (None, MeanOfRound):
            block = make_block(rounds_plan(), make_server_part(rule) if rule else None, dtype)
            block.load(InitBlock(0, dtype, NUMEL), full(3.0, block.parameters.dtype))
            assert value_of(block) == 3.0
            assert all(set(buffer.tolist()) == {3.0} for buffer in block.buffer.tensors)


def test_a_block_is_not_loaded_until_it_gets_its_first_values() -> None:
    (spec,) = specs_of(1)
    block = Block(spec, make_buffer(spec, 1), make_plan(), make_server_part(), ({},))
    assert not block.loaded


# ---- what it counts ----


def test_staleness_is_the_updates_between_the_read_and_the_apply() -> None:
    block = make_block()
    for k, version in enumerate((0, 0, 1, 9)):
        block.apply(full(1.0), [make_push(named(0, k), worker=k % 2, version=version)], ())

    assert block.accounting.staleness == {0: {0: 1, 1: 1}, 1: {1: 1, 0: 1}}  # never negative


def test_the_tally_counts_what_is_marked_applied_skipped_and_buffered() -> None:
    block = make_block(
        plan := rounds_plan(num_batches=9, items_per_round=3, portion_batches=3), make_server_part(MeanOfRound)
    )
    pushes = [item_push(plan, 0, 0), item_push(plan, 0, 1, skip="not finite"), item_push(plan, 0, 2)]
    pushes.append(item_push(plan, 1, 2))
    for push in pushes:
        block.accounting.accepted_set.add(push.push_id)
        if push.skip:
            block.accounting.skip(push.push_id, push.skip)
        block.rule.absorb(block, push, None if push.skip else full(1.0))

    assert block.tally() == Tally(accepted=4, applied=2, skipped=1, buffered=1)


def test_the_same_batch_skipped_twice_for_one_reason_counts_once() -> None:
    block = make_block()
    for _ in range(2):
        block.accounting.skip(named(0, 1, 3), "not finite")

    assert block.accounting.skipped == {(0, "not finite"): 0b110}
    assert block.tally().skipped == 2


def state_of(block: Block) -> dict[str, Any]:
    """All that a block remembers."""
    return {
        "values": block.values.tolist(),
        "version": block.version,
        "marks": dict(block.accounting.accepted_set.open),
    }


def test_blocks_share_nothing() -> None:
    ours, other = make_block(), make_block()
    before = state_of(other)

    ours.accounting.accepted_set.add(named(0, 0))
    ours.apply(full(1.0), [make_push(named(0, 0))], ())

    assert state_of(other) == before != state_of(ours)
