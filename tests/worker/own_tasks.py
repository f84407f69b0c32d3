"""Tasks of a person's own, with what they train on; a module without pytest, for each worker.

A small GAN, SimCLR, and tasks that see where the run is, measure rarely, or need no dataset.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from torch.utils.data import Dataset

import expt
from expt.data.loading import Batch
from expt.tasks.task import Sum

seen: list[Any] = []
"""The progress of each batch, and what its metrics were asked for; of this process."""


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
            return functional.softplus(-fake).sum(), len(fake)
        points = outputs["points"] = model.generator(batch.inputs["noise"])
        real, fake = model.discriminator(batch.inputs["point"]), model.discriminator(points)
        outputs["d_real"] = real.sigmoid().sum(), len(real)
        return (functional.softplus(-real) + functional.softplus(fake)).sum(), len(fake)


class Forgetful(Adversarial):
    phases = {"discriminator": "^discriminator", "generator": "^genrator"}


class Partial(Adversarial):
    phases = {"discriminator": "^discriminator"}


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
        return functional.normalize(model(batch.inputs), dim=-1)

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
        return functional.cross_entropy(alike, own ^ 1, reduction="sum"), len(own)

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        """How far apart the views of a sample lie."""
        return (outputs[:, 0] - outputs[:, 1]).norm(dim=-1).sum(), len(outputs)


class Telling(expt.Task):
    """Warms its loss up by the run's steps; its metrics say where it is."""

    reductions: Mapping[str, Any] = {"step": "last", "epoch": "last", "length": "last"}

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        loss = functional.cross_entropy(outputs, batch.targets, reduction="sum")
        now = batch.progress
        share = 1.0 if now.is_evaluation else (1 + now.step) / now.total_steps
        return loss * share, len(outputs)

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, Any]:
        now = batch.progress
        seen.append((now.is_evaluation, now.step))
        return {"step": now.step, "epoch": now.epoch, "length": now.total_steps}


class Dear(expt.Task):
    """Has a metric that costs much."""

    def loss(self, outputs: Tensor, batch: Batch) -> Sum:
        return functional.cross_entropy(outputs, batch.targets, reduction="sum"), len(outputs)

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, Any]:
        right = (outputs.argmax(1) == batch.targets).sum()
        found = {"cheap": (right, len(outputs))}
        if batch.progress.measures("dear"):
            seen.append((batch.progress.is_evaluation, batch.progress.step))
            found["dear"] = right, len(outputs)
        return found


class Drawn(expt.Task):
    """Fits the sine of numbers that are drawn by seeds."""

    def forward(self, model: Any, batch: Batch) -> Any:
        generators = (torch.Generator().manual_seed(seed) for seed in batch.inputs.tolist())
        numbers = torch.stack([torch.rand(1, generator=one) for one in generators])
        return model(numbers.to(batch.inputs.device)), numbers.to(batch.inputs.device)

    def loss(self, outputs: Any, batch: Batch) -> Sum:
        found, numbers = outputs
        return (found - numbers.sin()).square().sum(), batch.size


class Line(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
