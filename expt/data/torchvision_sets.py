"""torchvision's datasets of classes, labels and numbers, by their names there."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.config.datasets import Torchvision
from expt.config.torchvision_sets import targets_of
from expt.data.image_folder_files import MODES
from expt.data.lsun import Scenes
from expt.data.memory import InMemoryLoader, place
from expt.data.picture_numbers import Scales, of_numbers
from expt.data.pictures import Pictures, of_pictures
from expt.data.source import Part, Source
from expt.data.torchvision_files import obtain, root_of
from expt.data.torchvision_kinds import Kind, kind_of
from expt.errors import DataError

_POINTS = ("lefteye", "righteye", "nose", "leftmouth", "rightmouth")
_NUMBERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "landmarks": (
        "landmarks_align",
        tuple(f"{point}_{axis}" for point in _POINTS for axis in "xy"),
    ),
    "bbox": ("bbox", ("x", "y", "width", "height")),
}
"""Of what CelebA has beside labels and persons: the attribute, and the names of its numbers."""


def source(
    dataset: Torchvision,
    task: Any,
    device: torch.device,
    num_workers: int,
    scales: Scales | None = None,
) -> Source:
    """Its parts: from memory where torchvision holds its images there and all have one size, else
    read one by one.

    Numbers to predict are in units of `scales`, where these are given. Raises DataError for files
    that are missing or damaged."""
    obtain(dataset)
    kind = kind_of(dataset)
    sets = {part: found for part in kind.parts if _has_targets(found := construct(dataset, part))}
    mode, size = MODES[dataset.channels or kind.channels], dataset.image_size
    counts = dataset.set == "CLEVRClassification" and task.TARGETS == "numbers"
    if counts or targets_of(dataset.set, dataset.options) != "classes":
        values, names = _values_of(sets["train"], counts=counts)
        return of_numbers(
            lambda scaled: {
                part: Pictures(each, mode, size, _row(scaled)) for part, each in sets.items()
            },
            values,
            names,
            num_workers,
            scales=scales,
            standardises=dataset.standardise_targets,
        )
    names = _class_names(sets["train"], kind.num_classes)
    for part, each in sets.items():
        if kind.num_classes is None and _class_names(each, None) != names:
            raise DataError(
                f"dataset.set={dataset.set}: its {part} has other classes than its train; fetch"
                " both again"
            )
    in_memory = None
    if kind.layout and dataset.image_size is None and dataset.channels in (None, kind.channels):
        in_memory = {part: _in_memory(each, kind, device) for part, each in sets.items()}
    number_of = _number_of(sets["train"])
    pictures = {part: Pictures(each, mode, size, number_of) for part, each in sets.items()}
    return of_pictures(pictures, names, labels_of(sets["train"]), num_workers, in_memory)


def _has_targets(found: Any) -> bool:
    """Whether it has: FER2013's test has none, if it lies there as it was given out first."""
    samples = getattr(found, "_samples", None)
    return not samples or samples[0][1] is not None


def _row(scaled: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    return lambda target: scaled(torch.as_tensor(target).float().reshape(-1))


def _values_of(found: Any, *, counts: bool) -> tuple[Tensor, tuple[str, ...]]:
    """What is to be predicted of each sample, float32 [N, T], and the names of it."""
    if counts:
        counted = labels_of(found)
        assert counted is not None
        return counted.float()[:, None], ("objects",)
    (kind,) = found.target_type
    if kind == "attr":
        return found.attr.float(), tuple(name for name in found.attr_names if name)
    attribute, names = _NUMBERS[kind]
    return getattr(found, attribute).float(), names


def labels_of(found: Any) -> Tensor | None:
    """The class of each sample, int64 [N], by what torchvision's classes keep; None where they keep
    none.
    """
    if (special := _LABELS.get(type(found).__name__)) is not None:
        return torch.as_tensor(special(found)).long()
    for name in ("targets", "labels", "_labels", "y"):
        if (labels := getattr(found, name, None)) is not None:
            return torch.as_tensor(np.asarray(labels)).long()
    samples = getattr(found, "_samples", None)
    return None if samples is None else torch.tensor([label for _, label in samples])


def _persons(found: Any) -> Tensor:
    """CelebA's, numbered without gaps."""
    numbers: Tensor = found.identity[:, 0].unique(return_inverse=True)[1]
    return numbers


def _of_level(found: Any) -> Sequence[int]:
    """INaturalist's, of the level that was chosen."""
    (kind,) = found.target_type
    return [
        number if kind == "full" else found.categories_map[number][kind]
        for number, _ in found.index
    ]


_LABELS: Mapping[str, Callable[[Any], Any]] = {
    "CelebA": _persons,
    "INaturalist": _of_level,
    "QMNIST": lambda found: found.targets[:, 0],
}


def _number_of(found: Any) -> Callable[[Any], int]:
    """What makes the number of its class of a sample's target."""
    if type(found).__name__ != "CelebA":
        return int
    numbers = {
        person: number for number, person in enumerate(found.identity[:, 0].unique().tolist())
    }
    return lambda person: numbers[int(person)]


def construct(dataset: Torchvision, part: str, **more: Any) -> Any:
    """torchvision's own, of one part. Raises DataError for files that are missing or damaged."""
    root, kind = root_of(dataset), kind_of(dataset)
    how = {**(kind.parts[part] or {}), **more, **({"download": False} if kind.fetched else {})}
    try:
        cls: Any = getattr(importlib.import_module("torchvision.datasets"), dataset.set)
        found = _in_order(Scenes(root, **how) if dataset.set == "LSUN" else cls(str(root), **how))
        number = len(found)
    except ImportError as error:
        raise DataError(
            f"dataset.set={dataset.set}: torchvision needs {error.name} to read it; install it"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, IndexError) as error:
        why = " ".join(str(error).split())
        if "pip install" in why:
            raise DataError(f"dataset.set={dataset.set}: {why}") from error
        raise DataError(
            f"dataset.set={dataset.set}: its files in {root} cannot be read ({why}); remove them,"
            " and fetch them again"
        ) from error
    if not number:
        raise DataError(
            f"dataset.set={dataset.set}: there are no samples for {part} in {root}; download it"
            " again"
        )
    return found


def _in_order(found: Any) -> Any:
    """The same with its samples sorted, where torchvision has them as the file system lists them:
    on another machine
    in another order, so that workers of two would take some twice, and leave others out.
    """
    name = type(found).__name__
    if name == "INaturalist":
        found.index.sort()
    elif name == "Cityscapes":
        pairs = sorted(zip(found.images, found.targets, strict=True))
        found.images, found.targets = [image for image, _ in pairs], [masks for _, masks in pairs]
    elif name == "SUN397":
        base = Path(found.root) / name
        files = sorted(base.rglob("sun_*.jpg"))
        labels = [
            found.class_to_idx["/".join(file.relative_to(base).parts[1:-1])] for file in files
        ]
        return _Listed(files, labels, found.classes)
    elif name == "Omniglot":  # even its classes are numbered so
        folders = sorted(
            folder for folder in Path(found.target_folder).glob("*/*") if folder.is_dir()
        )
        listed = [
            (file, label)
            for label, folder in enumerate(folders)
            for file in sorted(folder.glob("*.png"))
        ]
        names = [f"{folder.parent.name}/{folder.name}" for folder in folders]
        return _Listed([file for file, _ in listed], [label for _, label in listed], names)
    return found


class _Listed(Dataset[tuple[Any, int]]):
    """Images in files, each of one class."""

    def __init__(
        self, files: Sequence[Path], targets: Sequence[int], classes: Sequence[str]
    ) -> None:
        self._files, self.targets, self.classes = files, targets, classes

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image  # late: of sets that are read as they lie alone

        with Image.open(self._files[index]) as picture:
            return picture.copy(), self.targets[index]


def _in_memory(dataset: Any, kind: Kind, device: torch.device) -> Part:
    data, labels = torch.as_tensor(np.asarray(dataset.data)), labels_of(dataset)
    assert labels is not None
    assert kind.num_classes is not None
    images = {
        "HW": lambda: data[:, None],
        "HWC": lambda: data.permute(0, 3, 1, 2),
        "CHW": lambda: data,
    }
    pixels = images[str(kind.layout)]().contiguous()
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= kind.num_classes:
        wrong = low if low < 0 else high
        raise DataError(
            f"{type(dataset).__name__}: holds the label {wrong}, expected 0 to"
            f" {kind.num_classes - 1}"
        )
    return Part(len(pixels), functools.partial(InMemoryLoader, place(pixels, device), labels))


def _class_names(found: Any, number: int | None) -> tuple[str, ...]:
    """By what torchvision keeps of them; all `number` of them, if that is known, or numbers."""
    known: Any = getattr(found, "classes", None) or getattr(found, "categories", None)
    if (special := _NAMES.get(type(found).__name__)) is not None:
        known = special(found)
    names = [str(each[0] if isinstance(each, tuple) else each) for each in known or ()]
    return (
        tuple(names) if number is None or len(names) == number else tuple(map(str, range(number)))
    )


def _levels(found: Any) -> Sequence[str]:
    (kind,) = found.target_type
    return found.all_categories if kind == "full" else list(found.categories_index[kind])


_NAMES: Mapping[str, Callable[[Any], Sequence[str]]] = {
    "CelebA": lambda found: list(map(str, found.identity[:, 0].unique().tolist())),
    "INaturalist": _levels,
    "LFWPeople": lambda found: list(found.class_to_idx),
}
