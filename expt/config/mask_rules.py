"""Which datasets of masks go with which task, and what must be said of them."""

from __future__ import annotations

from typing import Any

from expt.config.datasets import (
    HuggingFace,
    SegmentationFolder,
    TargetDataset,
    Torchvision,
    has_masks,
    mask_classes,
)
from expt.config.torchvision_sets import MASK_SETS

_CHOICES = " or ".join(MASK_SETS)


def of_masks(dataset: object, task: Any) -> list[str]:
    """What does not go together, one line each, with the mend."""
    segments = task.TARGETS == "mask"
    if isinstance(dataset, Torchvision) and segments and dataset.set not in MASK_SETS:
        return [
            f"task=segmentation: torchvision's {dataset.set} has no masks; use"
            f" dataset.set={_CHOICES}"
        ]
    if isinstance(dataset, TargetDataset) and task.TARGETS == "mask":
        return _own(dataset, task)
    if not isinstance(dataset, SegmentationFolder | Torchvision | HuggingFace) or not has_masks(
        dataset, segments
    ):
        return []
    return [*_moved(dataset), *_classes(dataset, task)]


def _moved(dataset: SegmentationFolder | Torchvision | HuggingFace) -> list[str]:
    problems = []
    if dataset.augment.is_set:
        problems.append(
            "dataset.augment: would move images and leave their masks; leave it out of"
            f" {dataset.name}"
        )
    if getattr(dataset, "transforms", None):
        problems.append(
            "dataset.transforms: would move images and leave their masks; leave them out"
        )
    return problems


def _classes(dataset: SegmentationFolder | Torchvision | HuggingFace, task: Any) -> list[str]:
    known = mask_classes(dataset)
    if task.TARGETS == "mask":
        if known is None and task.num_classes is None:
            return [
                "task.num_classes: the dataset does not tell; give it, as in task.num_classes=21"
            ]
        if known is not None and task.num_classes not in (None, known):
            has = (
                "dataset.num_classes"
                if isinstance(dataset, SegmentationFolder)
                else f"{dataset.name}'s num_classes"
            )
            return [f"task.num_classes={task.num_classes}: {has}={known}; leave it out"]
    elif task.TARGETS != "any":
        what = (
            f"torchvision's {dataset.set}"
            if isinstance(dataset, Torchvision)
            else f"dataset={dataset.name}"
        )
        return [
            f"task={getattr(task, 'name', '')}: {what} has a mask for each image; use"
            " task=segmentation"
        ]
    return []


def _own(dataset: TargetDataset, task: Any) -> list[str]:
    if dataset.num_classes is not None:
        number = dataset.num_classes
        return [
            f"dataset.num_classes={number}: is of datasets of one class for each image; use"
            f" task.num_classes={number}"
        ]
    if task.num_classes is None:
        return [
            "task.num_classes: a dataset of your own does not tell; give it, as in"
            " task.num_classes=21"
        ]
    return []
