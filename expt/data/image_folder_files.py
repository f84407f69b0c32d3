"""What lies in a person's folder of images, and one of them decoded. Free of torch."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from expt.data.folders import files_below
from expt.errors import DataError

if TYPE_CHECKING:
    import numpy as np

Part: TypeAlias = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = ("train", "val", "test")
MODES = {1: "L", 3: "RGB"}
"""Pillow's, by channels"""
EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".png",
    ".ppm",
    ".bmp",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
)  # torchvision's


class Listing(NamedTuple):
    """The images of one split, class by class."""

    folder: Path
    """root/train, root/val or root/test"""
    files: list[str]
    labels: list[int]
    classes: tuple[str, ...]


def list_parts(root: str | Path) -> dict[Part, Listing]:
    """The images of each part that is there; see `list_images`."""
    root = Path(root)
    return {part: list_images(root, part) for part in parts_there(root)}


def parts_there(root: Path) -> list[Part]:
    """Those of which there is a folder; train, for what is said of it, where there is none."""
    return [part for part in PARTS if (root / part).is_dir()] or ["train"]


def list_images(root: str | Path, part: Part) -> Listing:
    """The images of one part, in the order of torchvision's ImageFolder.

    Raises DataError for a folder that is missing, has no classes, or has an empty class.
    """
    root = Path(root)
    classes = class_folders(root)
    folder = root / part
    files: list[str] = []
    labels: list[int] = []
    empty = []
    for label, name in enumerate(classes):
        found = images_below(folder / name)
        if not found:
            empty.append(str(folder / name))
        files += found
        labels += [label] * len(found)
    if empty:
        raise DataError(
            f"no images in the class folder {', '.join(empty)}; add some, or remove the folder"
        )
    return Listing(folder, files, labels, classes)


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the classes, sorted: the same folders in every part.

    Raises DataError.
    """
    first, *others = (root / part for part in parts_there(root))
    names = _subfolders(first)
    for other in others:
        others_names = _subfolders(other)
        only = [f"{first / name}" for name in names if name not in others_names]
        only += [f"{other / name}" for name in others_names if name not in names]
        if only:
            raise DataError(
                f"{first} and {other} have different classes: only one of them has"
                f" {', '.join(only)}; give both the same class folders"
            )
    return names


def refuse_without_train(root: Path) -> None:
    """Raise DataError where there is nothing to train on: an evaluation may have one of the other
    parts alone.
    """
    if not (root / "train").is_dir():
        _subfolders(root / "train")


def decode(path: str, image_size: tuple[int, int] | None, channels: int = 3) -> np.ndarray:
    """An image as uint8 [height, width, channels]: scaled to cover that size, then cropped at the
    centre.

    Without a size it is as it lies; of one channel it is grey.
    The same bytes as torchvision's resize and center_crop, whose import takes a second. Raises
    DataError for a file that is no image."""
    import numpy as np

    image = read_image(path, MODES[channels])
    pixels = np.array(image if image_size is None else fitted(image, image_size))
    return pixels.reshape(*pixels.shape[:2], channels)


def fitted(image: Any, image_size: tuple[int, int]) -> Any:
    """A picture of Pillow's scaled to cover height and width, then cropped at the centre."""
    from PIL import Image

    height, width = image_size
    scale = max(height / image.height, width / image.width)
    covered = (
        max(height, math.floor(image.height * scale)),
        max(width, math.floor(image.width * scale)),
    )
    if covered != (image.height, image.width):
        image = image.resize(covered[::-1], Image.Resampling.BILINEAR)
    top, left = round((covered[0] - height) / 2), round((covered[1] - width) / 2)
    return image.crop((left, top, left + width, top + height))


def stretched(image: Any, image_size: tuple[int, int]) -> Any:
    """A picture of Pillow's resized to height and width, whatever its shape."""
    from PIL import Image

    return image.resize(image_size[::-1], Image.Resampling.BILINEAR)


def images_of_all_splits(root: str | Path) -> list[str]:
    """Every image of the dataset, by its path below `root`, sorted."""
    root = Path(root)
    folders = [root / part for part in PARTS]
    return sorted(
        os.path.relpath(path, root) for folder in folders for path in images_below(folder)
    )


def images_below(folder: Path) -> list[str]:
    """The pictures in a folder and in those below it, each folder's sorted."""
    return files_below(folder, EXTENSIONS)


def _subfolders(folder: Path) -> tuple[str, ...]:
    layout = (
        f"expected {folder}/CLASS/IMAGE; dataset.root is the folder that holds train/, val/ and"
        " test/"
    )
    if not folder.is_dir():
        raise DataError(f"dataset.root={folder.parent}: no folder {folder}: {layout}")
    names = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    if not names:
        raise DataError(f"dataset.root={folder.parent}: no class folders in {folder}: {layout}")
    return names


def in_mode(image: Any, mode: str) -> Any:
    """A picture of Pillow's in L or RGB, of 16 bits too, which Pillow's own `convert` clips at 255.

    Raises ValueError for pixels whose range nobody knows.
    """
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are 32-bit {'floats' if image.mode == 'F' else 'integers'}; save it with 8"
            " or 16 bits"
        )
    return image.convert(mode)


def read_image(path: str, mode: str | None = None) -> Any:
    """A picture of Pillow's, in its own mode or another.

    Raises DataError for a file that is none.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return in_mode(image, mode) if mode else image.copy()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path} cannot be read as an image ({error}); replace or remove it"
        ) from error
