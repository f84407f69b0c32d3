"""Samples of a person's own Dataset that are looked at as they are read: a GPU says nothing of a wrong target."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sized
from typing import Any, cast

from torch import Tensor
from torch.utils.data import Dataset

from expt.config import datasets, tasks
from expt.data import masks
from expt.data.text import NO_TARGET
from expt.errors import DataError

Check = Callable[[Any], Any]
"""Gives a sample as it is to be used. Raises DataError that says what is wrong with it."""
Wrong = Callable[[Any, Any], "str | None"]
"""Says what is wrong with a sample's inputs and targets, which may be of any kind."""
_OF_THE_DATASET = ("collate", "vocab_size", "context")


class CheckedSamples(Dataset[Any]):
    """A Dataset whose samples are checked. Raises DataError, when it is read, for one that is wrong, by its index."""

    collate: Callable[[list[Any]], Any]

    def __init__(self, dataset: Dataset[Any], check: Check) -> None:
        self._dataset, self._check = dataset, check
        for name in _OF_THE_DATASET:
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    def __len__(self) -> int:
        return len(cast(Sized, self._dataset))

    def __getitem__(self, index: int) -> Any:
        sample = self._dataset[index]
        try:
            return self._check(sample)
        except DataError as error:
            raise DataError(f"sample {index}: {error}") from None


def checked(dataset: Dataset[Any], config: datasets.TargetDataset, task: Any) -> Dataset[Any]:
    """The dataset of `config`, whose samples are looked at where the configured `task` takes not any."""
    if isinstance(task, tasks.Segmentation):
        return CheckedSamples(dataset, functools.partial(masks.checked_mask, values=masks.values_of(config, task)))
    if isinstance(task, tasks.Multilabel):
        return CheckedSamples(dataset, _unless(_labels))
    if isinstance(task, tasks.LanguageModel) and hasattr(dataset, "vocab_size"):
        return CheckedSamples(dataset, _unless(_tokens(dataset.vocab_size)))
    return dataset


def _unless(wrong: Wrong) -> Check:
    """The sample as it is, unless something is wrong with its inputs and targets."""

    def check(sample: Any) -> Any:
        if isinstance(sample, list | tuple) and len(sample) == 2 and (told := wrong(*sample)):
            raise DataError(told)
        return sample

    return check


def _labels(_: Any, labels: Any) -> str | None:
    if not isinstance(labels, Tensor) or not (wrong := (labels != 0) & (labels != 1)).any():
        return None
    return (
        f"its target holds {labels[wrong][0].item():g}, expected 0 or 1 for each label; mend it, or use task=regression"
    )


def _tokens(vocab_size: int) -> Wrong:
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
                    f"its {name} hold the token {int(tokens[wrong][0])}, expected 0 to {vocab_size - 1} (vocab_size)"
                    f"{more}; mend it, or vocab_size"
                )
        return None

    return check
