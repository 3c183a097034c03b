from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rainband.model.block_optimizer import BlockOptimizer, blockwise_obstacle, build
from rainband.protocol.layout import BlockSegment, BlockSpec
from rainband.protocol.optimizer_spec import BUILT_IN, OptimizerSpec

EVERY: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"lr": 0.1}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.01}),
    ("adam", {"lr": 0.1, "weight_decay": 0.01}),
    ("adam", {"lr": 0.1, "amsgrad": True, "betas": [0.8, 0.9]}),
    ("adamw", {"lr": 0.1, "weight_decay": 0.1}),
    ("rmsprop", {"lr": 0.1}),
    ("rmsprop", {"lr": 0.1, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    ("nadam", {"lr": 0.1, "weight_decay": 0.01}),
    ("radam", {"lr": 0.1, "weight_decay": 0.01}),
    ("adamax", {"lr": 0.1, "weight_decay": 0.01}),
    ("adadelta", {"lr": 0.5, "weight_decay": 0.01}),
    ("asgd", {"lr": 0.1, "t0": 2.0, "lambd": 0.01}),
    ("rprop", {"lr": 0.1}),
]
every = pytest.mark.parametrize("name, numbers", EVERY, ids=lambda value: value if isinstance(value, str) else None)


def block_of(*lengths: int, groups: Sequence[int] = ()) -> BlockSpec:
    """A block of whole parameters 0, 1, … of these lengths, side by side."""
    stops = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    group_of = groups or [0] * len(lengths)
    segments = tuple(
        BlockSegment(i, 0, stop - length, stop, group_of[i])
        for i, (length, stop) in enumerate(zip(lengths, stops, strict=True))
    )
    return BlockSpec(0, 0, "float32", 0, sum(lengths), segments)


def one_each(
    values: Tensor, name: str, groups: Sequence[Mapping[str, object]] = ({},), **numbers: Any
) -> BlockOptimizer:
    """Over a block whose every element is a parameter, each in a group of its own if there are two."""
    block = block_of(*[1] * values.numel(), groups=range(len(groups)) if len(groups) > 1 else ())
    return BlockOptimizer(OptimizerSpec(name, numbers), block, values, groups)


def assert_close(values: Tensor, *expected: float) -> None:
    torch.testing.assert_close(values, torch.tensor(expected, dtype=values.dtype), rtol=1e-6, atol=1e-7)


# Each optimizer does what its equation says.


def test_sgd_goes_against_the_gradient_by_the_learning_rate() -> None:
    values = torch.tensor([1.0])
    one_each(values, "sgd", lr=0.1).step(torch.tensor([0.5]))
    assert_close(values, 0.95)


def test_momentum_adds_a_part_of_the_last_step() -> None:
    values = torch.tensor([1.0])
    optimizer = one_each(values, "sgd", lr=0.1, momentum=0.5)
    optimizer.step(torch.tensor([1.0]))  # buffer 1
    assert_close(values, 0.9)
    optimizer.step(torch.tensor([1.0]))  # buffer 0.5 + 1
    assert_close(values, 0.75)


def test_adagrad_divides_by_the_root_of_all_squares_so_far() -> None:
    values = torch.tensor([1.0])
    optimizer = one_each(values, "adagrad", lr=0.1)
    optimizer.step(torch.tensor([3.0]))  # 3 / sqrt(9)
    assert_close(values, 0.9)
    optimizer.step(torch.tensor([4.0]))  # 4 / sqrt(9 + 16)
    assert_close(values, 0.82)


@pytest.mark.parametrize("in_settings, in_group", [(16.0, None), (None, 16.0), (1.0, 16.0)])
def test_adagrad_starts_from_its_initial_accumulator_value(in_settings: float | None, in_group: float | None) -> None:
    def named(value: float | None) -> dict[str, float]:
        return {} if value is None else {"initial_accumulator_value": value}

    values = torch.tensor([1.0])
    optimizer = one_each(values, "adagrad", [named(in_group)], lr=0.1, **named(in_settings))
    optimizer.step(torch.tensor([3.0]))  # 3 / sqrt(16 + 9)
    assert_close(values, 0.94)


def test_the_first_step_of_adam_is_the_learning_rate_whatever_the_size_of_the_gradient() -> None:
    values = torch.tensor([1.0, 1.0])
    one_each(values, "adam", lr=0.1).step(torch.tensor([1000.0, -0.01]))
    assert_close(values, 0.9, 1.1)


def test_adamw_shrinks_the_parameter_beside_the_step() -> None:
    values = torch.tensor([2.0])
    one_each(values, "adamw", lr=0.1, weight_decay=0.5).step(torch.tensor([1.0]))  # 2 * (1 - 0.05) - 0.1
    assert_close(values, 1.8)


def test_rmsprop_divides_by_the_root_of_the_mean_square() -> None:
    values = torch.tensor([1.0])
    one_each(values, "rmsprop", lr=0.1, alpha=0.75).step(torch.tensor([4.0]))  # 4 / sqrt(16 / 4)
    assert_close(values, 0.8)


# Groups, learning rates, absent gradients.


def test_each_group_has_its_own_learning_rate_and_weight_decay() -> None:
    values = torch.tensor([1.0, 1.0])
    groups = [{"lr": 0.1}, {"weight_decay": 0.5}]
    one_each(values, "sgd", groups, lr=0.2).step(torch.tensor([1.0, 1.0]))
    assert_close(values, 0.9, 0.7)  # 1 - 0.1 * 1 and 1 - 0.2 * (1 + 0.5)


def test_a_block_may_lie_in_the_last_group_only() -> None:
    values = torch.tensor([1.0])
    groups = [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}]
    optimizer = BlockOptimizer(OptimizerSpec("sgd"), block_of(1, groups=[2]), values, groups)
    optimizer.step(torch.tensor([1.0]))
    assert_close(values, 0.7)


def test_the_learning_rate_is_scaled_for_one_step_only() -> None:
    values = torch.tensor([1.0, 1.0])
    optimizer = one_each(values, "sgd", [{}, {"lr": 0.2}], lr=0.1)
    optimizer.step(torch.ones(2), lr_scale=0.5)
    assert_close(values, 0.95, 0.9)
    optimizer.step(torch.ones(2))
    assert_close(values, 0.85, 0.7)


@pytest.mark.parametrize(
    "name, numbers",
    [
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"weight_decay": 0.1}),
        ("adam", {}),
        ("adamw", {}),
        ("rmsprop", {"momentum": 0.9}),
    ],
)
def test_an_absent_parameter_does_not_move_although_a_zero_gradient_would_move_it(
    name: str, numbers: dict[str, Any]
) -> None:
    for absent, moves in (([1], False), ([], True)):
        values = torch.tensor([1.0, 1.0])
        optimizer = one_each(values, name, lr=0.1, **numbers)
        optimizer.step(torch.tensor([1.0, 1.0]))
        before = values.clone()
        optimizer.step(torch.tensor([1.0, 0.0]), absent=absent)
        assert values[0] != before[0]
        assert bool(values[1] != before[1]) is moves


def test_what_lies_between_segments_stays() -> None:
    values = torch.ones(48)
    segments = (BlockSegment(0, 0, 0, 5, 0), BlockSegment(1, 0, 16, 20, 0), BlockSegment(2, 0, 32, 48, 0))
    block = BlockSpec(0, 0, "float32", 0, 48, segments)
    BlockOptimizer(OptimizerSpec("sgd", {"lr": 1.0}), block, values, [{}]).step(torch.ones(48))
    assert values.tolist() == [0.0] * 5 + [1.0] * 11 + [0.0] * 4 + [1.0] * 12 + [0.0] * 16


def test_a_block_without_segments_has_nothing_to_do() -> None:
    values = torch.ones(16)
    optimizer = BlockOptimizer(OptimizerSpec("adam"), BlockSpec(0, 0, "float32", 0, 16, ()), values, [{}])
    optimizer.step(torch.ones(16))
    optimizer.load_state(optimizer.state())
    assert values.tolist() == [1.0] * 16 and optimizer.state() == {}


def test_momentum_may_begin_late_in_one_segment() -> None:
    values = torch.tensor([1.0, 1.0])
    optimizer = one_each(values, "sgd", lr=0.1, momentum=0.5)
    optimizer.step(torch.ones(2), absent=[1])
    assert_close(values, 0.9, 1.0)
    optimizer.step(torch.ones(2))  # first buffer 0.5 + 1, second buffer 1
    assert_close(values, 0.75, 0.9)
    optimizer.step(torch.zeros(2))  # buffers 0.75 and 0.5
    assert_close(values, 0.675, 0.85)


def test_a_group_without_momentum_does_not_hinder_one_with() -> None:
    values = torch.tensor([1.0, 1.0])
    optimizer = one_each(values, "sgd", [{"momentum": 0.0}, {"momentum": 0.5}], lr=0.1)
    for _ in range(2):
        optimizer.step(torch.ones(2))
    assert_close(values, 0.8, 0.75)


# The gradient is only lent.


@every
def test_the_gradient_is_neither_changed_nor_kept(name: str, numbers: dict[str, Any]) -> None:
    values, gradient = torch.ones(3), torch.tensor([1.0, -2.0, 3.0])
    optimizer = one_each(values, name, **numbers)
    lent = weakref.ref(gradient.untyped_storage())
    for _ in range(2):
        optimizer.step(gradient)
    assert gradient.tolist() == [1.0, -2.0, 3.0]
    before = [tensor.clone() for tensors in optimizer.state().values() for tensor in tensors]
    gradient.fill_(7.0)
    after = [tensor for tensors in optimizer.state().values() for tensor in tensors]
    assert all(map(torch.equal, before, after))
    assert lent() is not None
    del gradient
    assert lent() is None


def test_a_step_that_fails_gives_the_gradient_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    values, gradient = torch.ones(1), torch.ones(1)
    monkeypatch.setattr(torch.optim.SGD, "step", failing)
    optimizer = one_each(values, "sgd")
    with pytest.raises(RuntimeError, match="no power"):
        optimizer.step(gradient)
    lent = weakref.ref(gradient.untyped_storage())
    assert lent() is not None
    del gradient
    assert lent() is None


def failing(self: object) -> None:
    raise RuntimeError("no power")


# However the vector is cut, every optimizer gives the bits of plain torch.

PARAMETERS = ((0, 70), (80, 130))  # places in a vector of 144, each starting at a multiple of 16
ABSENT: list[list[int]] = [[1], [], [0], [], [], [0, 1], [], [1], [], []]  # parameter 1 comes late


def blocks_cut_at(cuts: Iterable[int]) -> list[BlockSpec]:
    edges = [0, *sorted(cuts), 144]
    blocks: list[BlockSpec] = []
    for start, stop in itertools.pairwise(edges):
        inside = [(i, max(a, start), min(b, stop), a) for i, (a, b) in enumerate(PARAMETERS)]
        segments = tuple(BlockSegment(i, a - origin, a - start, b - start, i) for i, a, b, origin in inside if a < b)
        blocks.append(BlockSpec(len(blocks), 0, "float32", start, stop, segments))
    return blocks


def trained_by_torch(name: str, numbers: dict[str, Any], values: Tensor, gradients: Tensor) -> Tensor:
    """One plain torch optimizer per parameter, which is not called when the gradient is absent."""
    cls = getattr(torch.optim, BUILT_IN[name])
    fused = {"fused": True} if name in ("sgd", "adam", "adamw", "adagrad") else {}
    parameters = [values[a:b].clone() for a, b in PARAMETERS]
    optimizers = [
        cls([parameter], **{**numbers, "lr": numbers["lr"] * (1 + i)}, **fused)
        for i, parameter in enumerate(parameters)
    ]
    for gradient, absent in zip(gradients, ABSENT, strict=True):
        for i, (a, b) in enumerate(PARAMETERS):
            if i not in absent:
                parameters[i].grad = gradient[a:b].clone()
                optimizers[i].step()
    result = values.clone()
    for (a, b), parameter in zip(PARAMETERS, parameters, strict=True):
        result[a:b] = parameter
    return result


@every
@settings(max_examples=5, deadline=None)
@given(cuts=st.sets(st.sampled_from(range(16, 144, 16))), double=st.booleans())
def test_ten_steps_give_the_same_bits_however_the_vector_is_cut(
    name: str, numbers: dict[str, Any], cuts: set[int], double: bool
) -> None:
    dtype = torch.float64 if double else torch.float32
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(144, generator=generator, dtype=dtype)
    gradients = torch.randn(10, 144, generator=generator, dtype=dtype)
    expected = trained_by_torch(name, numbers, values, gradients)
    groups = [{}, {"lr": numbers["lr"] * 2}]
    for block in blocks_cut_at(cuts):
        optimizer = BlockOptimizer(OptimizerSpec(name, numbers), block, values[block.start : block.stop], groups)
        for gradient, absent in zip(gradients, ABSENT, strict=True):
            optimizer.step(gradient[block.start : block.stop], absent)
    assert torch.equal(values, expected)


# State.


@every
def test_an_optimizer_goes_on_from_a_saved_state_with_the_same_bits(name: str, numbers: dict[str, Any]) -> None:
    def steps(optimizer: BlockOptimizer, absent: Sequence[Sequence[int]]) -> None:
        for k, missing in enumerate(absent):
            optimizer.step(torch.cos(k + torch.arange(3.0)), missing)

    values, spec, block = torch.tensor([1.0, 2.0, 3.0]), OptimizerSpec(name, numbers), block_of(2, 1)
    first = BlockOptimizer(spec, block, values, [{}])
    steps(first, [[1], [1]])  # the second parameter has no state yet
    copy = values.clone()
    second = BlockOptimizer(spec, block, copy, [{}])
    second.load_state(first.state())
    assert_same(first.state(), second.state())
    for optimizer in (first, second):
        steps(optimizer, [[], [0], []])
    assert torch.equal(values, copy)
    assert_same(first.state(), second.state())


def assert_same(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        for a, b in zip(one[name], other[name], strict=True):
            assert torch.equal(a, b) and a.shape == b.shape and a.dtype == b.dtype


def test_state_is_given_by_name_and_segment_and_is_a_copy() -> None:
    optimizer = BlockOptimizer(OptimizerSpec("adam", {"lr": 0.1}), block_of(2, 1), torch.ones(3), [{}])
    assert optimizer.state() == {}
    optimizer.step(torch.tensor([1.0, 2.0, 3.0]), absent=[1])
    state = optimizer.state()
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
    assert state["step"][0].item() == 1.0
    assert_close(state["exp_avg"][0], 0.1, 0.2)
    assert state["exp_avg"][1].shape == (0,)  # not there yet
    state["exp_avg"][0].zero_()
    assert_close(optimizer.state()["exp_avg"][0], 0.1, 0.2)


def test_loading_copies_so_that_the_giver_keeps_its_own() -> None:
    optimizer = one_each(torch.ones(1), "sgd", lr=0.1, momentum=0.5)
    buffer = torch.tensor([1.0])
    optimizer.load_state({"momentum_buffer": [buffer]})
    optimizer.step(torch.ones(1))
    assert buffer.item() == 1.0
    assert_close(optimizer.state()["momentum_buffer"][0], 1.5)


def test_loading_forgets_what_was_there_before() -> None:
    values = torch.ones(1)
    optimizer = one_each(values, "sgd", lr=0.1, momentum=0.5)
    optimizer.step(torch.full((1,), 10.0))
    values.fill_(1.0)
    optimizer.load_state({})
    optimizer.step(torch.ones(1))
    assert_close(values, 0.9)


@pytest.mark.parametrize(
    "state, reason",
    [
        (
            {"momentum": [torch.ones(2), torch.ones(1)]},
            "is momentum, but this optimizer keeps momentum_buffer",
        ),
        ({"momentum_buffer": [torch.ones(2)]}, "is of 1 segments, this block has 2"),
        ({"momentum_buffer": [torch.ones(2), torch.ones(2)]}, "has 2 elements for a segment of 1"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(state: dict[str, list[Tensor]], reason: str) -> None:
    spec = OptimizerSpec("sgd", {"lr": 0.1, "momentum": 0.5})
    optimizer = BlockOptimizer(spec, block_of(2, 1), torch.ones(3), [{}])
    optimizer.step(torch.full((3,), 4.0))
    with pytest.raises(ValueError, match=reason):
        optimizer.load_state(state)
    assert [tensor.tolist() for tensor in optimizer.state()["momentum_buffer"]] == [[4.0, 4.0], [4.0]]


def test_a_state_kept_as_a_python_number_comes_back_as_one() -> None:
    spec = OptimizerSpec(f"{__name__}:Lion", {"lr": 0.1})
    first, second = (BlockOptimizer(spec, block_of(2), torch.ones(2), [{}]) for _ in range(2))
    first.step(torch.ones(2))
    second.load_state(first.state())
    (entry,) = second._optimizer.state.values()
    assert entry["step"] == 1 and type(entry["step"]) is int
    assert entry["lr"] == 0.1 and type(entry["lr"]) is float


# New numbers from a schedule.


def test_new_numbers_count_from_the_next_step() -> None:
    values = torch.tensor([1.0, 1.0])
    optimizer = one_each(values, "sgd", [{}, {"lr": 0.2}], lr=0.1, momentum=0.5)
    optimizer.update_groups([{"lr": 0.3}, {"weight_decay": 0.5}])
    optimizer.step(torch.ones(2), lr_scale=0.5)
    assert_close(values, 0.85, 0.85)  # 1 - 0.15 * 1 and 1 - 0.1 * (1 + 0.5)


def test_betas_may_travel_as_a_list() -> None:
    values = torch.tensor([1.0])
    optimizer = one_each(values, "adam", lr=0.1, betas=[0.5, 0.5])
    optimizer.update_groups([{"betas": [0.9, 0.999]}])
    optimizer.step(torch.tensor([2.0]))
    assert_close(optimizer.state()["exp_avg"][0], 0.2)


def test_the_notes_of_a_scheduler_are_not_settings() -> None:
    parameter = torch.ones(1, requires_grad=True)
    plain = torch.optim.SGD([parameter], lr=0.1, momentum=0.5)
    torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.5, total_steps=10)
    group = {name: value for name, value in plain.param_groups[0].items() if name != "params"}
    assert {"max_lr", "min_lr", "max_momentum", "base_momentum"} <= group.keys()
    optimizer = one_each(torch.ones(1), "sgd", [group])
    optimizer.update_groups([{**group, "lr": 0.2}])


@pytest.mark.parametrize(
    "name, before, after",
    [
        ("adam", {}, {"amsgrad": True}),
        ("sgd", {"momentum": 0.9}, {"nesterov": True}),
        ("rmsprop", {}, {"centered": True}),
        ("sgd", {}, {"maximize": True}),
        ("sgd", {}, {"maximize": 0.5}),
        ("sgd", {}, {"momentum": 0.9}),
        ("sgd", {"momentum": 0.9}, {"momentum": 0.0}),
        ("rmsprop", {}, {"momentum": 0.9}),
        ("sgd", {}, {"weight_decay": math.nan}),
        ("sgd", {}, {"weight_decay": True}),
        ("sgd", {}, {"weight_decay": "much"}),
        ("adam", {}, {"betas": [0.9]}),
        ("adam", {}, {"betas": [0.9, math.inf]}),
    ],
)
def test_what_state_depends_on_cannot_change_and_then_nothing_does(
    name: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    (word,) = after
    values, expected = torch.ones(2), torch.ones(2)
    optimizer = one_each(values, name, [{}, {}], lr=0.1, **before)
    with pytest.raises(ValueError, match=f"parameter group 1: {word} cannot go from"):
        optimizer.update_groups([{"lr": 0.7}, {"lr": 0.7, **after}])
    same = one_each(expected, name, [{}, {}], lr=0.1, **before)
    for each in (optimizer, same):
        each.step(torch.ones(2))
    assert torch.equal(values, expected)


def test_a_group_of_another_block_is_looked_at_too_so_that_all_blocks_agree() -> None:
    optimizer = BlockOptimizer(OptimizerSpec("sgd"), block_of(1), torch.ones(1), [{}, {}])
    with pytest.raises(ValueError, match="parameter group 1: nesterov"):
        optimizer.update_groups([{}, {"nesterov": True}])


def test_the_number_of_groups_cannot_change() -> None:
    optimizer = one_each(torch.ones(1), "sgd")
    with pytest.raises(ValueError, match="there are 2 parameter groups, but the run began with 1"):
        optimizer.update_groups([{}, {}])


# What a reader may see during a step.


@pytest.mark.parametrize(
    "name, numbers, length, single",
    [
        ("sgd", {"momentum": 0.9, "weight_decay": 0.1}, 15, True),
        ("adagrad", {}, 15, True),
        ("adam", {"weight_decay": 0.1}, 15, True),
        ("adamw", {}, 32, True),
        ("adamw", {}, 33, False),  # the last element is decayed, then stepped
        ("adamw", {"weight_decay": 0.0}, 33, False),  # a schedule may bring decay later
        ("adam", {"decoupled_weight_decay": True}, 33, False),
        ("rmsprop", {}, 32, False),
    ],
)
def test_fused_kernels_write_each_element_once(name: str, numbers: dict[str, Any], length: int, single: bool) -> None:
    optimizer = BlockOptimizer(OptimizerSpec(name, numbers), block_of(length), torch.ones(length), [{}])
    assert optimizer.single_pass is single


# Names and settings.


def test_a_spec_travels() -> None:
    spec = OptimizerSpec("adam", {"lr": 0.1, "betas": [0.9, 0.99], "amsgrad": True})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=OptimizerSpec) == spec


def test_a_spec_needs_no_torch() -> None:
    code = "import sys, rainband.protocol.optimizer_spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("wrong, near", [("adagard", "adagrad"), ("AdamW", "adamw"), ("sdg", "sgd")])
def test_an_unknown_optimizer_is_refused_with_the_nearest_name(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"no optimizer named '{wrong}' \(did you mean {near}\?\)"):
        OptimizerSpec(wrong)


@pytest.mark.parametrize("wrong", ["", ":", "torch.optim:", ":SGD"])
def test_half_a_name_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="no optimizer named"):
        OptimizerSpec(wrong)


def test_an_unknown_setting_is_refused_with_the_nearest_name() -> None:
    message = r"SGD has no setting 'momentun' \(did you mean momentum\?\): it has lr, momentum, "
    with pytest.raises(ValueError, match=message):
        one_each(torch.ones(1), "sgd", momentun=0.9)
    with pytest.raises(ValueError, match=message):
        one_each(torch.ones(1), "sgd", [{"momentun": 0.9}])
    with pytest.raises(ValueError, match=message):
        one_each(torch.ones(1), "sgd").update_groups([{"momentun": 0.9}])
    with pytest.raises(ValueError, match=message):
        build(OptimizerSpec("sgd"), [{"params": [torch.ones(1)], "momentun": 0.9}])
    with pytest.raises(ValueError, match=message):
        blockwise_obstacle(torch.optim.SGD, {"momentun": 0.9})


def test_an_impossible_value_is_refused_also_in_a_group() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        one_each(torch.ones(1), "sgd", lr=-1.0)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        one_each(torch.ones(2), "sgd", [{}, {"lr": -1.0}])


@pytest.mark.parametrize(
    "name, reason",
    [
        ("no_such_module:Lion", "cannot be imported"),
        ("torch.optim:Lion", "put Lion into a module that every node can import"),
        ("torch.optim:lr_scheduler", "is not a torch.optim.Optimizer"),
        ("builtins:dict", "is not a torch.optim.Optimizer"),
    ],
)
def test_a_class_that_cannot_be_had_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build(OptimizerSpec(name), [torch.ones(1)])


@every
def test_all_settings_of_a_plain_optimizer_may_come_as_a_group_or_as_a_spec(name: str, numbers: dict[str, Any]) -> None:
    plain = getattr(torch.optim, BUILT_IN[name])([torch.ones(1)], **numbers)
    leave_out = {"params", "foreach", "fused", "capturable", "differentiable"}
    everything = {key: value for key, value in plain.param_groups[0].items() if key not in leave_out}
    results = []
    for groups, given_numbers in (([everything], {}), ([{}], everything), ([{}], numbers)):
        results.append(torch.ones(1))
        one_each(results[-1], name, groups, **given_numbers).step(torch.tensor([2.0]))
    assert results[0] == results[1] == results[2]


# Plain optimizers.


def test_build_gives_a_plain_fused_optimizer_and_leaves_the_given_groups_alone() -> None:
    first, second = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.2}]
    optimizer = build(OptimizerSpec("sgd", {"lr": 0.1}), groups)
    assert groups == [{"params": [first]}, {"params": [second], "lr": 0.2}]
    assert type(optimizer) is torch.optim.SGD
    assert [(group["lr"], group["fused"], group["foreach"]) for group in optimizer.param_groups] == [
        (0.1, True, None),
        (0.2, True, None),
    ]
    first.grad, second.grad = torch.ones(1), torch.ones(1)
    optimizer.step()
    assert_close(torch.cat([first, second]).detach(), 0.9, 0.8)


def test_build_takes_tensors_without_groups_and_optimizers_that_need_a_matrix() -> None:
    parameters = (torch.ones(2, 2) for _ in range(3))
    optimizer = build(OptimizerSpec("torch.optim:Muon", {"lr": 0.1}), parameters)
    assert type(optimizer) is torch.optim.Muon
    assert len(optimizer.param_groups[0]["params"]) == 3


def test_build_does_not_ask_for_a_cpu_kernel_elsewhere() -> None:
    optimizer = build(OptimizerSpec("adam"), [torch.ones(1, device="meta")])
    assert optimizer.param_groups[0]["fused"] is None


# Which optimizers a server can run.


class Lion(torch.optim.Optimizer):
    """Step by the sign of an average: element by element, with a step count that is no tensor."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    average = state.setdefault("average", torch.zeros_like(p))
                    state["step"] = state.get("step", 0) + 1
                    state["lr"] = group["lr"]
                    average.lerp_(p.grad, 1 - group["beta"])
                    p -= group["lr"] * average.sign()


class Scaled(Lion):
    """Step by the gradient over its norm, as LAMB and LARS do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / p.grad.norm()


class Counting(Lion):
    """Keep the number of steps in the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Listing(Lion):
    """Keep a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["history"] = []


class Modal(Lion):
    """Have modes."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Unscaled(Lion):
    """Have no learning rate."""

    def __init__(self, params: Any, speed: float = 0.1) -> None:
        super().__init__(params, speed)


@every
def test_servers_can_run_element_wise_optimizers(name: str, numbers: dict[str, Any]) -> None:
    assert blockwise_obstacle(OptimizerSpec(name, numbers)) is None
    assert blockwise_obstacle(getattr(torch.optim, BUILT_IN[name]), numbers) is None


def test_servers_can_run_a_custom_element_wise_optimizer() -> None:
    assert blockwise_obstacle(Lion) is None
    assert blockwise_obstacle(OptimizerSpec(f"{__name__}:Lion", {"lr": 0.5}), {"beta": 0.5}) is None


@pytest.mark.parametrize(
    "cls, reason",
    [
        (torch.optim.Adafactor, "its state 'row_var' has shape"),
        (torch.optim.Muon, "it fails on a piece of a parameter: Muon only supports 2D"),
        (torch.optim.LBFGS, "its step needs a closure"),
        (torch.optim.SparseAdam, "it fails on a piece of a parameter: .*dense"),
        (Scaled, "depends on other elements"),
        (Counting, "keeps state in its parameter groups"),
        (Listing, "its state 'history' is a list"),
        (Modal, "a mode for training"),
        (Unscaled, "no setting lr"),
    ],
)
def test_servers_cannot_run_the_others_and_say_why(cls: type[torch.optim.Optimizer], reason: str) -> None:
    why = blockwise_obstacle(cls)
    assert why is not None
    assert re.search(reason, why)


def test_a_warm_up_that_begins_at_zero_does_not_hide_what_an_optimizer_does() -> None:
    assert blockwise_obstacle(Scaled, {"lr": 0.0}) is not None


def test_the_trial_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    blockwise_obstacle(torch.optim.Adam)
    assert torch.equal(torch.get_rng_state(), before)
