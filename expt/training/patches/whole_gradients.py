"""Gradients through `full_tensor()`, as of a penalty on the weights: the mean over the workers.

torch takes the gradients of what all workers have whole for equal. They are not where the workers' losses have
different weights, and each would train its part of the weights with its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@functools.cache  # once in a process
def average_whole_gradients() -> None:
    """From now on they are so in this process: a collective of the backward pass, which all workers do alike."""
    from torch.distributed.tensor import DTensor

    def averaging(real: Any, whole: bool) -> Any:
        @functools.wraps(real)
        def read(self: Any, *, grad_placements: Any = None) -> Tensor:
            tensor: Tensor = real(self, grad_placements=grad_placements)
            if tensor.requires_grad and grad_placements is None:
                alike = [whole or placement.is_replicate() for placement in self.placements]
                groups = [self.device_mesh.get_group(dim) for dim, is_alike in enumerate(alike) if is_alike]
                tensor.register_hook(functools.partial(_mean, groups))
            return tensor

        return read

    replaced: Any = DTensor
    replaced.full_tensor = averaging(DTensor.full_tensor, whole=True)
    replaced.to_local = averaging(DTensor.to_local, whole=False)


def _mean(groups: list[Any], gradient: Tensor) -> Tensor:
    for group in groups:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)
    return gradient
