"""torchvision's datasets of images and masks, by their names there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from expt.config.datasets import Torchvision, mask_classes
from expt.data.masks import MaskPictures, MaskValues, of_mask_pictures
from expt.data.source import Source
from expt.data.torchvision_files import obtain
from expt.data.torchvision_kinds import kind_of
from expt.data.torchvision_sets import construct

_Classes: TypeAlias = Callable[[np.ndarray], np.ndarray]
_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "Cityscapes": {"mode": "fine", "target_type": "semantic"},
    "OxfordIIITPet": {"target_types": "segmentation"},
    "SBDataset": {"mode": "segmentation"},
}
CITYSCAPES = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
"""The numbers in its masks that its benchmark counts, in the order of their classes;
torchvision.datasets has them.
"""


def source(dataset: Torchvision, num_workers: int, values: MaskValues) -> Source:
    """Its parts, read one by one; masks hold classes from 0 on, as they are counted where such
    models are compared.

    Raises DataError for files that are missing or damaged.
    """
    obtain(dataset)
    classes, sets = _classes_of(dataset.set, values.ignore_index), dict[str, MaskPictures]()
    for part in kind_of(dataset).parts:
        found = construct(dataset, part, **_ARGUMENTS.get(dataset.set, {}))
        size, channels = dataset.image_size, dataset.channels or 3
        sets[part] = MaskPictures(found, values, channels=channels, size=size, classes=classes)
    return of_mask_pictures(sets, mask_classes(dataset) or 0, num_workers)


def _classes_of(name: str, ignore_index: int) -> _Classes:
    """What makes the classes of a mask's numbers."""
    if name == "OxfordIIITPet":  # 1 is the pet, 2 what is around it, 3 the edge
        return lambda numbers: numbers - 1
    if name == "Cityscapes":
        table = _train_ids(ignore_index)
        return lambda numbers: table[np.clip(numbers, 0, 255)]
    if name in ("VOCSegmentation", "SBDataset"):  # 255 is an object's edge
        return lambda numbers: np.where(numbers == 255, ignore_index, numbers)
    return lambda numbers: numbers


def _train_ids(ignore_index: int) -> np.ndarray:
    """Of each of Cityscapes' 34 numbers its class among the 19 that its benchmark counts."""
    table = np.full(256, ignore_index, np.int64)
    table[list(CITYSCAPES)] = range(len(CITYSCAPES))
    return table
