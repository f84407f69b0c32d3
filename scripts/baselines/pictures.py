"""A folder of pictures read by torchvision's ImageFolder and a DataLoader, in a loop by hand."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader


def write(root: Path, number: int, height: int, width: int) -> None:
    """Write JPEGs of random colours into ten class folders."""
    from PIL import Image

    drawn = np.random.default_rng(0)
    for label in range(10):
        (root / "train" / f"c{label}").mkdir(parents=True)
    for place in range(number):
        coarse = drawn.integers(256, size=(height // 8, width // 8, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        picture.save(root / "train" / f"c{place % 10}" / f"{place:05}.jpg", quality=88)


def main() -> None:
    """Print the seconds from `--began` to the end of the first step, and those of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=0, help="0 ends after the first step")
    parser.add_argument("--began", type=float, default=time.time())
    given = parser.parse_args()
    v2: Any = importlib.import_module("torchvision.transforms.v2")
    datasets: Any = importlib.import_module("torchvision.datasets")
    resize = [v2.Resize(given.size), v2.CenterCrop(given.size)]
    scaled = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    data = datasets.ImageFolder(f"{given.root}/train", v2.Compose([*resize, *scaled]))
    model = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, 10))
    optimizer, first, epoch_s = torch.optim.SGD(model.parameters(), 0.01), 0.0, list[float]()
    how = {"num_workers": given.readers, "persistent_workers": given.readers > 0}
    loader = DataLoader(data, 64, shuffle=True, **how)
    for _ in range(max(1, given.epochs)):
        began = time.time()
        for inputs, classes in loader:
            loss = nn.functional.cross_entropy(model(inputs), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            first = first or time.time()
            if not given.epochs:
                break
        epoch_s.append(time.time() - began)
    print(json.dumps({"first_step_s": first - given.began, "epoch_s": epoch_s}))


if __name__ == "__main__":
    main()
