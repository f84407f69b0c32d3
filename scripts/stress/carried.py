"""Custom classes of the random trials: samples from an open file, and a task that carries state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

import expt
from expt.data.kinds.originals import SPLITS, Digits
from expt.data.loading import Batch

MEAN, STD = 0.3053, 0.3760
DIGITS = Digits(name="digits", val_fraction=0.1, train_limit=None, mean=(MEAN,), std=(STD,))
PIXELS = 8 * 8
SLOW_STEPS = 30
"""In which the loss grows to its whole size."""
YAML = {
    "dataset/open_file": (
        "_target_: scripts.stress.carried.OpenFile\nnum_classes: 10\nfolder: ???\n"
    ),
    "task/warmed_up": "_target_: scripts.stress.carried.WarmedUp\nmetrics: {accuracy: max}\n",
}


def write(folder: Path) -> None:
    """Write digits as files of bytes, and the YAML of the classes below, to `folder`."""
    for split in SPLITS:
        arrays = DIGITS.load(split)
        images = np.asarray(arrays.images, dtype=np.uint8).reshape(-1, PIXELS)
        labels = np.asarray(arrays.labels, dtype=np.uint8)[:, None]
        (folder / split).write_bytes(np.concatenate((images, labels), 1).tobytes())
    for name, text in YAML.items():
        path = folder / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


class OpenFile(Dataset[tuple[Tensor, int]]):
    """Digits; every sample is read from one file that stays open, which forked readers share."""

    def __init__(self, folder: str, train: bool) -> None:
        self.file = (Path(folder) / ("train" if train else "test")).open("rb")

    def __len__(self) -> int:
        return self.file.seek(0, 2) // (PIXELS + 1)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.file.seek(index * (PIXELS + 1))
        *pixels, label = self.file.read(PIXELS + 1)
        return (torch.tensor(pixels).view(1, 8, 8) / 255 - MEAN) / STD, label


class WarmedUp(expt.Task):
    """Cross-entropy whose size grows with the steps that the task has counted."""

    def __init__(self) -> None:
        self.steps = 0

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """Return it in its whole size."""
        return functional.cross_entropy(outputs, batch.targets, reduction="sum"), len(outputs)

    def training_loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """Return it in the size of this step."""
        self.steps += 1
        total, weight = self.loss(outputs, batch)
        return total * size_in_step(self.steps), weight

    def measure(self, outputs: Tensor, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        """Return how many are right."""
        return {"accuracy": ((outputs.argmax(1) == batch.targets).sum(), len(outputs))}

    def state_dict(self) -> Mapping[str, Any]:
        """Return the count."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count."""
        self.steps = state["steps"]


def size_in_step(step: int) -> float:
    """Return the factor of the loss in a step, counted from 1."""
    return min(1.0, step / SLOW_STEPS)
