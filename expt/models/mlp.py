"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class MLP(nn.Sequential):
    """Images [B, C, H, W] to logits [B, num_classes] through hidden layers with ReLU.

    With one hidden layer of 256 and 28x28 grey images, the 784-256-10 network of the PyTorch DDP
    introductions."""

    def __init__(
        self,
        *,
        channels: int,
        image_size: tuple[int, int],
        num_classes: int,
        hidden: Sequence[int] = (256,),
        dropout: float = 0.0,
    ) -> None:
        width = channels * image_size[0] * image_size[1]
        layers: list[nn.Module] = [nn.Flatten()]
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            width = size
        super().__init__(*layers, nn.Linear(width, num_classes))
