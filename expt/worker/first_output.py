"""The first outputs of a model, checked before it trains: those of a custom classifier, and for
metrics.

What torch says of a wrong one is a riddle, and an evaluation comes late.
"""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn

from expt.data.loading import Loader, ShardedLoader
from expt.data.samples import IterableLoader
from expt.errors import ConfigError, warn
from expt.training.learner import Learner

FEW = 2
"""Samples that metrics are tried on."""


def check_first_output(module: nn.Module, target: str, num_classes: int, *, warns: bool) -> None:
    """Have the first forward pass raise ConfigError for what is no score for each class.

    It warns where there are more scores than classes."""

    def check(_: nn.Module, __: object, output: object) -> None:
        hook.remove()
        where = f"model._target_={target}: gives"
        if not isinstance(output, torch.Tensor) or output.dim() != 2:
            what = f"a {type(output).__name__}"
            if isinstance(output, torch.Tensor):
                what = f"a tensor of shape {list(output.shape)}"
            raise ConfigError(f"{where} {what}; return one tensor, [samples, num_classes]")
        outputs = output.shape[1]
        gives = f"{where} {outputs} outputs for each sample, and there are {num_classes} classes"
        fix = "let its last layer have num_classes, which a constructor that names it is given"
        if outputs < num_classes:
            raise ConfigError(f"{gives}; {fix}")
        if outputs > num_classes and warns:
            warn(f"{gives}: the others are never right; {fix}")

    hook = module.register_forward_hook(check)


@torch.no_grad()
def check_metrics(learner: Learner, loader: Loader | None) -> None:
    """Raise ConfigError for one of `task.metrics` that doesn't take outputs of the first samples.

    Whatever else goes wrong is left to the run, and so are metrics of a sharded model, of which
    there is no copy."""
    if not learner.extra_metrics.names or learner.compiled:  # which takes its time for each size
        return
    if not isinstance(loader, ShardedLoader) or isinstance(loader, IterableLoader):
        return
    batch = next(loader.first(FEW))
    with contextlib.suppress(RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        module = copy.deepcopy(learner.evaluated)  # a first batch may leave marks in it
        module.eval()
        with learner.precision.autocast():
            outputs = learner.task.forward(module, batch)
        learner.extra_metrics.try_out(learner.task, outputs, batch)
