"""A task of a person's own on images that have classes; a module without pytest."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import expt
from expt.data.loading import Batch
from expt.tasks.task import Sum


class Pictures(TensorDataset):
    """Their class is the sample's number modulo 10, also as a number of another type."""

    def __init__(self, train: bool = True, dtype: str = "int64") -> None:
        images = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(int(train)))
        super().__init__(images, (torch.arange(40) % 10).to(getattr(torch, dtype)))


class Net(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layer = nn.Linear(16, num_classes)

    def forward(self, images: Tensor) -> Any:
        return self.layer(images.flatten(1))


class Named(Net):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)


class Embedded(expt.Task):
    """Its outputs are not scores of classes, though they have their shape."""

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        return nn.functional.cross_entropy(-outputs, batch.targets, reduction="sum"), len(outputs)
