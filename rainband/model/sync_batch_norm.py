"""SyncBatchNorm for workers that share each batch: the statistics, and so the gradients, are those of the whole batch.

torch's own layer exchanges statistics with torch.distributed, on GPUs. Here the workers of a round exchange them, once
in the forward pass of each layer, and once in its backward pass:

    forward     m = sum of n_j m_j / n,  q = sum of n_j q_j / n,  var = q - m^2     of n_j elements a channel, n in all
    backward    s = sum of c_j sum(dy) / c n,  t = sum of c_j sum(dy xhat) / c n    dx = w (dy - s - t xhat) / std

Worker j has the mean m_j of its elements and the mean q_j of their squares. Its gradients count with the weight c_j in
the mean over the workers, so it gets the others' gradients in units of its own weight c.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class StatisticsGroup(Protocol):
    """The workers that share a batch, seen from one of them. All of them exchange the same, in the same order."""

    @property
    def shares(self) -> bool:
        """Return True while this worker computes a part of a batch, and others the rest."""

    @property
    def counts(self) -> bool:
        """Return False if the samples of this worker are in another worker's part, too."""

    @property
    def weight(self) -> float:
        """Return the weight of this worker's gradients in the mean over the workers."""

    def mean(self, numbers: Sequence[float], weight: float) -> tuple[Sequence[float], float] | None:
        """Return the mean of numbers over the workers, and their weight; None: this one does not take part any more."""


_groups: WeakKeyDictionary[nn.Module, StatisticsGroup] = WeakKeyDictionary()  # by layer: copies of it have none


class SharedBatchNorm(nn.SyncBatchNorm):
    """A SyncBatchNorm whose statistics workers exchange in their rounds; without a group, one process alone."""

    def forward(self, input: Tensor) -> Tensor:
        group = _groups.get(self)
        if group is None or not self.training or not group.shares:
            return super().forward(input)
        self._check_input_dim(input)
        if self.num_batches_tracked is not None and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        with torch.no_grad():
            mean, var, count = _statistics(input, group)
            self._track(mean, var, count)
        scale = torch.rsqrt(var + self.eps)
        y: Tensor = _Normalize.apply(input, self.weight, self.bias, mean, scale, count, group)  # type: ignore[no-untyped-call]
        return y

    def _track(self, mean: Tensor, var: Tensor, count: float) -> None:
        """Update the running statistics, as torch does."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        momentum = self.momentum
        if momentum is None:
            assert self.num_batches_tracked is not None
            momentum = 1.0 / float(self.num_batches_tracked)
        unbiased = var * (count / max(1.0, count - 1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def share_statistics(module: nn.Module) -> None:
    """Let the SyncBatchNorm layers of a model exchange statistics, once they have a group."""
    for layer in module.modules():
        if type(layer) is nn.SyncBatchNorm:
            layer.__class__ = SharedBatchNorm


def set_group(module: nn.Module, group: StatisticsGroup) -> bool:
    """Give these layers the workers that exchange their statistics; return True if there are any."""
    layers = [layer for layer in module.modules() if isinstance(layer, SharedBatchNorm)]
    for layer in layers:
        _groups[layer] = group
    return bool(layers)


def has_shared_statistics(module: nn.Module) -> bool:
    """Return True if workers exchange statistics of layers: all of them must compute each batch."""
    return any(layer in _groups for layer in module.modules())


def refuse_sync_batch_norm(module: nn.Module) -> None:
    """Raise ValueError if a layer expects statistics of all workers: it would silently use those of its own worker."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and not isinstance(layer, SharedBatchNorm):
            what = f"the layer {name}" if name else "the model"
            raise ValueError(
                f"{what} is a SyncBatchNorm, whose statistics only workers that share each batch exchange: choose sync "
                "(the default) or all_reduce in processes or on Ray, or use BatchNorm1d, BatchNorm2d or BatchNorm3d."
            )


def _statistics(x: Tensor, group: StatisticsGroup) -> tuple[Tensor, Tensor, float]:
    """Return mean and variance of each channel over all workers, and the number of elements of a channel."""
    count = float(x.numel() / x.shape[1]) if group.counts else 0.0
    own_var, own_mean = torch.var_mean(x.double(), dim=_all_but_channels(x), correction=0)
    numbers = torch.cat([own_mean, own_var + own_mean * own_mean])
    found = group.mean(numbers.tolist(), count)
    if found is None or not found[1]:
        return own_mean, own_var, float(x.numel() / x.shape[1])
    mean, squares = torch.tensor(found[0], dtype=torch.float64, device=x.device).chunk(2)
    return mean, (squares - mean * mean).clamp_(min=0), found[1]


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


class _Normalize(torch.autograd.Function):
    """Normalize with given statistics, which depend on the inputs of all workers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        scale: Tensor,
        count: float,
        group: StatisticsGroup,
    ) -> Tensor:
        shape = [1, -1] + [1] * (x.dim() - 2)
        dtype = torch.promote_types(x.dtype, torch.float32)  # half precision is computed in single precision
        normal = (x.to(dtype) - mean.to(dtype).view(shape)) * scale.to(dtype).view(shape)
        ctx.save_for_backward(normal, weight, scale)
        ctx.count, ctx.group, ctx.shape, ctx.has_bias = count, group, shape, bias is not None
        y = normal.clone() if weight is None else normal * weight.to(dtype).view(shape)
        return (y if bias is None else y.add_(bias.to(dtype).view(shape))).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normal, weight, scale = ctx.saved_tensors
        group, dtype = cast("StatisticsGroup", ctx.group), normal.dtype
        dy = gradient.to(dtype)
        dims = _all_but_channels(normal)
        sums = torch.cat([dy.double().sum(dims), (dy * normal).double().sum(dims)])
        of_bias, of_weight = sums.chunk(2)
        own = group.weight if group.counts else 0.0
        found = group.mean((sums * own).tolist() if own else [0.0] * len(sums), 1.0)
        if found is not None and own:
            sums = torch.tensor(found[0], dtype=torch.float64, device=normal.device) * (found[1] / own)
        dx = None
        if ctx.needs_input_grad[0]:
            s, t, a = [v.to(dtype).view(ctx.shape) for v in ((sums / ctx.count).chunk(2) + (scale,))]
            dx = (dy - s - t * normal) * (a if weight is None else a * weight.to(dtype).view(ctx.shape))
            dx = dx.to(gradient.dtype)
        return (
            dx,
            None if weight is None else of_weight.to(weight.dtype),
            None if not ctx.has_bias else of_bias.to(dtype if weight is None else weight.dtype),
            *(None, None, None, None),
        )
