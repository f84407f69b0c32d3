"""A small, fast network for small photographs: that of
https://github.com/KellerJordan/cifar10-airbench.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from expt.errors import ConfigError

_EPS = 1e-12
"""Of its batch norms."""


class Airbench(nn.Module):
    """Images [B, C, H, W] to logits [B, num_classes].

    Its first convolution has two kernels for each number in a patch of the image, to be set by
    `whitening`; the others begin as the identity of as many channels as they can, which makes paths
    around them."""

    def __init__(
        self,
        *,
        channels: int,
        image_size: tuple[int, int],
        num_classes: int,
        widths: Sequence[int] = (64, 256, 256),
        whitening_kernel: int = 2,
        batch_norm_momentum: float = 0.4,
        logit_scale: float = 1 / 9,
    ) -> None:
        smallest = 2 ** len(widths) + whitening_kernel - 1
        if min(image_size) < smallest:
            raise ConfigError(
                f"model.widths=[{','.join(map(str, widths))}]: {len(widths)} halvings are too many"
                f" for images of {image_size[0]}x{image_size[1]}, which must be"
                f" {smallest}x{smallest} or larger; use fewer, or model=mlp"
            )
        super().__init__()
        before = 2 * channels * whitening_kernel**2
        self.whiten = nn.Conv2d(channels, before, whitening_kernel)
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]
        self.groups = nn.Sequential(
            *(
                _Group(wide, out, batch_norm_momentum)
                for wide, out in zip((before, *widths[:-1]), widths, strict=True)
            )
        )
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        self._logit_scale = logit_scale

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        features = self.groups(functional.gelu(self.whiten(images)))
        largest = functional.adaptive_max_pool2d(features, 1).flatten(1)
        logits: Tensor = self.head(largest) * self._logit_scale
        return logits


class _Group(nn.Module):
    """[B, C, H, W] to [B, out, H // 2, W // 2]."""

    def __init__(self, channels: int, out: int, momentum: float) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, out)
        self.norm1 = _batch_norm(out, momentum)
        self.conv2 = _convolution(out, out)
        self.norm2 = _batch_norm(out, momentum)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.norm1(functional.max_pool2d(self.conv1(x), 2)))
        return functional.gelu(self.norm2(self.conv2(x)))


def _convolution(channels: int, out: int) -> nn.Conv2d:
    layer = nn.Conv2d(channels, out, 3, padding="same", bias=False)
    nn.init.dirac_(layer.weight.data[:channels])
    return layer


def _batch_norm(channels: int, momentum: float) -> nn.BatchNorm2d:
    """One that shifts, and does not scale."""
    layer = nn.BatchNorm2d(channels, eps=_EPS, momentum=momentum)
    layer.weight.requires_grad_(False)
    return layer
