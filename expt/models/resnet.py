"""torchvision's ResNet-18, with a stem that suits small images."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet


class ResNet18(ResNet):
    """Images [B, C, H, W] to logits [B, num_classes].

    `stem="small"` is a 3x3 convolution of stride 1 and no max pooling, as in Dive into Deep Learning, section 13.6;
    `stem="imagenet"` is the 7x7 of stride 2 with max pooling of He et al., 2015.
    """

    def __init__(
        self,
        *,
        channels: int,
        image_size: tuple[int, int],  # every size fits: the network ends in a global average
        num_classes: int,
        stem: Literal["small", "imagenet"] = "small",
    ) -> None:
        super().__init__(BasicBlock, [2, 2, 2, 2], num_classes=num_classes)
        if stem == "small":
            self.conv1 = nn.Conv2d(channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
            self.maxpool = nn.Identity()  # type: ignore[assignment]
        elif channels != 3:
            self.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
