"""Outputs that a model gives in training only, such as the losses of torchvision's detectors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

_LEFT_ALONE = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip


@contextlib.contextmanager
def train_mode(model: nn.Module) -> Iterator[None]:
    """Let a model compute in an evaluation as in training.

    Its batch norms and dropouts stay as in the evaluation. Random numbers that it draws are the
    same in each call, and those after the call are as without it, as are the model's buffers.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, one, one.clone())
        for module in modes
        for name, one in module.named_buffers(recurse=False)
    ]
    devices = {one.device for one in model.parameters() if one.is_cuda}
    with torch.random.fork_rng([*devices]):
        torch.manual_seed(0)
        try:
            for module in modes:
                module.training = module.training or not isinstance(module, _LEFT_ALONE)
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            for module, name, one, value in buffers:
                one.data.copy_(value)
                setattr(module, name, one)
