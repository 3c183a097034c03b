"""Layers that torch does not have."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

Pair = int | tuple[int, int]


class GhostBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalization with the statistics of groups of samples, whatever the batch size (Hoffer et al. 2017).

    Inputs have any number of dimensions after (samples, channels). A group of a single sample joins the one before it.
    The running statistics, used for evaluation, follow every group as BatchNorm's follow every batch.
    """

    def __init__(self, num_features: int, group: int = 32, **settings: Any) -> None:
        if group < 2:
            raise ValueError(f"group={group}: statistics need at least 2 samples.")
        super().__init__(num_features, **settings)
        self.group = group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"GhostBatchNorm requires (samples, channels, ...), not an input of {input.dim()} dimensions."
            )

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or len(input) <= self.group:
            return super().forward(input)
        sizes = [self.group] * (len(input) // self.group)
        rest = len(input) % self.group
        sizes = [*sizes, rest] if rest > 1 else [*sizes[:-1], sizes[-1] + rest]
        return torch.cat([super(GhostBatchNorm, self).forward(part) for part in torch.split(input, sizes)])

    def extra_repr(self) -> str:
        return f"{self.num_features}, group={self.group}, eps={self.eps}, momentum={self.momentum}"


class LocallyConnected2d(nn.Module):
    """A convolution without weight sharing: every output position has its own weights (Le et al. 2012).

        y[n, o, i, j] = bias[o, i, j] + sum over c, a, b of  weight[i, j, o, a, b, c] * x[n, c, i s + a, j s + b]

    `weight` is (positions, out channels, kernel height * kernel width * in channels), row by row. Costs what a
    convolution costs in arithmetic, and as many times more memory as there are places: 28 x 28 places of 5 x 5 x 8 to 8
    channels are 1.25 M weights.
    """

    _rainband_whole = True  # one node of the traced graph

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        input_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        bias: bool = True,
    ) -> None:
        """`input_size`: height and width of the images, which determine the number of positions."""
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.input_size = _pair(kernel_size), _pair(input_size)
        self.stride, self.padding = _pair(stride), _pair(padding)
        self.output_size = self._output_size()
        height, width = self.kernel_size
        positions = math.prod(self.output_size)
        self.weight = nn.Parameter(torch.empty(positions, out_channels, height * width * in_channels))
        self.bias = nn.Parameter(torch.empty(out_channels, *self.output_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Conv2d: uniform, by the number of inputs of a position."""
        bound = 1 / math.sqrt(self.weight.shape[2])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def _output_size(self) -> tuple[int, int]:
        ends = zip(self.input_size, self.padding, self.kernel_size, self.stride, strict=True)
        height, width = [(size + 2 * pad - kernel) // step + 1 for size, pad, kernel, step in ends]
        if min(height, width) < 1:
            raise ValueError(
                f"a kernel of {self.kernel_size} does not fit into an image of {self.input_size} padded by "
                f"{self.padding}: use a smaller kernel, or more padding."
            )
        return height, width

    def forward(self, x: Tensor) -> Tensor:
        wanted = (self.in_channels, *self.input_size)
        if x.dim() != 4 or tuple(x.shape[1:]) != wanted:
            raise ValueError(
                f"a batch of shape {tuple(x.shape)}: this layer requires (N, {', '.join(map(str, wanted))}). Set "
                "in_channels and input_size to those of your images."
            )
        if self.padding != (0, 0):
            top, left = self.padding
            x = functional.pad(x, (left, left, top, top))
        y: Tensor = _EveryPosition.apply(x, self.weight, self.kernel_size, self.stride)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, input_size={self.input_size}, "
            f"stride={self.stride}, padding={self.padding}, bias={self.bias is not None}"
        )


class _EveryPosition(torch.autograd.Function):
    """One matrix product per position, all in one call.

    Inside, the batch is the last dimension: then a window is a few long stretches of memory, and gathering windows, and
    adding their gradients up again, runs at the speed of copying.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
        batch, channels = x.shape[:2]
        image = x.permute(2, 3, 1, 0).contiguous()  # height, width, channels, batch
        windows = image.unfold(0, kernel[0], stride[0]).unfold(1, kernel[1], stride[1])
        rows, columns = windows.shape[:2]
        columns_of = windows.permute(0, 1, 4, 5, 2, 3).reshape(rows * columns, math.prod(kernel) * channels, batch)
        ctx.save_for_backward(columns_of, weight)
        ctx.shapes = (x.shape, kernel, stride, rows, columns)
        return torch.bmm(weight, columns_of).view(rows, columns, -1, batch).permute(3, 2, 0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        columns_of, weight = ctx.saved_tensors
        (batch, channels, height, width), kernel, stride, rows, columns = ctx.shapes
        gradient = gradient.permute(2, 3, 1, 0).reshape(rows * columns, -1, batch)
        of_weight = torch.bmm(gradient, columns_of.transpose(1, 2)) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None, None
        windows = torch.bmm(weight.transpose(1, 2), gradient).view(rows, columns, *kernel, channels, batch)
        image = gradient.new_zeros(height, width, channels, batch)
        for a in range(kernel[0]):
            for b in range(kernel[1]):
                below, right = a + stride[0] * (rows - 1) + 1, b + stride[1] * (columns - 1) + 1
                image[a : below : stride[0], b : right : stride[1]] += windows[:, :, a, b]
        return image.permute(3, 2, 0, 1), of_weight, None, None


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
