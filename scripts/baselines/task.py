"""What every baseline trains: the models, torchvision's data path, the arguments, one line of JSON
at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

STARTED = float(os.environ.get("BASELINE_T0", time.time()))

import torch  # noqa: E402  its import is part of the time to the first step
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

AMP_DTYPE = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def mlp() -> nn.Module:
    """The network of the PyTorch DDP introductions: 784-256-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def convnet() -> nn.Module:
    """The Keras guide's network; its Rescaling layer is the data path's business."""
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding="same", bias=False), nn.BatchNorm2d(12), nn.ReLU()),
        *(nn.Conv2d(12, 24, 6, stride=2, bias=False), nn.BatchNorm2d(24), nn.ReLU()),
        *(nn.Conv2d(24, 32, 6, stride=2, padding=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10)),
    )


class Residual(nn.Module):
    """Two 3x3 convolutions, and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels_in, channels, 3, stride, 1), nn.BatchNorm2d(channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, 1, 1), nn.BatchNorm2d(channels)),
        )
        same = stride == 1 and channels_in == channels
        self.skip = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Images to images."""
        return torch.relu(self.body(x) + self.skip(x))


def resnet18() -> nn.Module:
    """Dive into Deep Learning's ResNet-18: 3x3 stem, no max pooling."""
    layers: list[nn.Module] = [nn.Conv2d(1, 64, 3, 1, 1), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for index, width in enumerate((64, 128, 256, 512)):
        layers += [Residual(before, width, 1 if index == 0 else 2), Residual(width, width)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "convnet": convnet, "resnet18": resnet18}


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--data", required=True, help="folder that holds FashionMNIST/raw")
    parser.add_argument("--batch-size", type=int, default=64, help="global")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=0, help="of each epoch; 0 is all of them")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--amp", choices=AMP_DTYPE, default="off")
    parser.add_argument(
        "--evaluate", action="store_true", help="accuracy on the test set at the end"
    )
    return parser.parse_args()


def datasets(folder: str) -> tuple[Dataset[Any], Dataset[Any]]:
    """Training and test images, each decoded, converted and normalised when it is asked for."""
    from torchvision.datasets import FashionMNIST
    from torchvision.transforms import Compose, Normalize, ToTensor

    transform = Compose([ToTensor(), Normalize((0.2860,), (0.3530,))])
    return FashionMNIST(folder, train=True, transform=transform), FashionMNIST(
        folder, train=False, transform=transform
    )


def report(
    system: str,
    args: argparse.Namespace,
    epoch_s: list[float],
    first_step_s: float | None,
    accuracy: float | None,
) -> None:
    """The line that the bench reads; to be printed by one worker."""
    content = {
        "system": system,
        "model": args.model,
        "batch_size": args.batch_size,
        "workers": args.workers,
        "epoch_s": epoch_s,
        "first_step_s": first_step_s,
        "accuracy": accuracy,
    }
    print(json.dumps(content), flush=True)
