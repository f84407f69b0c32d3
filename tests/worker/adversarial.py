"""A small GAN of a person's own; a module without pytest, which each worker imports."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import Dataset

import expt
from expt.data.loading import Batch
from expt.tasks.task import Sum


class Points(Dataset[Any]):
    """108 points of a ring, each with noise that is drawn anew in each epoch."""

    def __init__(self, train: bool = True) -> None:
        self.angles = torch.linspace(0, 6, 108 if train else 20)

    def __len__(self) -> int:
        return len(self.angles)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        angle = self.angles[index]
        return {"point": torch.stack((angle.cos(), angle.sin())), "noise": torch.randn(3)}


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))


class Adversarial(expt.PhasedTask):
    phases = {"discriminator": "^discriminator", "generator": "^generator"}

    def phase(self, name: str, model: Any, batch: Batch, outputs: dict[str, Any]) -> Sum:
        if name == "generator":
            fake = model.discriminator(outputs["points"])
            return softplus(-fake).sum(), len(fake)
        points = outputs["points"] = model.generator(batch.inputs["noise"])
        real, fake = model.discriminator(batch.inputs["point"]), model.discriminator(points)
        outputs["d_real"] = real.sigmoid().sum(), len(real)
        return (softplus(-real) + softplus(fake)).sum(), len(fake)


class Forgetful(Adversarial):
    phases = {"discriminator": "^discriminator", "generator": "^genrator"}


class Partial(Adversarial):
    phases = {"discriminator": "^discriminator"}
