"""Custom tasks that see where the run is, measure rarely, or need no dataset."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import expt
from expt.data.loading import Batch
from expt.tasks.task import Sum

seen: list[Any] = []
"""The progress of each batch, and what its metrics were asked for; of this process."""


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
