"""What is done to the whole of a sharded tensor: gradients through `full_tensor()`, and `weights[0]
= 1`.

torch takes the gradients of what all workers have whole for equal, as that of a penalty on the
weights. They are not where the workers' losses have different weights, and each would train its
part with its own. What is written to some rows torch writes to a copy of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from expt.errors import ConfigError


@functools.cache  # once in a process
def treat_whole() -> None:
    """From now on such gradients are the mean over the workers, and rows are written; for all
    workers, alike.
    """
    from torch.distributed.tensor import DTensor

    replaced: Any = DTensor
    replaced.full_tensor = _averaging(DTensor.full_tensor, whole=True)
    replaced.to_local = _averaging(DTensor.to_local, whole=False)
    replaced.__setitem__ = _set


def _averaging(real: Any, whole: bool) -> Any:
    @functools.wraps(real)
    def read(self: Any, *, grad_placements: Any = None) -> Tensor:
        tensor: Tensor = real(self, grad_placements=grad_placements)
        if tensor.requires_grad and grad_placements is None:
            alike = [whole or placement.is_replicate() for placement in self.placements]
            groups = [
                self.device_mesh.get_group(dim) for dim, is_alike in enumerate(alike) if is_alike
            ]
            tensor.register_hook(functools.partial(_mean, groups))
        return tensor

    return read


def _mean(groups: list[Any], gradient: Tensor) -> Tensor:
    for group in groups:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)
    return gradient


def _set(self: Any, index: Any, value: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    if torch.is_grad_enabled() and (self.requires_grad or getattr(value, "requires_grad", False)):
        raise ConfigError(
            "tensor[...] = value: has no gradient where the tensor is shared out among workers;"
            " make another of it, as by torch.where, or write under torch.no_grad()"
        )
    whole = _plain(self).clone()
    whole[tuple(map(_plain, index)) if isinstance(index, tuple) else _plain(index)] = _plain(value)
    self.copy_(distribute_tensor(whole, self.device_mesh, self.placements, src_data_rank=None))


def _plain(given: Any) -> Any:
    return given.detach().full_tensor() if hasattr(given, "full_tensor") else given
