"""The first outputs of a model, looked at before it trains: of a person's own classifier, and for
metrics of others.

What torch says of a wrong one is a riddle, and an evaluation comes late.
"""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn

from expt.data.iterable import IterableLoader
from expt.data.loading import Loader, ShardedLoader
from expt.errors import ConfigError, warn
from expt.training.learner import Learner

FEW = 2
"""Samples that metrics are tried out on."""


def check_first_output(module: nn.Module, target: str, num_classes: int, *, warns: bool) -> None:
    """Raise ConfigError once `module` gives what is no score for each class, and warn where it
    gives more of them.
    """

    def check(_: nn.Module, __: object, output: object) -> None:
        hook.remove()
        shape = (
            f"a tensor of shape {list(output.shape)}" if isinstance(output, torch.Tensor) else None
        )
        if not isinstance(output, torch.Tensor) or output.dim() != 2:
            what = shape or f"a {type(output).__name__}"
            raise ConfigError(
                f"model._target_={target}: gives {what}; return one tensor, [samples, num_classes]"
            )
        gives = (
            f"gives {output.shape[1]} outputs for each sample, and there are {num_classes} classes"
        )
        mend = "let its last layer have num_classes, which a constructor that names it is given"
        if output.shape[1] < num_classes:
            raise ConfigError(f"model._target_={target}: {gives}; {mend}")
        if output.shape[1] > num_classes and warns:
            warn(f"model._target_={target}: {gives}: the others are never right; {mend}")

    hook = module.register_forward_hook(check)


@torch.no_grad()
def check_metrics(learner: Learner, loader: Loader | None) -> None:
    """Raise ConfigError for a metric of `task.metrics` that doesn't take what the model makes of
    the first samples.

    Whatever else goes wrong is left to the run, and so are the metrics of a sharded model, of which
    there is no copy."""
    if (
        not learner.extra_metrics.names or learner.compiled
    ):  # of which each size of a batch takes its time
        return
    if not isinstance(loader, ShardedLoader) or isinstance(loader, IterableLoader):
        return
    batch = next(loader.first(FEW))
    with contextlib.suppress(RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        module = copy.deepcopy(
            learner.evaluated
        )  # a first batch may leave marks in it: buffers, a count
        module.eval()
        with learner.precision.autocast():
            outputs = learner.task.forward(module, batch)
        learner.extra_metrics.try_out(learner.task, outputs, batch)
