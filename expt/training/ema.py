"""An exponential moving average of a model's weights, to be evaluated in their place; torch's own."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from expt.config import secrets
from expt.errors import ConfigError


def ema_of(
    module: nn.Module,
    decay: float,
    before: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> AveragedModel:
    """A copy of `module` whose update after each step keeps `decay` of its weights; it begins with
    those of the first.

    Buffers, such as a batch norm's statistics, are copied. The copy is of what `before` makes of
    it. Raises ConfigError where the model can't be copied."""
    try:
        average = AveragedModel(before(module), multi_avg_fn=get_ema_multi_avg_fn(decay))
    except (
        Exception
    ) as error:  # of a person's own model: what copying its attributes raises is of many kinds
        told = secrets.said(error)
        raise ConfigError(
            f"ema={decay}: the model can't be copied ({told}); use ema=null"
        ) from error
    return average.requires_grad_(False)
