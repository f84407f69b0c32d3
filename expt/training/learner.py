"""What a training step changes, and how far a run has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from expt.training.precision import Precision


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What a training step changes, and how."""

    module: nn.Module
    """The bare model: evaluated, and saved."""
    parallel: nn.Module
    """The model that is trained: `module`, or DistributedDataParallel around it."""
    optimizer: Optimizer
    scheduler: LRScheduler
    precision: Precision
    world_size: int
    compiled: bool = False
    label_smoothing: float = 0.0
    gradient_accumulation: int = 1
    all_reduce_s: Callable[[int], float] = lambda _: 0.0
    """Seconds that its first N steps have spent on averaging gradients, waiting for the others' included."""


@dataclass
class Position:
    """How far a run has come."""

    epoch: int = 0
    """Epochs begun."""
    step: int = 0
    """Optimiser steps done since the start of the run."""
    step_in_epoch: int = 0
