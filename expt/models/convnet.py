"""The convnet of the Keras guide "Multi-GPU distributed training with PyTorch"."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from expt.errors import ConfigError


class ConvNet(nn.Sequential):
    """Images [B, C, H, W] to logits [B, num_classes]: three convolutions with batch norm, a global average, two layers.

    Source: https://keras.io/guides/distributed_training_with_torch/ (its Rescaling layer is the data's business here).
    """

    def __init__(
        self,
        *,
        channels: int,
        image_size: tuple[int, int],
        num_classes: int,
        widths: Sequence[int] = (12, 24, 32),
        kernels: Sequence[int] = (3, 6, 6),
        hidden: int = 256,
        dropout: float = 0.5,
    ) -> None:
        _check_size(image_size, kernels)
        layers: list[nn.Module] = []
        for index, (width, kernel) in enumerate(zip(widths, kernels, strict=True)):
            first, last = index == 0, index == len(widths) - 1
            # The guide pads the first convolution to keep the size, the last by a third of its kernel, the second not.
            layers += [
                nn.Conv2d(
                    channels,
                    width,
                    kernel,
                    stride=1 if first else 2,
                    padding="same" if first else kernel // 3 if last else 0,
                    bias=last,
                ),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            channels = width
        super().__init__(
            *layers,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )


def _check_size(image_size: tuple[int, int], kernels: Sequence[int]) -> None:
    """Raise ConfigError where a kernel is larger than what reaches it."""
    for side in image_size:
        after_second = (side - kernels[1]) // 2 + 1
        if side < kernels[1] or after_second + 2 * (kernels[2] // 3) < kernels[2]:
            shape = f"{image_size[0]}x{image_size[1]}"
            raise ConfigError(
                f"model.kernels={list(kernels)}: too large for images of {shape}; "
                "use smaller ones, as in 'model.kernels=[3,3,3]', or model=mlp"
            )
