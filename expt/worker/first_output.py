"""The first output of a person's own classifier, looked at: what torch says of a wrong one is a riddle."""

from __future__ import annotations

import torch
from torch import nn

from expt.errors import ConfigError, warn


def check_first_output(module: nn.Module, target: str, num_classes: int, *, warns: bool) -> None:
    """Raise ConfigError once `module` gives what is no score for each class, and warn where it gives more of them."""

    def check(_: nn.Module, __: object, output: object) -> None:
        hook.remove()
        shape = f"a tensor of shape {list(output.shape)}" if isinstance(output, torch.Tensor) else None
        if not isinstance(output, torch.Tensor) or output.dim() != 2:
            what = shape or f"a {type(output).__name__}"
            raise ConfigError(f"model._target_={target}: gives {what}; return one tensor, [samples, num_classes]")
        gives = f"gives {output.shape[1]} outputs for each sample, and there are {num_classes} classes"
        mend = "let its last layer have num_classes, which a constructor that names it is given"
        if output.shape[1] < num_classes:
            raise ConfigError(f"model._target_={target}: {gives}; {mend}")
        if output.shape[1] > num_classes and warns:
            warn(f"model._target_={target}: {gives}: the others are never right; {mend}")

    hook = module.register_forward_hook(check)
