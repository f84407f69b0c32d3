"""A dataset as it is found, before it is split and batched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expt.data.loader import Load, Loader
from expt.data.loading import LoaderOptions
from expt.data.overlap import Digests
from expt.errors import DataError
from expt.features import Features


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
    lengths: Tensor | None = None
    """tokens of each training sample [N], where they differ"""
    groups: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """of the samples of each part [N], where those of one are held out together"""
    digests: Callable[[str], Digests] | None = None
    """the digests of the samples of a part; None where they are not known"""
    in_random_order: bool = False
    """whether the training samples come in one"""
    is_stream: bool = False
    """whether they come only one after the other, so that none can be held out"""
    fitted: Callable[[Tensor], Source] | None = None
    """the same, fitted to the training samples at these indices, such as by their means; see fit"""
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

    def fit(self, chosen: Tensor) -> Source:
        """Return the source fitted to the training samples at these indices, if it can be."""
        if self.fitted is None:
            return self
        found = self.fitted(chosen)
        notes = [*dict.fromkeys((*self.notes, *found.notes))]
        return dataclasses.replace(found, groups=self.groups, digests=self.digests, notes=notes)

    def known_targets(self, chosen: Tensor) -> Tensor | None:
        """Return those of the training samples at these indices, or of some, where that can be."""
        if (classes := self.counted) is not None:
            return classes[chosen]
        return self.targets_of(chosen) if self.targets_of else None
