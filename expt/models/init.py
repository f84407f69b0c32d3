"""Named initialisations for any model, a person's own included."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn

from expt.config import groups

INITIALISED = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def initialise(module: nn.Module, config: groups.Init) -> None:
    """Draw the weights of `module`'s linear and convolution layers anew, from torch's global
    generator, in order.

    Other layers, batch norms say, keep what they have.
    """
    if isinstance(config, groups.DefaultInit):
        return
    draw = _drawing(config)
    for layer in module.modules():
        if isinstance(layer, INITIALISED):
            draw(layer.weight)
            if config.zero_bias and layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _drawing(
    config: groups.NormalInit | groups.XavierInit | groups.KaimingInit | groups.OrthogonalInit,
) -> _Draw:
    if isinstance(config, groups.NormalInit):
        return functools.partial(nn.init.normal_, std=config.std)
    if isinstance(config, groups.OrthogonalInit):
        return functools.partial(nn.init.orthogonal_, gain=config.gain)
    uniform = config.distribution == "uniform"
    if isinstance(config, groups.XavierInit):
        return nn.init.xavier_uniform_ if uniform else nn.init.xavier_normal_
    kaiming = nn.init.kaiming_uniform_ if uniform else nn.init.kaiming_normal_
    return functools.partial(kaiming, mode=config.mode, nonlinearity="relu")


_Draw = Callable[[Tensor], Tensor]
