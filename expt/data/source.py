"""A dataset as it is found, before it is split and batched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expt.data.augment import Mixing
from expt.data.checked_samples import build_transforms
from expt.data.kinds import DatasetConfig
from expt.data.loader import Load, Loader
from expt.data.loading import LoaderOptions
from expt.data.overlap import Digests
from expt.errors import ConfigError, DataError, described, listed, warn
from expt.features import Features

UNEVEN = 0.1
"""The least by which a class's share exceeds an even one if it is reported."""


class Part(NamedTuple):
    """The training, validation or test part of a dataset, before it is split and batched."""

    size: int | None
    """None where samples are not counted"""
    load: Load

    def whole(self, options: LoaderOptions) -> Loader:
        """Return a loader of all its samples."""
        return self.load(torch.arange(self.size or 0), options)


def _of_nothing(indices: Tensor, options: LoaderOptions) -> Loader:
    raise DataError("there is no train; add it")


NOTHING = Part(0, _of_nothing)
"""An empty training part, for an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The parts of a dataset, and the facts about its samples."""

    features: Features
    example: tuple[Any, Any]
    """inputs and targets of one sample"""
    train: Part
    val: Part | None = None
    """where it is a part of its own, and not held out of train"""
    test: Part | None = None
    classes: Tensor | None = None
    """of the training samples [N], where each has one"""
    groups: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """of the samples of each part [N], where those of one are held out together"""
    digests: Callable[[str], Digests] | None = None
    """the digests of the samples of a part; None where they are not known"""
    in_random_order: bool = False
    """whether the training samples come in one"""
    is_stream: bool = False
    """whether they come only one after the other, so that none can be held out"""
    fitted: Callable[[Tensor], Source] | None = None
    """the same, fitted to the training samples at these indices, such as by their means"""
    targets_of: Callable[[Tensor], Tensor] | None = None
    """numbers that are the targets of the training samples at these indices, or of some; of masks
    those that occur"""
    sees_few: bool = False
    """whether these are only of a few samples"""
    pictures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """those of each part that are not held in memory"""
    notes: Sequence[str] = ()
    """warnings for the author of a custom dataset or of a table"""

    @property
    def counted(self) -> Tensor | None:
        """The `classes`, where they are the numbers of those that the targets name."""
        found, number = self.classes, self.features.shapes.get("num_classes", 0)
        if found is None or not len(found) or found.is_floating_point():
            return None
        return found if 0 <= int(found.min()) <= int(found.max()) < number else None

    def known_targets(self, chosen: Tensor) -> Tensor | None:
        """Return those of the training samples at these indices, or of some, where that can be."""
        if (classes := self.counted) is not None:
            return classes[chosen]
        return self.targets_of(chosen) if self.targets_of else None


def majority_of(names: Sequence[str], counts: Sequence[int]) -> tuple[str, float] | tuple[()]:
    """Return the class of most samples and its share, if that alone makes a good accuracy."""
    most = max(counts, default=0)
    share = most / sum(counts) if most else 0.0
    return (names[counts.index(most)], share) if share > UNEVEN + 1 / max(1, len(counts)) else ()


def warn_of_absent(dataset: DatasetConfig, source: Source, train: Tensor) -> None:
    """Warn of classes that no training sample has; if a few are read, of a single class only."""
    targets = source.features.targets
    absent = targets.absent(lambda: source.known_targets(train))
    number = targets.shapes.get("num_classes", 0)
    if targets.has_one_class and number == 1:
        warn(f"{dataset.label}: all samples are of one class; nothing can be learned of it")
    if absent and not (source.sees_few and len(absent) < number - 1):
        warn(
            f"{dataset.label}: no training sample has the class {listed(absent)}, which can't be"
            f" learned; {targets.absent_fix}"
        )


def refuse_uncounted(
    dataset: DatasetConfig, epoch_steps: int | None, overfit_batches: int | None
) -> None:
    """Raise ConfigError for keys that samples without a number can't have, or need."""
    given = {
        "dataset.train_limit": dataset.train_limit,
        "dataset.folds": dataset.folds,
        "overfit_batches": overfit_batches,
    }
    for key, value in given.items():
        if value is not None:
            raise ConfigError(f"{key}={value}: needs a dataset with __len__; use {key}=null")
    if not epoch_steps:
        raise ConfigError(
            f"{dataset.label}: has no __len__ that says where an epoch ends; give epoch_steps, or"
            " max_steps for a run of one epoch"
        )


def check_batch(num_samples: int, batch_size: int, parts: int) -> None:
    """Raise DataError where there is no whole batch, which is to be a multiple of `parts`."""
    if num_samples < batch_size:
        fits = num_samples // parts * parts
        smaller = f"batch_size={fits}, or " if fits else ""
        raise DataError(
            f"the training set has {num_samples} samples, fewer than batch_size={batch_size}; use"
            f" {smaller}drop_last=false"
        )


def mixing_of(source: Source, mixup: float | None, cutmix: float | None) -> Mixing | None:
    """Return the mixing of samples, if there is any. Raise ConfigError if they can't be mixed."""
    inputs = source.example[0]
    for key, value, least in (("mixup", mixup, 1), ("cutmix", cutmix, 3)):
        if value and not (isinstance(inputs, Tensor) and least <= inputs.dim() <= 3):
            what = "cuts images" if key == "cutmix" else "adds tensors"
            raise ConfigError(
                f"{key}={value}: {what}, and a sample's inputs are {described(inputs)}; use"
                f" {key}=null"
            )
    number = source.features.shapes.get("num_classes", 0)
    return Mixing(number, mixup, cutmix) if mixup or cutmix else None


def as_evaluated(dataset: DatasetConfig, options: LoaderOptions) -> LoaderOptions:
    """Return the options with the transforms of evaluations."""
    key, chosen = "dataset.eval_transforms", getattr(dataset, "eval_transforms", None) or ()
    transforms = build_transforms(chosen, key)
    return dataclasses.replace(options, transforms=transforms, transforms_key=key)
