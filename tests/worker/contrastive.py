"""SimCLR as a task of a person's own; a module without pytest, which each worker imports."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import Dataset

import expt
from expt.data.loading import Batch
from expt.tasks.task import Sum


class TwoViews(Dataset[Any]):
    """Each of 100 points with two noises, which are drawn anew in each epoch."""

    def __init__(self, train: bool = True) -> None:
        self.points = torch.randn(100, 6, generator=torch.Generator().manual_seed(int(train)))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index] + 0.3 * torch.randn(2, 6)


class Encoder(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)


class SimCLR(expt.Task):
    """Minimise a loss of the whole global batch; evaluate each sample by itself."""

    def forward(self, model: Any, batch: Batch) -> Tensor:
        return normalize(model(batch.inputs), dim=-1)

    def training_loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """Return this worker's part of NT-Xent among all workers' samples [b, 2, d]."""
        rank, everyones = (
            (dist.get_rank(), all_gather(outputs)) if dist.is_initialized() else (0, [outputs])
        )
        others = torch.cat(everyones).flatten(0, 1)
        own = torch.arange(len(outputs) * 2, device=outputs.device) + rank * len(outputs) * 2
        alike = (outputs.flatten(0, 1) @ others.T / 0.5).masked_fill(
            own[:, None] == torch.arange(len(others), device=own.device), -1e9
        )
        return cross_entropy(alike, own ^ 1, reduction="sum"), len(own)

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """How far apart the views of a sample lie."""
        return (outputs[:, 0] - outputs[:, 1]).norm(dim=-1).sum(), len(outputs)
