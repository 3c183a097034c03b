"""Parameters in one memory: still an ordinary module, and every gradient in its place."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rainband.model.flat_parameters import Flat, is_finite
from rainband.protocol.layout import BlockSpec, cut
from rainband.runtimes.training_loop.split.tensors import refuse_wrapped

# ---- modules to try it on ----------------------------------------------------------------------------------


def mlp() -> Any:  # an nn.Sequential; type checkers do not know what its layers have
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def conv_net() -> nn.Module:
    body = [nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.Flatten()]
    return in_channels_last(nn.Sequential(*body, nn.Linear(4 * 4 * 4, 3)))


def in_channels_last(module: nn.Module) -> nn.Module:
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


class Reader(nn.Module):
    """An LSTM over 5 features."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x)[0][:, -1])
        return y


class Tied(nn.Module):
    """One Parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(11, 4)
        self.decoder = nn.Linear(4, 11, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.decoder(self.encoder(x).mean(1))
        return y


SCENES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(8, 5)),
    "conv net in channels_last with BatchNorm": (
        conv_net,
        lambda: torch.randn(8, 3, 6, 6).to(memory_format=torch.channels_last),
    ),
    "lstm": (Reader, lambda: torch.randn(8, 6, 5)),
    "tied embedding": (Tied, lambda: torch.randint(11, (8, 5))),
}


class Holder(nn.Module):
    """A module that has just these parameters: p0, p1, …"""

    def __init__(self, *parameters: Tensor) -> None:
        super().__init__()
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"p{index}", nn.Parameter(parameter, parameter.is_floating_point()))


def compute_gradients(module: nn.Module, x: Tensor) -> None:
    module.zero_grad()
    loss = nn.functional.cross_entropy(module(x), torch.arange(len(x)) % 3)
    loss.backward()  # type: ignore[no-untyped-call]


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def in_flat(flat: Flat) -> list[bool]:
    """For each parameter: does it lie in the vectors' memory?"""
    ranges = [(v.data_ptr(), v.data_ptr() + v.numel() * v.element_size()) for v in flat.vectors]
    return [any(first <= p.data_ptr() < end for first, end in ranges) for p in flat.parameters]


def assemble(flat: Flat, blocks: Sequence[BlockSpec], tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Write all blocks and put them together; `out` is full of NaN before, so what is not written shows."""
    vectors = [torch.full_like(vector, torch.nan) for vector in flat.vectors]
    for block in blocks:
        flat.write(block, tensors, vectors[block.vector][block.start : block.stop])
    return vectors


# ---- an ordinary module ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", SCENES)
def test_training_in_flat_memory_gives_the_same_bits_as_plain_pytorch(scene: str) -> None:
    build, batch = SCENES[scene]
    torch.manual_seed(0)
    plain = build()
    flattened = copy.deepcopy(plain)
    flat = Flat(flattened)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, flattened)]

    for _ in range(4):
        x = batch()
        for module, optimizer in zip((plain, flattened), optimizers, strict=True):
            compute_gradients(module, x)
            optimizer.step()
        flat.check()

    assert same(plain, flattened)
    assert all(in_flat(flat))


@pytest.mark.parametrize("scene", SCENES)
def test_a_gradient_sent_block_by_block_trains_like_sgd(scene: str) -> None:
    """Write the blocks, step on them, copy the result into the views: what a server does, without one."""
    build, batch = SCENES[scene]
    torch.manual_seed(0)
    plain = build()
    flattened = copy.deepcopy(plain)
    flat = Flat(flattened)
    blocks = cut(flat.layout, num_servers=2, block_bytes=128)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)

    for _ in range(3):
        x = batch()
        compute_gradients(plain, x)
        optimizer.step()
        compute_gradients(flattened, x)
        for block in blocks:
            out = torch.empty(block.numel)
            flat.write(block, flat.gradients(), out)
            flat.view(block).sub_(out, alpha=0.5)

    assert same(plain, flattened)


@pytest.mark.parametrize("scene", SCENES)
def test_flattening_changes_no_value_no_object_no_strides_and_no_buffer(scene: str) -> None:
    module = SCENES[scene][0]()
    before = copy.deepcopy(module)
    objects = [(id(p), p.stride(), p.requires_grad) for p in module.parameters()]
    buffers = [b.data_ptr() for b in module.buffers()]

    flat = Flat(module)

    assert same(before, module)
    assert [(id(p), p.stride(), p.requires_grad) for p in module.parameters()] == objects
    assert [b.data_ptr() for b in module.buffers()] == buffers
    assert all(in_flat(flat))


def test_every_parameter_starts_on_a_64_byte_boundary_in_a_storage_of_its_own() -> None:
    flat = Flat(mlp())

    assert [p.data_ptr() % 64 for p in flat.parameters] == [0, 0, 0, 0]
    assert [p.untyped_storage().nbytes() for p in flat.parameters] == [35 * 4, 7 * 4, 21 * 4, 3 * 4]
    assert [p.storage_offset() for p in flat.parameters] == [0, 0, 0, 0]


def test_a_tied_weight_has_one_place() -> None:
    module = Tied()
    flat = Flat(module)

    assert [p.name for p in flat.layout.parameters] == ["encoder.weight"]
    assert module.decoder.weight is module.encoder.weight


def test_a_state_dict_goes_out_and_comes_back_in_place() -> None:
    module, other = mlp(), mlp()
    flat = Flat(module)

    module.load_state_dict(other.state_dict())

    flat.check()
    flat.check_identity()
    assert same(module, other)
    assert flat.vectors[0][:35].tolist() == other.state_dict()["0.weight"].flatten().tolist()


def test_safetensors_saves_all_tensors(tmp_path: Path) -> None:
    module, loaded = mlp(), mlp()
    Flat(module)

    safetensors.torch.save_model(module, str(tmp_path / "model.safetensors"))

    assert len(safetensors.torch.load_file(tmp_path / "model.safetensors")) == 4
    safetensors.torch.load_model(loaded, str(tmp_path / "model.safetensors"))
    assert same(module, loaded)


def test_saving_one_layer_writes_one_layer() -> None:
    def saved_bytes(layer: nn.Module) -> int:
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        return len(file.getvalue())

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(300, 300))
    plain = saved_bytes(module[0])
    Flat(module)
    assert saved_bytes(module[0]) == plain


def test_a_deep_copy_is_independent() -> None:
    module = mlp()
    flat = Flat(module)
    before = [vector.clone() for vector in flat.vectors]

    copied = copy.deepcopy(module)
    for parameter in copied.parameters():
        nn.init.zeros_(parameter)

    assert torch.equal(flat.vectors[0], before[0])
    flat.check()


def test_functional_call_takes_other_values_and_leaves_the_parameters_alone() -> None:
    module = nn.Linear(2, 1, bias=False)
    nn.init.ones_(module.weight)
    flat = Flat(module)

    y = torch.func.functional_call(module, {"weight": torch.tensor([[2.0, 3.0]])}, torch.ones(1, 2))

    assert y.item() == 5
    assert flat.vectors[0][:2].tolist() == [1, 1]


def test_a_compiled_module_sees_what_is_copied_into_a_view() -> None:
    module = nn.Linear(2, 1, bias=False)
    flat = Flat(module)
    compiled = torch.compile(module, backend="eager")
    compiled(torch.ones(1, 2))

    flat.view(cut(flat.layout)[0])[:2] = torch.tensor([2.0, 3.0])
    y = compiled(torch.ones(1, 2))
    y.backward()

    assert y.item() == 5
    assert flat.gradients()[0].tolist() == [[1, 1]]  # type: ignore[union-attr]


def test_compiled_or_not_it_is_the_same_model() -> None:
    compiled = torch.compile(mlp(), backend="eager")
    assert Flat(compiled).layout == Flat(mlp()).layout  # type: ignore[arg-type]


# ---- which parameters, in which groups ---------------------------------------------------------------------


def test_groups_are_numbered_and_their_scalar_settings_kept() -> None:
    module = mlp()
    one, two = [module[0].weight, module[0].bias], [module[2].weight, module[2].bias]
    groups: list[dict[str, Any]] = [{"params": two, "lr": torch.tensor(0.25)}, {"params": one}]

    flat = Flat(module, torch.optim.AdamW(groups, lr=0.5).param_groups)

    assert [p.name for p in flat.layout.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [p.group for p in flat.layout.parameters] == [1, 1, 0, 0]
    assert [group["lr"] for group in flat.layout.groups] == [0.25, 0.5]
    assert flat.layout.groups[0]["betas"] == [0.9, 0.999]
    assert not {"params", "fused", "foreach", "capturable"} & flat.layout.groups[0].keys()


def test_numpy_numbers_become_plain_ones() -> None:
    module = mlp()
    flat = Flat(module, [{"params": module.parameters(), "lr": numpy.float64(0.5)}])
    assert type(flat.layout.groups[0]["lr"]) is float


@pytest.mark.parametrize("value", [len, torch.ones(2), numpy.ones(2), [[1]], {}])
def test_a_setting_that_cannot_be_sent_is_named(value: object) -> None:
    module = mlp()
    with pytest.raises(ValueError, match="group 0 has idea=.*make it a number"):
        Flat(module, [{"params": module.parameters(), "idea": value}])


def test_a_group_may_be_one_tensor_or_pairs_of_name_and_tensor() -> None:
    module = mlp()
    groups = [{"params": module[0].named_parameters()}, {"params": module[2].bias}]
    assert [p.name for p in Flat(module, groups).layout.parameters] == ["0.weight", "0.bias", "2.bias"]


def test_parameters_in_no_group_stay_outside_and_as_they_are() -> None:
    module = mlp()
    outside = module[2].weight.data_ptr()

    flat = Flat(module, [{"params": module[0].parameters()}])

    assert len(flat.parameters) == 2
    assert module[2].weight.data_ptr() == outside


def test_a_frozen_parameter_has_a_place_and_can_be_unfrozen() -> None:
    module = mlp()
    module[0].requires_grad_(False)
    flat = Flat(module)
    assert all(in_flat(flat))

    compute_gradients(module, torch.randn(4, 5))
    assert [g is None for g in flat.gradients()] == [True, True, False, False]

    module[0].requires_grad_(True)
    compute_gradients(module, torch.randn(4, 5))
    assert [g is None for g in flat.gradients()] == [False, False, False, False]


def test_a_parameter_given_twice_is_refused() -> None:
    module = mlp()
    groups = [{"params": module.parameters()}, {"params": [module[2].bias]}]
    with pytest.raises(ValueError, match=r"'2.bias' is given twice, in group 0 and in group 1"):
        Flat(module, groups)


def test_a_parameter_of_another_module_is_refused() -> None:
    with pytest.raises(ValueError, match="group 0 holds a parameter that the module does not have"):
        Flat(mlp(), [{"params": mlp().parameters()}])


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        Flat(nn.ReLU())


def test_each_dtype_has_a_vector_of_its_own() -> None:
    flat = Flat(Holder(torch.ones(2), torch.ones(3).bfloat16(), torch.ones(4)))
    assert [vector.dtype for vector in flat.vectors] == [torch.float32, torch.bfloat16]
    assert [p.vector for p in flat.layout.parameters] == [0, 1, 0]


# ---- what is refused ---------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "'0.weight' has no shape yet: run one batch"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "'weight' has no values .* call module.to_empty"),
    "sparse": (lambda: Holder(torch.eye(3).to_sparse()), "'p0' is sparse .*to_dense"),
    "complex": (lambda: Holder(torch.ones(2, dtype=torch.complex64)), "'p0' is complex .*view_as_real"),
    "integer": (lambda: Holder(torch.ones(2), torch.ones(2).long()), "'p1' is int64, .*register_buffer"),
    "float8": (
        lambda: Holder(torch.ones(2).to(torch.float8_e4m3fn)),
        "'p0' is float8_e4m3fn, .*register_buffer",
    ),
    "expanded": (lambda: Holder(torch.ones(1).expand(5)), "'p0' is a slice or an expansion .*clone"),
    "sliced": (lambda: Holder(torch.ones(4, 4)[:, :2]), "'p0' is a slice or an expansion .*clone"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_flat_is_refused_by_name_with_advice(kind: str) -> None:
    build, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        Flat(build())


def test_the_advice_for_a_slice_works() -> None:
    module = Holder(torch.ones(4, 4)[:, :2])
    for p in module.parameters():
        p.data = p.data.clone(memory_format=torch.contiguous_format)
    assert all(in_flat(Flat(module)))


def test_ties_made_by_sharing_data_are_refused_by_both_names_before_anything_moves() -> None:
    memory = torch.ones(8)
    module = Holder(torch.zeros(3), memory[:5], memory[4:])
    addresses = [p.data_ptr() for p in module.parameters()]

    with pytest.raises(ValueError, match="'p1' and 'p2' are two objects over the same memory"):
        Flat(module)

    assert [p.data_ptr() for p in module.parameters()] == addresses


def test_a_tie_with_a_buffer_is_refused_too() -> None:
    module = Holder(torch.ones(8))
    module.register_buffer("shadow", module.p0.data)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'p0' and 'shadow'"):
        Flat(module)


def test_a_tie_among_parameters_in_no_group_is_nobodys_business() -> None:
    memory = torch.ones(8)
    module = Holder(memory, memory, torch.zeros(2))
    assert len(Flat(module, [{"params": [module.p2]}]).parameters) == 1


def test_a_tie_is_found_behind_a_smaller_neighbour() -> None:
    memory = torch.ones(8)
    module = Holder(memory, memory[1:2], memory[4:6])
    with pytest.raises(ValueError, match="'p0' and 'p2'"):
        Flat(module, [{"params": [module.p2]}])


def test_neighbours_in_one_storage_share_nothing() -> None:
    memory = torch.arange(8.0)
    flat = Flat(Holder(memory[:5], memory[5:]))
    assert [p.tolist() for p in flat.parameters] == [[0, 1, 2, 3, 4], [5, 6, 7]]


# ---- leaving the place -------------------------------------------------------------------------------------


def test_a_parameter_that_moved_is_brought_back_with_its_new_value() -> None:
    module = nn.Linear(2, 1, bias=False)
    flat = Flat(module)

    module.weight.data = torch.tensor([[2.0, 3.0]])
    assert in_flat(flat) == [False]
    flat.check()

    assert in_flat(flat) == [True]
    assert module.weight.tolist() == [[2, 3]]
    assert flat.vectors[0][:2].tolist() == [2, 3]


def test_only_the_parameter_that_moved_is_copied() -> None:
    module = mlp()
    flat = Flat(module)
    versions = [home._version for home in flat._parameter_views]
    module[2].bias.data = torch.ones(3)

    flat.check()

    assert [home._version - before for home, before in zip(flat._parameter_views, versions, strict=True)] == [
        0,
        0,
        0,
        1,
    ]


def test_another_memory_format_is_brought_back_too() -> None:
    module = nn.Conv2d(2, 3, 2)
    before = copy.deepcopy(module)
    flat = Flat(module)

    in_channels_last(module)
    assert in_flat(flat) == [False, True]
    flat.check()

    assert all(in_flat(flat))
    assert same(module, before)


def test_another_dtype_is_refused_and_the_message_says_when_to_call_to() -> None:
    module = mlp()
    flat = Flat(module)
    module.to(torch.float64)
    with pytest.raises(ValueError, match=r"'0.weight' was float32 .* is float64 .* before joining"):
        flat.check()


def test_another_shape_is_refused() -> None:
    module = nn.Linear(2, 1)
    flat = Flat(module)
    module.weight.data = torch.ones(1, 3)
    with pytest.raises(ValueError, match=r"'weight' was .*\(1, 2\) .* is .*\(1, 3\)"):
        flat.check()


def test_if_one_parameter_is_refused_none_is_brought_back() -> None:
    module = nn.Linear(2, 1)
    flat = Flat(module)
    module.weight.data, module.bias.data = torch.ones(1, 2), torch.ones(1).double()
    with pytest.raises(ValueError, match="'bias'"):
        flat.check()
    assert in_flat(flat) == [False, False]


def test_a_to_that_changes_nothing_is_fine() -> None:
    module = mlp()
    flat = Flat(module)
    module.to(torch.float32).to("cpu")
    assert all(in_flat(flat))


def test_replaced_parameter_objects_are_noticed() -> None:
    module = mlp()
    flat = Flat(module)
    flat.check_identity()

    module.load_state_dict(mlp().state_dict(), assign=True)

    flat.check()  # the old objects are where they were
    with pytest.raises(ValueError, match=r"0.weight, 0.bias, 2.weight and 1 more.*without assign=True"):
        flat.check_identity()


def test_release_gives_private_memory_and_frees_the_vectors() -> None:
    module = conv_net()
    before = copy.deepcopy(module)
    strides = [p.stride() for p in module.parameters()]
    flat = Flat(module)
    ranges = [(v.data_ptr(), v.data_ptr() + 4 * v.numel()) for v in flat.vectors]
    memory = StorageWeakRef(flat.vectors[0].untyped_storage())  # type: ignore[no-untyped-call]
    assert not memory.expired()  # type: ignore[no-untyped-call]

    flat.release()

    assert same(before, module)
    assert [p.stride() for p in module.parameters()] == strides
    assert not any(first <= p.data_ptr() < end for p in module.parameters() for first, end in ranges)
    assert memory.expired()  # type: ignore[no-untyped-call]
    with pytest.raises(AssertionError, match="released"):
        flat.check()


def test_release_leaves_what_has_moved_where_it_is() -> None:
    module = nn.Linear(2, 1)
    flat = Flat(module)
    moved = torch.ones(1, 2)
    module.weight.data = moved
    flat.release()
    assert module.weight.data_ptr() == moved.data_ptr()


# ---- gradients ---------------------------------------------------------------------------------------------


def test_gradients_are_the_ones_of_autograd_not_copies() -> None:
    module = mlp()
    flat = Flat(module)
    compute_gradients(module, torch.randn(4, 5))
    assert all(g is p.grad for g, p in zip(flat.gradients(), module.parameters(), strict=True))


def test_an_absent_gradient_is_absent_and_not_zero() -> None:
    module = mlp()
    flat = Flat(module)
    module[2](torch.ones(1, 7)).sum().backward()
    assert [g is None for g in flat.gradients()] == [True, True, False, False]
    module.zero_grad(set_to_none=False)
    assert [g is None for g in flat.gradients()] == [True, True, False, False]


def test_a_sparse_gradient_becomes_dense_and_says_so() -> None:
    module = nn.Embedding(3, 2, sparse=True)
    flat = Flat(module)
    module(torch.tensor([1, 1])).sum().backward()
    with pytest.warns(UserWarning, match="sparse gradient"):
        (gradient,) = flat.gradients()
    assert gradient is not None and gradient.tolist() == [[0, 0], [2, 2], [0, 0]]


def test_absent_gradients_and_gaps_are_written_as_zero() -> None:
    flat = Flat(Holder(torch.ones(2), torch.ones(3), torch.ones(1)))
    gradients = [torch.tensor([1.0, 2.0]), None, torch.tensor([3.0])]

    (vector,) = assemble(flat, cut(flat.layout), gradients)

    assert vector.tolist() == [1, 2] + [0] * 14 + [0] * 16 + [3] + [0] * 15


def test_what_has_no_gradient_is_left_out_of_a_shorter_memory() -> None:
    flat = Flat(Holder(torch.ones(2), torch.ones(3), torch.ones(1)))
    gradients = [torch.tensor([1.0, 2.0]), None, torch.tensor([3.0])]
    (block,) = cut(flat.layout)
    assert flat.absent(block, gradients) == (1,) and block.numel_without((1,)) == 3

    flat.write(block, gradients, out := torch.zeros(3))
    flat.write(block, [None, None, None], torch.zeros(block.numel_without((0, 1, 2))))

    assert out.tolist() == [1, 2, 3]
    with pytest.raises(AssertionError, match="the values"):
        flat.write(block, gradients, torch.zeros(4))


def test_a_gradient_with_other_strides_is_brought_into_the_order_of_the_parameter() -> None:
    transposed = torch.zeros(3, 2).t()  # 2 × 3, its columns are contiguous
    flat = Flat(Holder(transposed))
    (vector,) = assemble(flat, cut(flat.layout), [torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])])
    assert flat.layout.parameters[0].order == (1, 0)
    assert vector[:6].tolist() == [1, 4, 2, 5, 3, 6]


def test_a_gradient_may_be_a_slice_of_something_bigger() -> None:
    flat = Flat(Holder(torch.zeros(2, 2)))
    (vector,) = assemble(flat, cut(flat.layout), [torch.arange(6.0).view(3, 2)[1:]])
    assert vector[:4].tolist() == [2, 3, 4, 5]


def test_dimensions_of_length_one_do_not_make_another_model() -> None:
    """Their strides say nothing about memory, and differ between ways to make the same tensor."""
    one = torch.zeros(2, 1, 3).as_strided((3, 1, 2), (1, 3, 3))
    other = torch.zeros(2, 1, 3).as_strided((3, 1, 2), (1, 2, 3))
    assert Flat(Holder(one)).layout.digest() == Flat(Holder(other)).layout.digest()


def test_a_gradient_that_has_a_graph_is_written_without_it() -> None:
    flat = Flat(Holder(torch.ones(2), torch.ones(3)))
    loss = sum(((p**2).sum() for p in flat.parameters), start=torch.zeros(()))
    gradients = torch.autograd.grad(loss, flat.parameters, create_graph=True)
    assert all(gradient.requires_grad for gradient in gradients)

    (vector,) = assemble(flat, cut(flat.layout), gradients)

    assert not vector.requires_grad
    assert vector.sum() == 10


def test_a_float32_tensor_is_rounded_into_a_bfloat16_block() -> None:
    flat = Flat(Holder(torch.ones(2).bfloat16(), torch.ones(1).bfloat16()))
    (vector,) = assemble(flat, cut(flat.layout), [torch.tensor([1.001, 2.0]), torch.tensor([3.0])])
    assert vector.dtype == torch.bfloat16
    assert vector[[0, 1, 32]].tolist() == [1, 2, 3]


def test_a_tensor_of_the_wrong_shape_is_our_own_mistake() -> None:
    flat = Flat(Holder(torch.ones(2, 3)))
    (block,) = cut(flat.layout)
    with pytest.raises(AssertionError):
        flat.write(block, [torch.ones(3, 2)], torch.empty(16))
    with pytest.raises(AssertionError):
        flat.write(block, [torch.ones(2, 3)], torch.empty(6))


def test_a_local_step_moves_parameters_that_have_a_gradient_and_no_other() -> None:
    module = Holder(torch.ones(2), torch.ones(1))
    flat = Flat(module)
    flat.add_([torch.tensor([1.0, 2.0]), None], alpha=-0.5)
    assert [p.tolist() for p in module.parameters()] == [[0.5, 0.0], [1.0]]
    flat.add_([None, None], alpha=-0.5)
    assert [p.tolist() for p in module.parameters()] == [[0.5, 0.0], [1.0]]


def test_a_local_step_between_forward_and_backward_is_noticed_by_autograd() -> None:
    module = Holder(torch.ones(2))
    flat = Flat(module)
    loss = (flat.parameters[0] ** 2).sum()
    flat.add_([torch.ones(2)], alpha=1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


# ---- laws --------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def in_order(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised dense tensor whose dimensions lie in memory in some order."""
    order = draw(st.permutations(range(len(shape))))
    inverse = [order.index(dimension) for dimension in range(len(shape))]
    return torch.zeros([shape[dimension] for dimension in order], dtype=dtype).permute(inverse)


@st.composite
def models(draw: st.DrawFn) -> tuple[Flat, list[Tensor | None]]:
    """Parameters of any shape, dtype and memory order, and for each a gradient of any strides, or none."""
    shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), max_size=4).map(tuple)
    parameters: list[Tensor] = []
    gradients: list[Tensor | None] = []
    next_number = 1
    for shape, dtype in draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=6)):
        parameters.append(in_order(draw, shape, dtype))
        gradient: Tensor = in_order(draw, shape, dtype)
        if len(shape) > 0 and draw(st.booleans()):  # every second column of a wider tensor: not dense
            gradient = in_order(draw, (*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]
        numbers = torch.arange(next_number, next_number + gradient.numel()) % 251  # exact in every dtype
        gradient.copy_(numbers.view(shape))
        next_number += gradient.numel()
        gradients.append(gradient if draw(st.integers(0, 3)) else None)
    return Flat(Holder(*parameters)), gradients


def expected(flat: Flat, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients one after the other, each in the memory of a tensor with the parameter's strides."""
    vectors = [torch.zeros_like(vector) for vector in flat.vectors]
    for spec, parameter, gradient in zip(flat.layout.parameters, flat.parameters, gradients, strict=True):
        if gradient is not None:
            slot = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
            memory = slot.copy_(gradient).as_strided((spec.numel,), (1,))
            vectors[spec.vector][spec.start : spec.start + spec.numel] = memory
    return vectors


@settings(deadline=None)
@given(models(), st.integers(1, 4), st.sampled_from([1, 64, 200, 1000, 1 << 20]))
def test_however_it_is_cut_the_blocks_are_the_gradients_one_after_the_other(
    model: tuple[Flat, list[Tensor | None]], num_servers: int, block_bytes: int
) -> None:
    flat, gradients = model
    blocks = cut(flat.layout, num_servers, block_bytes)
    assert all(map(torch.equal, assemble(flat, blocks, gradients), expected(flat, gradients)))


@settings(deadline=None)
@given(models(), st.sampled_from([64, 200, 1 << 20]))
def test_what_is_written_and_copied_into_the_views_becomes_the_parameters(
    model: tuple[Flat, list[Tensor | None]], block_bytes: int
) -> None:
    flat, gradients = model
    strides = [p.stride() for p in flat.parameters]
    for block in cut(flat.layout, block_bytes=block_bytes):
        out = torch.empty(block.numel, dtype=flat.vectors[block.vector].dtype)
        flat.write(block, gradients, out)
        flat.view(block).copy_(out)

    for parameter, gradient in zip(flat.parameters, gradients, strict=True):
        assert torch.equal(parameter, torch.zeros_like(parameter) if gradient is None else gradient)
    assert [p.stride() for p in flat.parameters] == strides


def test_one_piece_costs_one_copy() -> None:
    """A block inside one big parameter is copied straight from the gradient, with nothing in between."""
    flat = Flat(Holder(torch.zeros(64, 64)))
    block = cut(flat.layout, block_bytes=4096)[1]
    gradient, out = torch.arange(4096.0).view(64, 64), torch.empty(1024)
    flat.write(block, [gradient], out)  # the first time it is worked out where the pieces lie

    with torch.profiler.profile() as profile:
        flat.write(block, [gradient], out)

    names = [event.key for event in profile.key_averages() if event.key.startswith("aten::")]
    assert sorted(names) == ["aten::as_strided", "aten::copy_"]
    assert out.tolist() == list(range(1024, 2048))


# ---- finite ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_is_found_wherever_it_is(bad: float, dtype: torch.dtype) -> None:
    for place in (0, 500, 999):
        tensor = torch.ones(1000, dtype=dtype)
        assert is_finite([None, torch.ones(3), tensor])
        tensor[place] = bad
        assert not is_finite([None, torch.ones(3), tensor])


def test_infinities_that_cancel_are_found() -> None:
    assert not is_finite([torch.tensor([torch.inf, -torch.inf])])
    assert not is_finite([torch.tensor([torch.inf]), torch.tensor([-torch.inf])])


def test_a_sum_that_overflows_is_finite_all_the_same() -> None:
    assert is_finite([torch.full((4,), 3e38)])
    assert is_finite([torch.full((4,), 60000.0, dtype=torch.float16), torch.full((2,), 3e38)])


def test_nothing_is_finite() -> None:
    assert is_finite([])
    assert is_finite([None, torch.ones(0)])


def test_looking_at_a_gradient_that_has_a_graph_is_fine() -> None:
    assert is_finite([torch.ones(2, requires_grad=True) * 2])


def test_a_layer_that_expects_statistics_of_all_workers_is_refused_by_name() -> None:
    """Training alone it is a BatchNorm, so nothing would show that it is never synchronized."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)))
    with pytest.raises(
        ValueError, match="^the layer 1 is a SyncBatchNorm, .* use BatchNorm1d, BatchNorm2d or BatchNorm3d"
    ):
        Flat(model)
    with pytest.raises(ValueError, match="^the model is a SyncBatchNorm"):
        Flat(nn.SyncBatchNorm(6))
    refuse_wrapped(model)  # whose workers share each batch, and exchange statistics
    Flat(model)
    Flat(conv_net())
    refuse_wrapped(conv_net())
