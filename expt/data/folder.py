"""A person's folder of images: root/train/CLASS/*.jpg and root/test/CLASS/*.jpg; root/val stands in for a test."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset

from expt.errors import DataError


class FolderDataset(Dataset[tuple[Tensor, int]]):
    """Images of one split as uint8 [3, height, width]: scaled to cover that size, then cropped at the centre."""

    def __init__(self, samples: list[tuple[str, int]], classes: tuple[str, ...], image_size: tuple[int, int]) -> None:
        self.samples = samples
        self.classes = classes
        self._image_size = image_size
        self._v2: Any = importlib.import_module("torchvision.transforms.v2.functional")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        image = _read(path)
        height, width = self._image_size
        scale = max(height / image.height, width / image.width)
        size = [max(height, math.floor(image.height * scale)), max(width, math.floor(image.width * scale))]
        covered = self._v2.center_crop(self._v2.resize(image, size), [height, width])
        return self._v2.pil_to_tensor(covered), label


def image_folder(root: str | Path, split: Literal["train", "test"], image_size: tuple[int, int]) -> FolderDataset:
    """The images of `split`, listed by torchvision's ImageFolder.

    Raises DataError for a folder that is missing, has no classes, or has an empty class; when an image is read, for a
    file that is no image.
    """
    root = Path(root).expanduser()
    classes = class_folders(root)
    folder = split_folder(root, split)
    datasets = importlib.import_module("torchvision.datasets")  # 1 s: only where images are read
    listed = datasets.ImageFolder(folder, allow_empty=True)
    filled = {label for _, label in listed.samples}
    empty = [str(folder / name) for label, name in enumerate(classes) if label not in filled]
    if empty:
        raise DataError(f"no images in the class folder {', '.join(empty)}; add some, or remove the folder")
    return FolderDataset(listed.samples, classes, image_size)


def split_folder(root: Path, split: Literal["train", "test"]) -> Path:
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


def _subfolders(folder: Path) -> tuple[str, ...]:
    layout = f"expected {folder}/CLASS/IMAGE; dataset.root is the folder that holds train/ and test/"
    if not folder.is_dir():
        raise DataError(f"no folder {folder}: {layout}")
    names = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    if not names:
        raise DataError(f"no class folders in {folder}: {layout}")
    return names


def _read(path: str) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image ({error}); replace or remove it") from error
