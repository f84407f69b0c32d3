"""What lies in a person's folder of images, and one of them decoded. Free of torch."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from expt.errors import DataError

Part: TypeAlias = Literal["train", "test"]
_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's


class Listing(NamedTuple):
    """The images of one split, class by class."""

    folder: Path
    """root/train or root/test"""
    files: list[str]
    labels: list[int]
    classes: tuple[str, ...]


def list_images(root: str | Path, split: Part) -> Listing:
    """The images of `split`, in the order of torchvision's ImageFolder.

    Raises DataError for a folder that is missing, has no classes, or has an empty class.
    """
    root = Path(root).expanduser()
    classes = class_folders(root)
    folder = split_folder(root, split)
    files: list[str] = []
    labels: list[int] = []
    empty = []
    for label, name in enumerate(classes):
        found = _images_below(folder / name)
        if not found:
            empty.append(str(folder / name))
        files += found
        labels += [label] * len(found)
    if empty:
        raise DataError(f"no images in the class folder {', '.join(empty)}; add some, or remove the folder")
    return Listing(folder, files, labels, classes)


def split_folder(root: Path, split: Part) -> Path:
    """root/train or root/test; root/val where there is no test."""
    folder = root / split
    return root / "val" if split == "test" and not folder.is_dir() and (root / "val").is_dir() else folder


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the classes, sorted: the same folders in the training and the test part.

    Raises DataError.
    """
    root = root.expanduser()
    train, test = split_folder(root, "train"), split_folder(root, "test")
    train_names, test_names = _subfolders(train), _subfolders(test)
    if train_names != test_names:
        only = [f"{train / name}" for name in train_names if name not in test_names]
        only += [f"{test / name}" for name in test_names if name not in train_names]
        raise DataError(
            f"{train} and {test} have different classes: only one of them has {', '.join(only)}; "
            "give both the same class folders"
        )
    return train_names


def decode(path: str, image_size: tuple[int, int]) -> np.ndarray:
    """An image as uint8 [height, width, 3]: scaled to cover that size, then cropped at the centre.

    The same bytes as torchvision's resize and center_crop, whose import takes a second. Raises DataError for a file
    that is no image.
    """
    from PIL import Image

    image = _read(path)
    height, width = image_size
    scale = max(height / image.height, width / image.width)
    covered = max(height, math.floor(image.height * scale)), max(width, math.floor(image.width * scale))
    if covered != (image.height, image.width):
        image = image.resize(covered[::-1], Image.Resampling.BILINEAR)
    top, left = round((covered[0] - height) / 2), round((covered[1] - width) / 2)
    return np.array(image.crop((left, top, left + width, top + height)))


def images_of_all_splits(root: str | Path) -> list[str]:
    """Every image of the dataset, by its path below `root`, sorted."""
    root = Path(root).expanduser()
    folders = [root / split for split in ("train", "val", "test")]
    return sorted(os.path.relpath(path, root) for folder in folders for path in _images_below(folder))


def _images_below(folder: Path) -> list[str]:
    return [
        os.path.join(where, name)
        for where, _, names in sorted(os.walk(folder, followlinks=True))
        for name in sorted(names)
        if name.lower().endswith(_EXTENSIONS)
    ]


def _subfolders(folder: Path) -> tuple[str, ...]:
    layout = f"expected {folder}/CLASS/IMAGE; dataset.root is the folder that holds train/ and test/"
    if not folder.is_dir():
        raise DataError(f"dataset.root={folder.parent}: no folder {folder}: {layout}")
    names = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    if not names:
        raise DataError(f"dataset.root={folder.parent}: no class folders in {folder}: {layout}")
    return names


def _read(path: str) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image ({error}); replace or remove it") from error
