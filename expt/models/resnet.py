"""ResNet-18, with a stem that suits small images."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn


class ResNet18(nn.Module):
    """Images [B, C, H, W] to logits [B, num_classes].

    torchvision's, with its names and its first weights, but not imported from it: that takes as
    long as torch itself. `stem="small"` is a 3x3 convolution of stride 1 and no max pooling, as in
    Dive into Deep Learning, section 13.6; `stem="imagenet"` is the 7x7 of stride 2 with max pooling
    of He et al., 2015."""

    def __init__(
        self,
        *,
        channels: int,
        image_size: tuple[int, int],  # every size fits: the network ends in a global average
        num_classes: int,
        stem: Literal["small", "imagenet"] = "small",
    ) -> None:
        super().__init__()
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
    """Two convolutions, and around them a shortcut, which is a convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        same = stride == 1 and inputs == outputs
        shortcut = (
            None
            if same
            else nn.Sequential(_conv(inputs, outputs, 1, stride=stride), nn.BatchNorm2d(outputs))
        )
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
