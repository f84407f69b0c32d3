"""Weights in bfloat16, but for those of norms: `amp=bf16_params`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from expt.training import batch_norm

_NORMS = (
    *(*batch_norm.KINDS, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
)


def halve(module: nn.Module) -> None:
    """Round the float32 parameters inside `module` to bfloat16, in place; those of norms, and
    buffers, stay.
    """
    for layer in module.modules():
        if not isinstance(layer, _NORMS):
            for parameter in layer.parameters(recurse=False):
                if parameter.dtype == torch.float32:
                    parameter.data = parameter.data.bfloat16()


class AverageInFloat32(AveragedModel):
    """torch's, of weights of another type: in bfloat16 an average would stand still."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        super().__init__(copy.deepcopy(module).float())
        self._decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take up the weights of now; buffers are copied."""
        averages = [*self.module.parameters()]
        current = [
            parameter.to(average.dtype)
            for parameter, average in _pairs(model.parameters(), averages)
        ]
        copied = _pairs(self.module.buffers(), model.buffers())
        if self.n_averaged == 0:
            copied += _pairs(averages, current)
        else:
            get_ema_multi_avg_fn(self._decay)(averages, current, None)
        for value, now in copied:
            value.copy_(now)
        self.n_averaged += 1


def _pairs(one: Any, other: Any) -> list[tuple[Tensor, Tensor]]:
    return list(zip(one, other, strict=True))
