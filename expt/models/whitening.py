"""First weights of a convolution that whiten the patches of images (Page, 2019; Jordan, 2024)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from expt.errors import ConfigError, did_you_mean

_AT_A_TIME = 256
"""Images whose patches are held at once."""


def convolution(module: nn.Module, name: str) -> nn.Conv2d:
    """The layer of that name. Raises ConfigError where it can't be whitened."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Conv2d)}
    where = f"whitening.layer={name}"
    if name not in layers:
        some = f"; the model has {', '.join([*layers][:3])}" if layers else "; the model has none"
        raise ConfigError(
            f"{where}: is the name of no convolution{some}.{did_you_mean(name, layers)}"
        )
    layer = layers[name]
    numbers = layer.weight[0].numel()
    if layer.groups != 1 or layer.out_channels != 2 * numbers:
        raise ConfigError(
            f"{where}: has {layer.out_channels} kernels of {numbers} numbers, and takes two for"
            f" each number; use another layer, or a model whose layer has {2 * numbers}"
        )
    return layer


@torch.no_grad()
def whiten(layer: nn.Conv2d, batches: Iterable[Tensor], *, eps: float) -> None:
    """Set the kernels to the principal directions of all patches in the `batches` [b, C, H, W], and
    to their negatives.

    Each is divided by the deviation along it, with `eps` added to its square. Computed in float64,
    so that neither the order of sums nor the number of threads shows in the weights."""
    channels, height, width = layer.weight[0].shape
    total, count = torch.zeros(()), 0
    for images in batches:
        if images.shape[1] != channels:
            raise ConfigError(
                f"whitening: its layer takes {channels} channels, and the images have"
                f" {images.shape[1]}; name the first convolution as whitening.layer"
            )
        for part in images.split(_AT_A_TIME):
            patches = part.double().unfold(2, height, 1).unfold(3, width, 1)
            rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, layer.weight[0].numel())
            total, count = total.to(rows.device) + rows.T @ rows, count + len(rows)
    squares, directions = torch.linalg.eigh((total / count).cpu())
    kernels = (directions / (squares.clamp_min(0) + eps).sqrt()).T.flip(0)  # the strongest first
    # The solver may give either sign: the largest number of each is to be positive.
    largest = kernels.gather(1, kernels.abs().argmax(1, keepdim=True))
    kernels = (kernels * largest.sign()).reshape(-1, channels, height, width)
    layer.weight.copy_(torch.cat((kernels, -kernels)))
