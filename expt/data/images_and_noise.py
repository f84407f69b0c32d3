"""Digits with noise, from which a generator makes others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.data.kinds.originals import Digits


class ImagesAndNoise(Dataset[dict[str, Tensor]]):
    """Samples of a digit and of noise: {"image": [1, 8, 8] in [0, 1], "noise": [noise]}.

    The noise is drawn here, not in the model, so it depends on the seed, the epoch and the sample
    only, whatever the number of workers.
    """

    def __init__(self, train: bool, noise: int) -> None:
        how: dict[str, Any] = dict.fromkeys(("train_limit", "mean", "std"))
        digits = Digits(name="digits", val_fraction=0.0, **how)
        self._images = torch.from_numpy(digits.load("train" if train else "test").images)
        self._noise = noise

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self._images[index] / 255, "noise": torch.randn(self._noise)}
