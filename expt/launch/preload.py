"""What the forkserver imports for every run: all that a worker needs."""

from __future__ import annotations

import torch
from torch.distributed.distributed_c10d import BackendConfig

import expt.worker.main

__all__ = ["expt", "torch"]

BackendConfig("gloo")  # torch looks for it among all installed packages, once in a process
