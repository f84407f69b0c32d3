"""torchvision's datasets of classes, by their names there."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expt.config.datasets import Torchvision
from expt.data.image_folder_files import MODES
from expt.data.memory import InMemoryLoader, place
from expt.data.pictures import Pictures, of_pictures
from expt.data.source import Part, Source
from expt.data.torchvision_files import KINDS, Kind, obtain, root_of
from expt.errors import DataError


def source(dataset: Torchvision, device: torch.device, num_workers: int) -> Source:
    """Its parts: from memory where torchvision holds its images there and all have one size, else read one by one.

    Raises DataError for files that are missing or damaged.
    """
    obtain(dataset)
    kind = KINDS[dataset.set]
    sets = {part: construct(dataset, part) for part in kind.parts}
    in_memory, channels = None, 1 if kind.layout == "HW" else 3
    if kind.layout and dataset.image_size is None and dataset.channels in (None, channels):
        in_memory = {part: _in_memory(each, kind, device) for part, each in sets.items()}
    mode, size = MODES[dataset.channels or channels], dataset.image_size
    return of_pictures(
        {part: Pictures(each, mode, size) for part, each in sets.items()},
        _class_names(sets["train"], kind.num_classes),
        labels_of(sets["train"]),
        num_workers,
        in_memory,
    )


def labels_of(dataset: Any) -> Tensor | None:
    """The class of each sample, int64 [N], by what torchvision's classes keep; None where they keep none."""
    for name in ("targets", "labels", "_labels", "y"):
        if (found := getattr(dataset, name, None)) is not None:
            return torch.as_tensor(np.asarray(found)).long()
    samples = getattr(dataset, "_samples", None)
    return None if samples is None else torch.tensor([label for _, label in samples])


def construct(dataset: Torchvision, part: str, **more: Any) -> Any:
    """torchvision's own, of one part. Raises DataError for files that are missing or damaged."""
    cls: Any = getattr(importlib.import_module("torchvision.datasets"), dataset.set)
    root, how = root_of(dataset), {**(KINDS[dataset.set].parts[part] or {}), **more}
    if KINDS[dataset.set].fetched:
        how["download"] = False
    try:
        found = cls(str(root), **how)
        number = len(found)
    except ImportError as error:
        raise DataError(f"dataset.set={dataset.set}: torchvision needs {error.name} to read it; install it") from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, IndexError) as error:
        why = " ".join(str(error).split())
        if "pip install" in why:
            raise DataError(f"dataset.set={dataset.set}: {why}") from error
        raise DataError(
            f"dataset.set={dataset.set}: its files in {root} cannot be read ({why}); remove them, and fetch them again"
        ) from error
    if not number:
        raise DataError(f"dataset.set={dataset.set}: there are no samples for {part} in {root}; download it again")
    return found


def _in_memory(dataset: Any, kind: Kind, device: torch.device) -> Part:
    data, labels = torch.as_tensor(np.asarray(dataset.data)), labels_of(dataset)
    assert labels is not None
    images = {"HW": lambda: data[:, None], "HWC": lambda: data.permute(0, 3, 1, 2), "CHW": lambda: data}
    pixels = images[str(kind.layout)]().contiguous()
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= kind.num_classes:
        wrong = low if low < 0 else high
        raise DataError(f"{type(dataset).__name__}: holds the label {wrong}, expected 0 to {kind.num_classes - 1}")
    return Part(len(pixels), functools.partial(InMemoryLoader, place(pixels, device), labels))


def _class_names(dataset: Any, number: int) -> tuple[str, ...]:
    known = getattr(dataset, "classes", None) or getattr(dataset, "categories", None) or range(number)
    names = [each if isinstance(each, str) else each[0] if isinstance(each, tuple) else str(each) for each in known]
    return tuple(names) if len(names) == number else tuple(map(str, range(number)))
