"""What lies in a person's folder of images and masks, and a pair of them decoded. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from expt.data.image_folder_files import (
    EXTENSIONS,
    MODES,
    Part,
    images_below,
    parts_there,
    read_image,
    stretched,
)
from expt.errors import DataError

if TYPE_CHECKING:
    import numpy as np

_MODES = ("1", "L", "P", "I", "I;16")  # one number for each pixel


class Pair(NamedTuple):
    """The files of an image and of its mask."""

    image: str
    mask: str


def list_parts(root: str | Path) -> dict[Part, list[Pair]]:
    """The pairs of each part that is there; see `list_pairs`."""
    root = Path(root)
    return {part: list_pairs(root, part) for part in parts_there(root)}


def refuse_without_train(root: Path) -> None:
    """Raise DataError where there is nothing to train on: an evaluation may have one of the other
    parts alone.
    """
    if not (root / "train").is_dir():
        _by_stem(root, root / "train" / "images")


def list_pairs(root: Path, part: Part) -> list[Pair]:
    """The pairs of one part, sorted by their path below `images`.

    Raises DataError for a missing folder, and for an image without a mask or a mask without an
    image."""
    images, masks = (_by_stem(root, root / part / kind) for kind in ("images", "masks"))
    for stem, image in images.items():
        if stem not in masks:
            raise DataError(
                f"{image} has no mask {root / part / 'masks' / stem}.png; add it, or remove the"
                " image"
            )
    for stem, mask in masks.items():
        if stem not in images:
            raise DataError(
                f"{mask} has no image in {root / part / 'images'}; add it, or remove the mask"
            )
    return [Pair(image, masks[stem]) for stem, image in images.items()]


def _by_stem(root: Path, folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        raise DataError(
            f"dataset.root={root}: no folder {folder}: expected {root}/train/images/NAME.jpg and "
            f"{root}/train/masks/NAME.png, and so in val and test"
        )
    found: dict[str, str] = {}
    for file in images_below(folder):
        stem = os.path.splitext(os.path.relpath(file, folder))[0]
        if stem in found:
            raise DataError(f"{found[stem]} and {file} have one name; rename or remove one of them")
        found[stem] = file
    if not found:
        raise DataError(
            f"no pictures in {folder} ({', '.join(EXTENSIONS)}); add some, or remove the folder"
        )
    return found


def decode(
    pair: Pair,
    image_size: tuple[int, int],
    check: Callable[[str, np.ndarray], None],
    channels: int = 3,
) -> tuple[np.ndarray, np.ndarray]:
    """The image, uint8 [height, width, channels], and the mask, int64 [height, width], resized:
    bilinear, and nearest.

    `check` gets the mask's file and all its values before that. Raises DataError for a file that
    cannot be read, and for a mask that is a colour picture or of another size."""
    image, mask = read_image(pair.image, MODES[channels]), read_image(pair.mask)
    values = numbers_of(mask, image, pair.mask, f" {pair.image}")
    check(pair.mask, values)
    return resized(image, values, image_size)


def numbers_of(mask: Any, image: Any, name: str, of: str = "") -> np.ndarray:
    """The class of each pixel of a picture, int64 [height, width].

    Raises DataError for a mask, `name`, that is a colour picture or of another size than its image.
    """
    import numpy as np

    if mask.mode not in _MODES:
        raise DataError(
            f"{name} is a picture of mode {mask.mode}; save its mask with one number for each"
            " pixel, as a grey or palette PNG"
        )
    if mask.size != image.size:
        raise DataError(
            f"{name} is {_size(mask)}, and its image{of} {_size(image)}; make them one size"
        )
    return np.array(mask).astype(np.int64)


def resized(
    image: Any, values: np.ndarray, image_size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """A picture as uint8 [height, width, channels], and its mask: bilinear, and nearest."""
    import numpy as np

    height, width = image_size
    if image.size != (width, height):
        image = stretched(image, image_size)
        # As Pillow's nearest, whose modes do not hold all numbers: the pixel in whose middle the
        # new one's lies.
        rows, columns = (
            ((np.arange(new) + 0.5) * old / new).astype(int)
            for new, old in zip(image_size, values.shape, strict=True)
        )
        values = np.ascontiguousarray(values[rows][:, columns])
    return np.array(image).reshape(height, width, -1), values


def _size(image: Any) -> str:
    return f"{image.height}x{image.width}"
