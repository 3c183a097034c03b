"""Vector programs: what each operation does, what is refused before anything is done, and that a retry does nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rainband.protocol.data_plan import BatchRange, DataPlan
from rainband.protocol.layout import BlockSegment, LayoutEntry, arrange, cut
from rainband.protocol.messages import (
    COORDINATOR,
    Answer,
    Assign,
    Command,
    Evaluated,
    InitBlock,
    Message,
    Peer,
    Push,
    PushResult,
    decode,
    encode,
)
from rainband.protocol.parameter_buffers import ParameterBuffer
from rainband.protocol.vectors import (
    KINDS,
    PARAMS,
    Operation,
    Vectors,
    axpy,
    copy,
    dot,
    drop,
    fill,
    multiply,
    norm,
    scale,
    swap,
    validate_operations,
)
from rainband.server.server import Server
from rainband.strategies.sandblaster import Sandblaster

WORKER = Peer("worker", 0)


def vectors(*values: float) -> Vectors:
    """Parameters of one segment, then an element that belongs to no parameter."""
    return Vectors(torch.tensor([*values, 0.0]), [BlockSegment(0, 0, 0, len(values), 0)])


# ---- what each does ----


def test_each_operation_does_what_it_says() -> None:
    v = vectors(1.0, 2.0)
    program = [copy("a", PARAMS), fill("b", 3.0), axpy("a", 2.0, "b"), scale("b", -1.0), multiply("a", "b")]
    assert [v.run(operation) for operation in program] == [None] * 5

    assert v.named["a"].tolist() == [-21.0, -24.0, 0.0]  # (1 + 6, 2 + 6) * -3
    assert v.named["b"].tolist() == [-3.0, -3.0, 0.0]
    assert v.named[PARAMS].tolist() == [1.0, 2.0, 0.0]
    assert v.run(dot("a", PARAMS)) == -69.0
    assert v.run(norm(PARAMS)) == 5.0  # the square, which can be added up


def test_swap_exchanges_and_drop_forgets() -> None:
    v = vectors(1.0)
    for operation in (fill("a", 2.0), fill("b", 3.0), swap("a", "b"), drop("b")):
        v.run(operation)
    assert v.named["a"].tolist() == [3.0, 0.0] and "b" not in v.named


def test_what_lies_between_parameters_stays_zero() -> None:
    v = vectors(1.0, 1.0)
    v.run(fill("a", 7.0))
    assert v.run(norm("a")) == 98.0  # 2 x 49, not 3 x 49


def test_dot_products_of_float32_are_summed_in_float64() -> None:
    v = Vectors(torch.tensor([1e8, 1.0, -1e8], dtype=torch.float32), [BlockSegment(0, 0, 0, 3, 0)])
    v.run(fill("ones", 1.0))
    assert v.run(dot(PARAMS, "ones")) == 1.0
    assert v.run(norm(PARAMS)) == 2e16 + 1 or v.run(norm(PARAMS)) == pytest.approx(2e16)


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=8), st.integers(-9, 9))
def test_axpy_and_back_again_changes_nothing(values: list[int], times: int) -> None:
    v = vectors(*map(float, values))
    for operation in (copy("a", PARAMS), axpy("a", times, PARAMS), axpy("a", -times, PARAMS)):
        v.run(operation)
    assert torch.equal(v.named["a"], v.named[PARAMS])


# ---- what is refused ----


@pytest.mark.parametrize(
    "operations, why",
    [
        ([axpy("a", 1.0, PARAMS)], "axpy a params: there is no vector 'a', only params"),
        ([copy("a", "b")], "copy a b: there is no vector 'b'"),
        ([dot(PARAMS, "s0")], "there is no vector 's0'"),
        ([drop("a")], "there is no vector 'a'"),
        ([fill("a", 0), drop("a"), scale("a", 2.0)], "scale a: there is no vector 'a'"),
        ([fill("a", 0), fill("b", 0), fill("c", 0)], "one vector too many, there is room for 2 beside the parameters"),
        ([fill("a", 0), swap("a", PARAMS)], "the parameters stay where readers see them"),
        ([drop(PARAMS)], "the parameters stay where readers see them"),
        ([Operation("invert", PARAMS)], "no operation named 'invert': there are fill, copy"),
    ],
)
def test_a_wrong_program_is_refused_with_its_reason(operations: list[Operation], why: str) -> None:
    assert why in validate_operations(operations, {PARAMS}, room=2)


def test_a_good_program_is_not_refused() -> None:
    program = [fill("a", 0), fill("b", 0), drop("a"), copy("c", "b"), swap("b", "c"), dot("b", PARAMS)]
    assert validate_operations(program, {PARAMS}, room=2) == ""


@given(st.lists(st.builds(Operation, st.sampled_from(KINDS), st.sampled_from("abcd"), st.sampled_from("abcd"))))
def test_a_program_that_is_not_refused_can_be_done_and_has_at_most_its_room(program: list[Operation]) -> None:
    v, todo = vectors(1.0, 2.0), []
    for operation in program:  # as much of it as is allowed
        if not validate_operations([*todo, operation], {PARAMS}, room=2):
            todo.append(operation)
    for operation in todo:
        v.run(operation)
        assert len(v.named) <= 3


# ---- on a server ----


class Rig:
    """One server with a model of 48 elements in two blocks; a worker; a coordinator whose words are encoded."""

    def __init__(self, strategy: Sandblaster | None = None) -> None:
        layout = arrange([LayoutEntry("w", (48,))])
        self.blocks = cut(layout, num_servers=2)
        plan = DataPlan(
            fingerprint="", layout="", num_samples=12, batch_size=2, epochs=1, seed=0,
            portion_batches=2, batches_per_item=2, coordinated=True,
        )  # fmt: skip
        self.buffers_of_blocks: list[ParameterBuffer] = []
        self.server = Server((strategy or Sandblaster(history=1)).server, self.publish)
        self.say(Assign(plan, self.blocks, layout.groups, 1))
        for block in self.blocks:
            values = torch.arange(float(block.start), float(block.stop))
            self.server.receive(WORKER, InitBlock(block.index, "float32", block.numel), values)

    def publish(self, specs: Any, buffers: int) -> list[ParameterBuffer]:
        assert buffers == 1
        self.buffers_of_blocks = [ParameterBuffer([0], 0, [torch.zeros(spec.numel)]) for spec in specs]
        return self.buffers_of_blocks

    def say(self, message: Message) -> list[Any]:
        return [
            out.message for out in self.server.receive(COORDINATOR, decode(encode(message))) if out.to == COORDINATOR
        ]

    def command(self, number: int, *operations: Operation, term: int = 1, work_items: int = 0) -> list[Any]:
        return self.say(Command(term, number, operations, work_items))

    def push(
        self, work_item: int, at_version: int, value: float = 1.0, samples: int = 4, loss: float = 0.5
    ) -> list[str]:
        """Push the gradient of a work item to all blocks; return results, and at the end the message that follows."""
        results: list[Any] = []
        for block in self.blocks:
            name = (BatchRange(work_item, 0, 2, at_version),)
            message = Push(
                block.index,
                0,
                1,
                name,
                samples,
                1,
                1,
                at_version,
                "float32",
                block.numel,
                at_version=at_version,
                loss=loss,
            )
            outs = self.server.receive(WORKER, message, torch.full((block.numel,), value))
            results += [out.message.result if out.to == WORKER else out.message for out in outs]  # type: ignore
        return results

    def values(self, name: str = PARAMS) -> Tensor:
        return torch.cat([block.parameters.vectors.named[name] for block in self.server.blocks.values()])


def test_numbers_are_added_up_over_the_blocks_of_a_server() -> None:
    (answer,) = Rig().command(1, dot(PARAMS, PARAMS))
    assert answer == Answer(1, 1, (sum(i * i for i in range(48)),), version=0)


def test_a_command_that_comes_again_is_answered_the_same_and_not_done_again() -> None:
    rig = Rig()
    first = rig.command(1, scale(PARAMS, 2.0), norm(PARAMS))
    assert rig.command(1, scale(PARAMS, 2.0), norm(PARAMS)) == first
    assert torch.equal(rig.values(), 2 * torch.arange(48.0))
    assert rig.server.blocks[0].version == rig.server.blocks[1].version == 1


def test_commands_out_of_order_or_of_a_term_that_is_over_change_nothing() -> None:
    rig = Rig()
    rig.command(1, norm(PARAMS))
    rig.command(2, scale(PARAMS, 2.0), term=2)
    assert rig.command(1, scale(PARAMS, 3.0), term=2) == []
    assert rig.command(4, scale(PARAMS, 3.0), term=2)[0].refused == "command 4 came when 3 was expected"
    assert rig.command(3, scale(PARAMS, 3.0), term=1)[0].refused == "term 1 is over, this is term 2"
    assert torch.equal(rig.values(), 2 * torch.arange(48.0))


def test_a_coordinator_that_was_started_again_hears_what_came_of_the_command_under_way() -> None:
    """It is done once: by the servers that received it before, and by the others now."""
    rig = Rig()
    rig.command(1, scale(PARAMS, 2.0), dot(PARAMS, PARAMS))
    (answer,) = rig.command(1, scale(PARAMS, 2.0), dot(PARAMS, PARAMS), term=2)
    assert answer == Answer(2, 1, (4.0 * sum(i * i for i in range(48)),), version=1)
    assert rig.command(1, scale(PARAMS, 2.0), dot(PARAMS, PARAMS))[0].refused == "term 1 is over, this is term 2"
    assert torch.equal(rig.values(), 2 * torch.arange(48.0))


def test_who_asks_for_something_else_under_the_number_of_what_was_done_is_refused() -> None:
    rig = Rig()
    rig.command(1, scale(PARAMS, 2.0))
    assert rig.command(1, scale(PARAMS, 0.5), term=2)[0].refused == "another command 1 was done"
    assert torch.equal(rig.values(), 2 * torch.arange(48.0))


def test_of_a_refused_program_nothing_is_done() -> None:
    rig = Rig()
    (answer,) = rig.command(1, scale(PARAMS, 2.0), dot(PARAMS, "nobody"))
    assert "no vector 'nobody'" in answer.refused and answer.version == 0
    assert torch.equal(rig.values(), torch.arange(48.0))
    assert rig.command(1, scale(PARAMS, 2.0))[0].refused == ""  # its number is still free


def test_a_vector_too_many_is_refused() -> None:
    """With a history of 1 there may be 2 + 4 vectors: the parameters and 5 more."""
    rig = Rig(Sandblaster(history=1))
    assert rig.command(1, *(fill(f"v{n}", 0.0) for n in range(5)))[0].refused == ""
    assert "room for 5 beside the parameters" in rig.command(2, fill("v5", 0.0))[0].refused


def test_readers_see_one_new_version_for_a_command_that_moves_the_parameters() -> None:
    rig = Rig()
    rig.command(1, copy("start", PARAMS), axpy(PARAMS, 1.0, "start"), axpy(PARAMS, 1.0, "start"))
    rig.command(2, norm(PARAMS), scale("start", 2.0))
    assert [buffer.words[0] for buffer in rig.buffers_of_blocks] == [
        2,
        2,
    ]  # twice the version: it is even when nobody writes


# ---- evaluations ----


def test_an_evaluation_is_over_when_every_block_has_every_work_item_once() -> None:
    rig = Rig()
    assert rig.command(1, work_items=2) == [Answer(1, 1, (), version=1)]
    assert rig.push(0, at_version=1, loss=0.5, samples=4) == [PushResult.ACCEPTED, PushResult.ACCEPTED]
    assert rig.push(0, at_version=1, loss=9.0, samples=4) == [PushResult.DUPLICATE, PushResult.DUPLICATE]
    assert rig.push(1, at_version=1, loss=2.0, samples=2) == [
        PushResult.ACCEPTED,
        PushResult.ACCEPTED,
        Evaluated(1, 6.0, 6),
    ]
    assert rig.values("gradient").tolist() == [2.0] * 48


def test_the_same_work_items_come_again_in_the_next_evaluation() -> None:
    rig = Rig()
    rig.command(1, work_items=1)
    rig.push(0, at_version=1, value=5.0)
    rig.command(2, work_items=1)
    assert rig.push(0, at_version=2, value=7.0)[:2] == [PushResult.ACCEPTED, PushResult.ACCEPTED]
    assert rig.values("gradient").tolist() == [7.0] * 48


def test_what_comes_for_an_evaluation_that_is_over_is_late() -> None:
    rig = Rig()
    rig.command(1, work_items=1)
    rig.push(0, at_version=1)
    rig.command(2, scale(PARAMS, 2.0), work_items=1)
    assert rig.push(0, at_version=1, value=9.0) == [PushResult.LATE, PushResult.LATE]
    assert rig.values("gradient").tolist() == [0.0] * 48


def test_who_asks_again_after_an_evaluation_hears_its_end_again() -> None:
    rig = Rig()
    rig.command(1, work_items=1)
    end = rig.push(0, at_version=1)[-1]
    assert rig.command(1, work_items=1) == [Answer(1, 1, (), version=1), end]


def test_the_end_of_an_evaluation_is_reported_once_not_with_every_command_after_it() -> None:
    rig = Rig()
    rig.command(1, work_items=1)
    rig.push(0, at_version=1)
    assert rig.command(2, scale("gradient", 0.5)) == [Answer(1, 2, (), version=1)]


def test_a_work_item_whose_gradient_is_not_finite_makes_the_loss_not_finite() -> None:
    rig = Rig()
    rig.command(1, work_items=1)
    for block in rig.blocks:
        name = (BatchRange(0, 0, 2, 1),)
        skip = Push(block.index, 0, 1, name, 0, 1, 1, 1, "float32", block.numel, at_version=1, skip="not finite")
        outs = rig.server.receive(WORKER, skip)
    end = outs[-1].message
    assert isinstance(end, Evaluated) and math.isnan(end.loss)


def test_the_first_values_cannot_be_loaded_over_a_run_that_has_begun() -> None:
    rig = Rig()
    rig.command(1, work_items=1)
    block = rig.blocks[0]
    rig.server.receive(WORKER, InitBlock(0, "float32", block.numel), torch.full((block.numel,), 99.0))
    assert torch.equal(rig.values(), torch.arange(48.0))


def test_a_server_of_any_other_strategy_refuses_commands() -> None:
    from rainband.strategies.downpour import Downpour

    server = Server(Downpour().server, lambda specs, buffers: [])
    assert server.receive(COORDINATOR, Command(1, 1, (norm(PARAMS),))) == []
    assert server.progress.refused["command"] == 1


@pytest.mark.parametrize(
    "operation",
    [
        fill("a", 9.0),
        copy("a", "b"),
        scale("a", 2.0),
        axpy("a", 1.0, "b"),
        multiply("a", "b"),
        swap("a", "b"),
        swap("b", "a"),
        drop("a"),
    ],
    ids=str,
)
def test_vectors_that_a_checkpoint_reads_stay_as_they_are(operation: Operation) -> None:
    vectors = Vectors(torch.zeros(3), (BlockSegment(0, 0, 0, 3, 0),))
    for name, number in (("a", 1.0), ("b", 2.0)):
        vectors.run(fill(name, number))
    lent = vectors.lend()
    vectors.run(operation)
    vectors.run(fill("b", 7.0))
    vectors.run(fill("a", 8.0))
    assert lent["a"].tolist() == [1.0] * 3 and lent["b"].tolist() == [2.0] * 3
    assert vectors.named["a"].tolist() == [8.0] * 3 and vectors.named["b"].tolist() == [7.0] * 3
    assert vectors.named["a"] is not lent["a"] and not vectors.lent
