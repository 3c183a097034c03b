"""The levels of torch's operations, from the shapes of their tensors.

Operations without an entry follow the general rule: with fewer results than values they reduce them in trees, otherwise
they do one operation for each result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from rainband.analysis.work import NOTHING, Levels, each, in_turn, normalized, products, softmax, summed, together

Tensors: TypeAlias = Sequence[Tensor]
Kind: TypeAlias = Callable[[Sequence[Any], Tensors], Levels]

# Data is moved or made, and nothing is computed.
MOVES = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like"),
        *("new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full", "fill_", "zero_"),
        *("arange", "scalar_tensor", "clone", "copy_", "_to_copy", "contiguous", "cat", "stack"),
        *("index_select", "gather", "index", "select_backward", "slice_backward", "constant_pad_nd"),
        *("_local_scalar_dense", "lift_fresh", "embedding", "resize_", "set_", "as_strided_", "randperm"),
        *("expand_copy", "repeat", "roll", "flip"),
    )
)


def _matrices(first: int, out_bias: bool = False) -> Kind:
    """Return the rule for a product of `args[first]` and the matrix after it; `out_bias`: something is added."""

    def levels(args: Sequence[Any], results: Tensors) -> Levels:
        number = results[0].numel()
        inner = args[first].shape[-1]
        return in_turn(products(number * inner, number), each(number) if out_bias else NOTHING)

    return levels


def _products_of_convolution(given: Tensor, weight: Tensor, answers: int, transposed: bool) -> int:
    return (given.numel() if transposed else answers) * (weight.numel() // max(1, weight.shape[0]))


def _convolution(args: Sequence[Any], results: Tensors) -> Levels:
    given, weight, bias, *_ = args
    answers = results[0].numel()
    number = _products_of_convolution(given, weight, answers, bool(args[6]))
    return in_turn(products(number, answers), each(answers) if bias is not None else NOTHING)


def _convolution_backward(args: Sequence[Any], results: Tensors) -> Levels:
    gradient, given, weight = args[:3]
    number = _products_of_convolution(given, weight, gradient.numel(), bool(args[7]))
    of_given, of_weight, of_bias = args[10]  # which gradients are wanted
    return together(
        [
            products(number, given.numel()) if of_given else NOTHING,
            products(number, weight.numel()) if of_weight else NOTHING,
            summed(gradient.numel(), gradient.shape[1]) if of_bias else NOTHING,
        ]
    )


def _softmax(args: Sequence[Any], results: Tensors) -> Levels:
    number = results[0].numel()
    return softmax(number, number // max(1, args[0].shape[args[1]]))


def _softmax_backward(args: Sequence[Any], results: Tensors) -> Levels:
    number = results[0].numel()
    return in_turn(each(number), summed(number, number // max(1, args[0].shape[args[2]])), each(number, 2))


def _normalization(args: Sequence[Any], results: Tensors) -> Levels:
    number = results[0].numel()
    return normalized(number, min(number, max(1, results[1].numel())))


def _normalization_backward(args: Sequence[Any], results: Tensors) -> Levels:
    number, groups = args[0].numel(), next((t.numel() for t in reversed(results)), 1)
    sums = summed(number, min(number, max(1, groups)))
    return in_turn(each(number), together([sums, sums]), each(number, 3))


def _attention(args: Sequence[Any], results: Tensors) -> Levels:
    query, key = args[:2]
    rows = math.prod(query.shape[:-1])
    scores = rows * key.shape[-2]
    return in_turn(
        products(scores * query.shape[-1], scores),
        softmax(scores, rows),
        products(scores * query.shape[-1], rows * query.shape[-1]),
    )


def _attention_backward(args: Sequence[Any], results: Tensors) -> Levels:
    _, query, key = args[:3]
    rows, width = math.prod(query.shape[:-1]), query.shape[-1]
    scores = rows * key.shape[-2]
    back = products(scores * width, rows * width)
    return in_turn(
        together([products(scores * width, scores)] * 2),
        in_turn(each(scores), summed(scores, rows), each(scores, 2)),
        together([back, back, back]),
    )


def _max_pool(args: Sequence[Any], results: Tensors) -> Levels:
    sizes = list(args[1])
    window = math.prod(sizes if len(sizes) > 1 else sizes * (results[0].dim() - 2))
    return summed(results[0].numel() * window, results[0].numel())


def _embedding_backward(args: Sequence[Any], results: Tensors) -> Levels:
    return summed(args[0].numel(), args[0].shape[-1])  # the same row may be meant each time


def _squares(args: Sequence[Any], results: Tensors) -> Levels:
    number = args[0].numel()
    return in_turn(each(number, 2), summed(number, results[0].numel()))


KINDS: dict[str, Kind] = {
    "mm": _matrices(0),
    "bmm": _matrices(0),
    "mv": _matrices(0),
    "dot": lambda args, results: products(args[0].numel(), 1),
    "addmm": _matrices(1, out_bias=True),
    "baddbmm": _matrices(1, out_bias=True),
    "addbmm": _matrices(1, out_bias=True),
    "addmv": _matrices(1, out_bias=True),
    "_addmm_activation": _matrices(1, out_bias=True),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "native_batch_norm": _normalization,
    "_native_batch_norm_legit": _normalization,
    "native_layer_norm": _normalization,
    "native_group_norm": _normalization,
    "native_batch_norm_backward": _normalization_backward,
    "native_layer_norm_backward": _normalization_backward,
    "native_group_norm_backward": _normalization_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "max_pool2d_with_indices": _max_pool,
    "avg_pool2d": _max_pool,
    "embedding_dense_backward": _embedding_backward,
    "mse_loss": _squares,
    "nll_loss_forward": lambda args, results: summed(args[1].numel(), results[0].numel()),
    "nll_loss_backward": lambda args, results: each(args[2].numel()),
}


def levels_of(name: str, args: Sequence[Any], read: Tensors, results: Tensors) -> Levels:
    """Return the levels of an operation of torch; `read`: all tensors among its arguments."""
    if name in MOVES or not results:
        return NOTHING
    if (kind := KINDS.get(name)) is not None:
        return kind(args, results)
    if not read:
        return NOTHING  # random numbers, for example
    values, answers = max(tensor.numel() for tensor in read), max(tensor.numel() for tensor in results)
    return summed(values, answers) if values > answers else each(answers)
