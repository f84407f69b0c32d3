"""Images with noise beside them, from which a generator makes others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.data.kinds.originals import Digits, Downloaded


class ImagesAndNoise(Dataset[dict[str, Tensor]]):
    """Samples of an image and of noise: {"image": [1, H, W] in [0, 1], "noise": [noise]}.

    The images are the digits, or Fashion-MNIST of the folder `root`. The noise is drawn here, not
    in the model, so it depends on the seed, the epoch and the sample only, whatever the number of
    workers.
    """

    def __init__(self, train: bool, noise: int, root: str | None = None) -> None:
        how: dict[str, Any] = {"val_fraction": 0.0, "train_limit": None, "mean": None, "std": None}
        digits = Digits(name="digits", **how)
        fashion = Downloaded(name="fashion_mnist", root=root, download=False, **how)
        config = digits if root is None else fashion
        self._images = torch.from_numpy(config.load("train" if train else "test").images)
        self._noise = noise

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self._images[index] / 255, "noise": torch.randn(self._noise)}
