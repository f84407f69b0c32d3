"""Outputs that a model gives in training only, such as the losses of torchvision's detectors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

_LEFT_ALONE = _BatchNorm, _DropoutNd


@contextlib.contextmanager
def train_mode(model: nn.Module) -> Iterator[None]:
    """Let a model compute in an evaluation as in training.

    Its batch norms and dropouts stay as in the evaluation. What it draws within depends on nothing
    outside, and nothing outside on that.
    """
    modes = {module: module.training for module in model.modules()}
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
