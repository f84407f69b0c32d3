"""The norms of many tensors by a few kernels; torch's public functions give one tensor's, or that
of all together.

On a GPU each launch of a kernel costs as much as a layer's norm itself, and a ResNet-18 has 62
layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expt.training.patches.changed import warn_changed


def norms_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The 2-norm of each tensor, each a scalar."""
    try:
        return torch._foreach_norm(list(tensors))
    except (AttributeError, TypeError) as error:
        warn_changed("the norms of all layers at once", str(error))
        return [torch.linalg.vector_norm(tensor) for tensor in tensors]
