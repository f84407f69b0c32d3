"""A plain convnet: convolutions, each with batch norm and pooling if wanted, and linear layers
behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from expt.errors import ConfigError


class ConvNet(nn.Sequential):
    """Images [B, C, H, W] to logits [B, num_classes].

    The defaults are the network of https://keras.io/guides/distributed_training_with_torch/, whose
    Rescaling layer is the data's business here, and whose batch norms shift but do not scale.
    Behind padding `same` a side is side / stride pixels long, or one more."""

    def __init__(
        self,
        *,
        channels: int,
        image_size: tuple[int, int],
        num_classes: int,
        widths: Sequence[int] = (12, 24, 32),
        kernels: Sequence[int] = (3, 6, 6),
        strides: Sequence[int] = (1, 2, 2),
        paddings: Sequence[Literal["same", "valid"]] = ("same", "valid", "same"),
        batch_norm: bool = True,
        pool: int = 1,
        global_average: bool = True,
        hidden: int | None = 256,
        dropout: float = 0.5,
    ) -> None:
        pads = [
            _padding(kernel, stride, name)
            for kernel, stride, name in zip(kernels, strides, paddings, strict=True)
        ]
        height, width = (_side_after(side, kernels, strides, pads, pool) for side in image_size)
        if not (height and width):
            raise ConfigError(_too_large(image_size, kernels, strides, pads, pool))
        layers: list[nn.Module] = []
        for index, (out, kernel, stride, pad) in enumerate(
            zip(widths, kernels, strides, pads, strict=True)
        ):
            # As in the guide, the last convolution alone has a bias before its batch norm.
            bias = not batch_norm or index == len(widths) - 1
            layers.append(nn.Conv2d(channels, out, kernel, stride=stride, padding=pad, bias=bias))
            layers += [nn.BatchNorm2d(out), nn.ReLU()] if batch_norm else [nn.ReLU()]
            if pool > 1:
                layers.append(nn.MaxPool2d(pool))
            channels = out
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if global_average else [nn.Flatten()]
        features = channels if global_average else channels * height * width
        if hidden:
            layers += [nn.Linear(features, hidden), nn.ReLU()]
        super().__init__(*layers, nn.Dropout(dropout), nn.Linear(hidden or features, num_classes))


def _padding(kernel: int, stride: int, name: str) -> int | str:
    """What Conv2d takes; torch's own "same" knows a stride of 1 only."""
    if name == "valid":
        return 0
    return "same" if stride == 1 else max(0, -(-(kernel - stride) // 2))


def _side_after(
    side: int, kernels: Sequence[int], strides: Sequence[int], pads: Sequence[int | str], pool: int
) -> int:
    """A side of the image behind all convolutions; 0 where a kernel or the pooling is larger than
    what reaches it.
    """
    for kernel, stride, pad in zip(kernels, strides, pads, strict=True):
        if pad != "same":
            side = (
                (side + 2 * int(pad) - kernel) // stride + 1 if side + 2 * int(pad) >= kernel else 0
            )
        side //= pool
    return side


def _too_large(
    image_size: tuple[int, int],
    kernels: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int | str],
    pool: int,
) -> str:
    """What is, and what to set."""
    images = f"images of {image_size[0]}x{image_size[1]}"
    for smaller in range(pool - 1, 0, -1):
        if all(_side_after(side, kernels, strides, pads, smaller) for side in image_size):
            return (
                f"model.pool={pool}: too large for {images}; use model.pool={smaller}, or model=mlp"
            )
    return (
        f"model.kernels={list(kernels)}: too large for {images}; "
        f"use smaller ones, as in 'model.kernels=[{','.join('3' * len(kernels))}]', or model=mlp"
    )
