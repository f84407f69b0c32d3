"""Batch norms whose statistics do not depend on the number of workers.

torch's batch norm normalizes by a worker's share of the batch. On GPUs nn.SyncBatchNorm takes the
whole batch; here is the same for CPUs, and ghost batch normalization over fixed groups (Hoffer et
al., 2017), for which no worker waits.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from expt.errors import ConfigError
from expt.features import at_least_single

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

Gather = Callable[[Tensor], Tensor]
"""From a worker's values [N] to those of all workers, by rank [world_size, N]; a collective."""


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether `module` has a batch norm, of whatever class."""
    return any(map(is_batch_norm, module.modules()))


def is_batch_norm(layer: nn.Module) -> bool:
    """Return whether `layer` is a batch norm, of whatever class."""
    return isinstance(layer, (*KINDS, nn.SyncBatchNorm))


def is_known(layer: nn.Module) -> bool:
    """Return whether `layer` is a batch norm of no custom class.

    Its buffers are statistics, which no forward pass of training reads.
    """
    return type(layer) in (*KINDS, nn.SyncBatchNorm, GroupedBatchNorm, SynchronisedBatchNorm)


def synchronise(module: nn.Module, gather: Gather) -> None:
    """Have the batch norms inside `module` normalize by the statistics of all workers' images."""
    for layer in of_torch(module):
        layer.__class__ = SynchronisedBatchNorm
        layer.gather = gather


def part_from_workers(module: nn.Module) -> None:
    """Have batch norms over all workers' images normalize by this worker's only."""
    for layer in module.modules():
        if isinstance(layer, SynchronisedBatchNorm):
            layer.gather = lambda values: values[None]
        elif type(layer) is nn.SyncBatchNorm:  # a custom one may do more
            _group(layer, sys.maxsize)


def group(module: nn.Module, size: int) -> None:
    """Have the batch norms inside `module` normalize each `size` images by themselves."""
    for layer in of_torch(module):
        _group(layer, size)


def _group(layer: Any, size: int) -> None:
    layer.__class__ = GroupedBatchNorm
    layer.group_size = size


def averaging_of_statistics(module: nn.Module, gather: Gather) -> Callable[[], None]:
    """Return a function that ends a step by averaging running statistics over all workers."""
    both = ((layer.running_mean, layer.running_var) for layer in of_torch(module))
    tracked: list[Tensor] = [one for one in itertools.chain(*both) if one is not None]

    def average() -> None:
        means = gather(torch.cat(tracked)).mean(0)
        for buffer, mean in zip(tracked, means.split([*map(len, tracked)]), strict=True):
            buffer.copy_(mean)

    return average if tracked else lambda: None


class _BatchNorm(nn.BatchNorm2d):
    """A batch norm for inputs of any number of dimensions, with its own statistics in training."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [B, C, ...], and update the running statistics as torch's own layer does."""
        if not self.training:
            statistics, affine = (self.running_mean, self.running_var), (self.weight, self.bias)
            by_batch = self.running_mean is None
            return functional.batch_norm(input, *statistics, *affine, by_batch, 0.0, self.eps)
        output, mean, variance = self.normalise(input)
        tracked = self.num_batches_tracked
        if self.running_mean is None or self.running_var is None or tracked is None:
            return output
        with torch.no_grad():
            tracked.add_(1)
            momentum = 1 / int(tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance, momentum)
        return output

    def normalise(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output in training, and the mean [C] and the unbiased variance [C]."""
        raise NotImplementedError


class GroupedBatchNorm(_BatchNorm):
    """A batch norm over groups of `group_size` images; some groups are one image smaller."""

    group_size: int

    def normalise(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize each group, and average their statistics."""
        parts = input.tensor_split(-(-len(input) // self.group_size))
        like = at_least_single(input[:0]) if self.running_mean is None else self.running_mean
        means, variances = like.new_zeros(2, len(parts), self.num_features)
        outputs = [
            # A momentum of 1 leaves the group's own statistics there.
            functional.batch_norm(
                part, means[index], variances[index], self.weight, self.bias, True, 1.0, self.eps
            )
            for index, part in enumerate(parts)
        ]
        return torch.cat(outputs), means.mean(0), variances.mean(0)


class SynchronisedBatchNorm(_BatchNorm):
    """A batch norm over the images of all workers, which may have unequal numbers."""

    gather: Gather

    def normalise(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize by the statistics of all workers' images."""
        settings = self.weight, self.bias, self.eps, self.gather
        return cast("tuple[Tensor, Tensor, Tensor]", _AcrossWorkers.apply(input, *settings))


class _AcrossWorkers(torch.autograd.Function):
    """Computes the output, the mean [C] and the unbiased variance [C]."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        gather: Gather,
    ) -> tuple[Tensor, Tensor, Tensor]:
        pixels, features = at_least_single(input), input.shape[1]
        dims, by_channel = [0, *range(2, input.dim())], [1, -1, *[1] * (input.dim() - 2)]
        variance, mean = torch.var_mean(pixels, dims, correction=0)
        count = mean.new_tensor([input.numel() // features])
        # In float64, else each worker's rounding would show in all
        every = gather(torch.cat((mean, variance, count))).double()
        means, variances, counts = every.split((features, features, 1), 1)
        total = counts.sum()
        if total == 1:  # in torch's words
            size = f"got input size {[*input.shape]}"
            raise ValueError(f"Expected more than 1 value per channel when training, {size}")
        exact_mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - exact_mean).square())).sum(0) / total
        mean, scale = exact_mean.to(pixels), (variance + eps).rsqrt().to(pixels)
        unbiased = (variance * total / (total - 1)).to(pixels)
        ctx.save_for_backward(input, weight, mean, scale)
        ctx.mark_non_differentiable(mean, unbiased)
        ctx.total, ctx.gather, ctx.dims, ctx.by_channel = total.to(pixels), gather, dims, by_channel
        factor = scale if weight is None else scale * weight
        shift = -mean * factor if bias is None else bias - mean * factor
        output = pixels * factor.view(by_channel) + shift.view(by_channel)
        return output.to(input.dtype), mean, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, scale = ctx.saved_tensors
        dims, by_channel = ctx.dims, ctx.by_channel
        gradient, pixels = at_least_single(gradient), at_least_single(input)
        centred = pixels - mean.view(by_channel)
        sums = torch.stack((gradient.sum(dims), (gradient * centred).sum(dims)))
        of_all = ctx.gather(sums.flatten()).sum(0).view(2, -1) / ctx.total
        slope = (of_all[1] * scale.square()).view(by_channel)
        factor = (scale if weight is None else scale * weight).view(by_channel)
        of_input = (gradient - of_all[0].view(by_channel) - centred * slope) * factor
        of_weight = sums[1] * scale if ctx.needs_input_grad[1] else None
        of_bias = sums[0] if ctx.needs_input_grad[2] else None
        return of_input.to(input.dtype), of_weight, of_bias, None, None


def of_torch(module: nn.Module) -> list[Any]:
    """Return the batch norms inside `module`; raise ConfigError for one of a custom class."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, KINDS)]
    for name, layer in layers:
        if not is_known(layer):
            raise ConfigError(
                f"batch_norm: the model's layer {name} is a {type(layer).__name__}, which only"
                " batch_norm=per_worker leaves as it is"
            )
    return [layer for _, layer in layers]
