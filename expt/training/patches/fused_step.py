"""An update that a flag on the GPU can call off, by what GradScaler uses between itself and fused
optimisers.

To ask the flag on the CPU instead makes every step wait for the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def step_unless(bad: torch.Tensor, optimizer: Optimizer) -> None:
    """Update the weights unless the flag `bad` is set, for which only a fused optimiser need not
    wait.
    """
    if bad.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False):
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = None, bad.float()
        fused.step()
        del fused.grad_scale, fused.found_inf
    elif not bad.item():
        optimizer.step()
