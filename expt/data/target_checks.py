"""What a task takes of the samples of a person's own Dataset."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.config import datasets
from expt.data import masks
from expt.data.checked_samples import Check
from expt.data.stream import class_of, labelled
from expt.data.text import NO_TARGET
from expt.errors import DataError

_Wrong = Callable[[Any, Any], "str | None"]
"""Says what is wrong with a sample's inputs and targets, which may be of any kind."""


def check_for(dataset: Dataset[Any], config: datasets.TargetDataset, task: Any) -> Check:
    """What looks at the samples of `dataset`, where the configured `task` takes not any."""
    if task.TARGETS == "mask":
        return functools.partial(masks.checked_mask, values=masks.values_of(config, task))
    if task.TARGETS == "labels":
        return functools.partial(_unless, wrong=functools.partial(_target, dataset, _label))
    if task.TARGETS == "numbers":
        return functools.partial(_unless, wrong=functools.partial(_target, dataset, _number))
    if task.TARGETS == "tokens" and hasattr(dataset, "vocab_size"):
        return functools.partial(_unless, wrong=_tokens(dataset.vocab_size))
    return _any


def _any(sample: Any) -> Any:
    return sample


def checked_class(sample: Any, num_classes: int) -> tuple[Any, int]:
    """The sample (inputs, label), its label a number. Raises DataError where it is no class."""
    inputs, label = labelled(sample, "inputs")
    return inputs, class_of(label, num_classes)


def _unless(sample: Any, wrong: _Wrong) -> Any:
    """The sample as it is. Raises DataError where something is wrong with its inputs and targets."""
    if isinstance(sample, list | tuple) and len(sample) == 2 and (told := wrong(*sample)):
        raise DataError(told)
    return sample


def _target(
    dataset: Dataset[Any], wrong: Callable[[Tensor], str | None], _: Any, target: Any
) -> str | None:
    """What is wrong with the numbers of a target; of a dataset with a method `collate` it may be no
    tensor yet.
    """
    if isinstance(target, Tensor | np.ndarray | np.number | float | int):
        return wrong(torch.as_tensor(target))
    if hasattr(dataset, "collate"):
        return None
    return (
        f"its target is a {type(target).__name__}, expected a tensor; return torch.tensor(target)"
    )


def _label(target: Tensor) -> str | None:
    if not (wrong := (target != 0) & (target != 1)).any():
        return None
    return (
        f"its target holds {target[wrong][0].item():g}, expected 0 or 1 for each label; mend it, or"
        " use task=regression"
    )


def _number(target: Tensor) -> str | None:
    if not (wrong := ~torch.isfinite(target)).any():
        return None
    return f"its target holds {target[wrong][0].item()}; mend it, or leave the sample out"


def _tokens(vocab_size: int) -> _Wrong:
    def check(inputs: Any, targets: Any) -> str | None:
        for name, tokens, also in (("inputs", inputs, ()), ("targets", targets, (NO_TARGET,))):
            if not isinstance(tokens, Tensor):
                continue
            if tokens.is_floating_point():
                return f"its {name} are {tokens.dtype}; let them be tokens, int64"
            wrong = (tokens < 0) | (tokens >= vocab_size)
            for number in also:
                wrong &= tokens != number
            if wrong.any():
                more = "".join(f", or {number} where nothing counts" for number in also)
                return (
                    f"its {name} hold the token {int(tokens[wrong][0])}, expected 0 to"
                    f" {vocab_size - 1} (vocab_size){more}; mend it, or vocab_size"
                )
        return None

    return check
