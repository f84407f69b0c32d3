"""The files of torchvision's datasets: where they lie, and how they get there, once for all workers. Free of torch."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from expt.config.datasets import Torchvision
from expt.data.cache import cache_dir
from expt.data.download import impatient
from expt.data.folders import walked
from expt.errors import DataError

Options = Mapping[str, Any]
_TRAIN: dict[str, Options | None] = {"train": {"train": True}, "test": {"train": False}}
_SPLIT: dict[str, Options | None] = {"train": {"split": "train"}, "test": {"split": "test"}}
_THREE: dict[str, Options | None] = {**_SPLIT, "val": {"split": "val"}}
_NO_TEST: dict[str, Options | None] = {"train": {"split": "train"}, "val": {"split": "val"}}
_ONE: dict[str, Options | None] = {"train": {}}
_SETS: dict[str, Options | None] = {"train": {"image_set": "train"}, "val": {"image_set": "val"}}
_PACKED = (".zip", ".tar", ".tgz", ".gz")  # what was unpacked counts, and not whether its archive is kept


class Kind(NamedTuple):
    """What is known of a dataset beforehand."""

    num_classes: int
    paths: tuple[str, ...]
    """Its files and folders, below the root."""
    parts: Mapping[str, Options | None]
    """What its class is constructed with for `train`, `val` and `test`, those that there are."""
    layout: str | None = None
    """Of its attribute `data`, uint8 images in memory: HW, HWC or CHW; None: it reads image by image."""
    fetched: bool = True
    """Whether torchvision can download it."""


KINDS = {
    "CIFAR10": Kind(10, ("cifar-10-batches-py",), _TRAIN, "HWC"),
    "CIFAR100": Kind(100, ("cifar-100-python",), _TRAIN, "HWC"),
    "Caltech101": Kind(101, ("caltech101",), _ONE),
    "Caltech256": Kind(257, ("caltech256",), _ONE),
    "Cityscapes": Kind(19, ("gtFine", "leftImg8bit"), _NO_TEST, fetched=False),
    "Country211": Kind(211, ("country211",), {**_SPLIT, "val": {"split": "valid"}}),
    "DTD": Kind(47, ("dtd",), _THREE),
    "EMNIST": Kind(47, ("EMNIST",), {part: {"split": "balanced", **(how or {})} for part, how in _TRAIN.items()}, "HW"),
    "EuroSAT": Kind(10, ("eurosat",), _ONE),
    "FGVCAircraft": Kind(100, ("fgvc-aircraft-2013b",), _THREE),
    "FashionMNIST": Kind(10, ("FashionMNIST",), _TRAIN, "HW"),
    "Flowers102": Kind(102, ("flowers-102",), _THREE),
    "Food101": Kind(101, ("food-101",), _SPLIT),
    "GTSRB": Kind(43, ("gtsrb",), _SPLIT),
    "Imagenette": Kind(10, ("imagenette2",), _NO_TEST),
    "KMNIST": Kind(10, ("KMNIST",), _TRAIN, "HW"),
    "MNIST": Kind(10, ("MNIST",), _TRAIN, "HW"),
    "OxfordIIITPet": Kind(37, ("oxford-iiit-pet",), {"train": {"split": "trainval"}, "test": {"split": "test"}}),
    "PCAM": Kind(2, ("pcam",), _THREE),
    "RenderedSST2": Kind(2, ("rendered-sst2",), _THREE),
    "SBDataset": Kind(21, ("img", "cls", "train.txt", "val.txt"), _SETS),
    "SEMEION": Kind(10, ("semeion.data",), _ONE, "HW"),
    "STL10": Kind(10, ("stl10_binary",), _SPLIT, "CHW"),
    "SUN397": Kind(397, ("SUN397",), _ONE),
    "SVHN": Kind(10, ("train_32x32.mat", "test_32x32.mat"), _SPLIT, "CHW"),
    "StanfordCars": Kind(196, ("stanford_cars",), _SPLIT),
    "USPS": Kind(10, ("usps.bz2", "usps.t.bz2"), _TRAIN, "HW"),
    "VOCSegmentation": Kind(21, ("VOCdevkit/VOC2012",), _SETS),
}


def root_of(dataset: Torchvision) -> Path:
    """The folder that the dataset's files lie in, or will, as torchvision lays them out."""
    return Path(dataset.root) if dataset.root is not None else cache_dir() / "data"


def missing(dataset: Torchvision) -> list[Path]:
    """What is not there of the dataset's files and folders."""
    return [path for name in KINDS[dataset.set].paths if not (path := root_of(dataset) / name).exists()]


def files(dataset: Torchvision) -> list[str]:
    """The dataset's files by their paths below the root, sorted; without the archives that they came from."""
    root, found = root_of(dataset), list[str]()
    for name in KINDS[dataset.set].paths:
        if not (root / name).is_dir():
            found.append(name)
            continue
        for where, _, names in walked(root / name):
            inside = [os.path.relpath(os.path.join(where, each), root) for each in names]
            found += [each for each in inside if not each.lower().endswith(_PACKED)]
    return sorted(found)


def obtain(dataset: Torchvision) -> None:
    """Have torchvision download what is missing, under a lock; whole, or not at all.

    Raises DataError that names the folder, where the files are not there and cannot be had.
    """
    if not missing(dataset):
        return
    if not KINDS[dataset.set].fetched:
        raise _absent(dataset, ", and its owners give it to those who have registered there alone")
    if not dataset.download:
        raise _absent(dataset, ", and dataset.download is false")
    root = root_of(dataset)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".download.lock"):
            if missing(dataset):  # another run may have done so meanwhile
                _fetch(dataset, root)
    except (OSError, RuntimeError, ImportError, ValueError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise _absent(dataset, f", and the download failed ({why})") from error
    finally:
        with contextlib.suppress(OSError):
            (root / ".download.lock").unlink()
        with contextlib.suppress(OSError):  # if the folder is empty
            root.rmdir()


def _fetch(dataset: Torchvision, root: Path) -> None:
    """Beside, and then in its place: torchvision takes half of an unpacked archive for the whole."""
    kind, beside = KINDS[dataset.set], Path(tempfile.mkdtemp(prefix=".download-", dir=root))
    try:
        cls: Any = getattr(importlib.import_module("torchvision.datasets"), dataset.set)
        with impatient(), contextlib.redirect_stdout(io.StringIO()):  # it prints each mirror
            for how in kind.parts.values():
                cls(str(beside), download=True, **(how or {}))
        for name in kind.paths:
            if not (root / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(beside / name, root / name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _absent(dataset: Torchvision, why: str) -> DataError:
    names, root = ", ".join(path.name for path in missing(dataset)), root_of(dataset)
    return DataError(
        f"dataset.set={dataset.set}: {names} not found in {root}{why}; put there what torchvision.datasets."
        f"{dataset.set} unpacks on a machine with a network, or give dataset.root=FOLDER that has it"
    )
