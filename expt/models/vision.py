"""Models of images: MLP, ConvNet, ResNet-18 and U-Net."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from expt.errors import ConfigError


class MLP(nn.Sequential):
    """Logits [B, num_classes] of images [B, C, H, W], through hidden layers with ReLU."""

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
            # A dropout takes no number of its own: weights have the same names without one.
            activation = nn.Sequential(nn.ReLU(), nn.Dropout(dropout)) if dropout else nn.ReLU()
            layers += [nn.Linear(width, size), activation]
            width = size
        super().__init__(*layers, nn.Linear(width, num_classes))


class ConvNet(nn.Sequential):
    """Logits [B, num_classes] of images [B, C, H, W].

    The defaults are the network of https://keras.io/guides/distributed_training_with_torch/, whose
    Rescaling layer is the data's business here, and whose batch norms shift but do not scale. After
    padding `same` a side is side / stride pixels long, or one more.
    """

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
        pads = [*map(_padding, kernels, strides, paddings)]
        height, width = (_side_after(side, kernels, strides, pads, pool) for side in image_size)
        if not (height and width):
            raise ConfigError(
                f"model.kernels={list(kernels)}, model.pool={pool}: too large for images of"
                f" {image_size[0]}x{image_size[1]}; use smaller ones, or model=mlp"
            )
        layers: list[nn.Module] = []
        every = zip(widths, kernels, strides, pads, strict=True)
        for index, (out, kernel, stride, pad) in enumerate(every):
            # As in the guide, only the last convolution has a bias before its batch norm.
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
    """Return the padding for Conv2d, whose own "same" allows a stride of 1 only."""
    if name == "valid":
        return 0
    return "same" if stride == 1 else max(0, -(-(kernel - stride) // 2))


def _side_after(
    side: int, kernels: Sequence[int], strides: Sequence[int], pads: Sequence[int | str], pool: int
) -> int:
    """Return a side of the image after all convolutions; 0 where one does not fit."""
    for kernel, stride, pad in zip(kernels, strides, pads, strict=True):
        if pad != "same":
            over = side + 2 * int(pad) - kernel
            side = over // stride + 1 if over >= 0 else 0
        side //= pool
    return side


class ResNet18(nn.Module):
    """Logits [B, num_classes] of images [B, C, H, W].

    torchvision's, with its names and first weights, but not imported: that takes as long as torch.
    `stem="small"` is a 3x3 convolution of stride 1 without max pooling, as in Dive into Deep
    Learning, section 13.6; `stem="imagenet"` the 7x7 of stride 2 with max pooling of He et al.,
    2015; `"auto"` is small for images up to 64 pixels a side. Images of every size fit.
    """

    def __init__(
        self,
        *,
        channels: int,
        image_size: tuple[int, int],
        num_classes: int,
        stem: Literal["auto", "small", "imagenet"] = "auto",
    ) -> None:
        super().__init__()
        if stem == "auto":
            stem = "small" if max(image_size) <= 64 else "imagenet"
        self.conv1 = _conv(3, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = nn.Sequential(_Block(64, 64), _Block(64, 64))
        self.layer2 = nn.Sequential(_Block(64, 128, stride=2), _Block(128, 128))
        self.layer3 = nn.Sequential(_Block(128, 256, stride=2), _Block(256, 256))
        self.layer4 = nn.Sequential(_Block(256, 512, stride=2), _Block(512, 512))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                _draw(layer)
        # Replaced at the end, so that all other weights are drawn as torchvision draws them.
        if stem == "small":
            self.conv1 = _conv(channels, 64, 3)
            self.maxpool = nn.Identity()
        elif channels != 3:
            self.conv1 = _conv(channels, 64, 7, stride=2)
        _draw(self.conv1)

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        features = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(features), 1))
        return logits


class _Block(nn.Module):
    """Two convolutions and a shortcut, which is a convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        shortcut = None
        if stride != 1 or inputs != outputs:
            convolution = _conv(inputs, outputs, 1, stride=stride)
            shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))
        self.conv1 = _conv(inputs, outputs, 3, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(outputs, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = shortcut

    def forward(self, images: Tensor) -> Tensor:
        features = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(images)))))
        features += images if self.downsample is None else self.downsample(images)
        output: Tensor = self.relu(features)
        return output


def _conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


def _draw(layer: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


class UNet(nn.Module):
    """Logits [B, num_classes, H, W] of images [B, C, H, W] (Ronneberger et al., 2015).

    Convolutions are padded. Going up, features are repeated to the size above and convolved:
    transposed convolutions leave checkerboards. Sides have 2 ** (len(widths) - 1) pixels or more.
    """

    def __init__(
        self,
        *,
        channels: int,
        image_size: tuple[int, int],
        num_classes: int,
        widths: Sequence[int] = (16, 32, 64),
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        smallest = 2 ** (len(widths) - 1)
        if min(image_size) < smallest:
            raise ConfigError(
                f"model.widths={list(widths)}: {len(widths)} levels need images of"
                f" {smallest}x{smallest} or more, and these are {image_size[0]}x{image_size[1]};"
                " use fewer"
            )
        self.down = nn.ModuleList(
            _convolutions(before, width, batch_norm)
            for before, width in itertools.pairwise((channels, *widths))
        )
        self.up = nn.ModuleList(
            _convolutions(below + width, width, batch_norm)
            for below, width in itertools.pairwise(widths[::-1])
        )
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        features = images
        levels: list[Tensor] = []
        for down in self.down:
            features = down(functional.max_pool2d(features, 2) if levels else features)
            levels.append(features)
        for up, above in zip(self.up, levels[-2::-1], strict=True):
            repeated = functional.interpolate(features, size=above.shape[-2:], mode="nearest")
            features = up(torch.cat([repeated, above], 1))
        logits: Tensor = self.head(features)
        return logits


def _convolutions(channels: int, width: int, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (channels, width):
        layers.append(nn.Conv2d(before, width, 3, padding=1, bias=not batch_norm))
        layers += [nn.BatchNorm2d(width)] * batch_norm + [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)
