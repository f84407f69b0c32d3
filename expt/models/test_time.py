"""Test-time augmentation: a model's outputs averaged over several views of each image."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from expt.errors import ConfigError

TestTime: TypeAlias = Literal["flip", "flip_shift"]


def with_views(module: nn.Module, kind: TestTime | None) -> nn.Module:
    """What gives the outputs of `module` averaged over the views of that `kind`; None is the module
    itself.
    """
    return module if kind is None else AveragedOverViews(module, kind)


class AveragedOverViews(nn.Module):
    """`flip`: each image and its mirror image.

    `flip_shift`: these, and with half of the weight also both shifted by a pixel up and left, and
    down and right, where the edge shows its mirror image (Jordan, 2024)."""

    def __init__(self, module: nn.Module, kind: TestTime) -> None:
        super().__init__()
        self._module, self._kind = module, kind

    def forward(self, images: Tensor) -> Tensor:
        """The mean of the outputs, in float32 at least."""
        if not isinstance(images, Tensor) or images.dim() != 4:
            raise ConfigError(
                f"test_time_augmentation={self._kind}: is of images [channels, height, width], and"
                " these samples are none; use null"
            )
        if self._kind == "flip":
            return self._both(images)
        height, width = images.shape[2:]
        padded = functional.pad(images, (1, 1, 1, 1), "reflect")
        shifted = [
            self._both(padded[:, :, place : place + height, place : place + width])
            for place in (0, 2)
        ]
        return 0.5 * self._both(images) + 0.25 * (shifted[0] + shifted[1])

    def _both(self, images: Tensor) -> Tensor:
        one = self._module(images)
        if not isinstance(one, Tensor):
            raise ConfigError(
                f"test_time_augmentation={self._kind}: averages outputs that are a tensor, and the"
                f" model gives a {type(one).__name__}; use null"
            )
        wide = torch.promote_types(one.dtype, torch.float32)
        half = 0.5 * one.to(
            wide
        )  # now, for the next pass may be given the memory of this one's outputs
        mean: Tensor = half + 0.5 * self._module(images.flip(3)).to(wide)
        return mean
