"""Files below a folder, and pictures in them. Free of torch."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expt.errors import DataError

if TYPE_CHECKING:
    import numpy as np

PARTS = ("train", "val", "test")
MODES = {1: "L", 3: "RGB"}
"""Pillow's, by channels"""
# torchvision's
EXTENSIONS = tuple(".jpg .jpeg .png .ppm .bmp .pgm .tif .tiff .webp".split())


def files_below(folder: str | Path, suffixes: str | tuple[str, ...] = "") -> list[str]:
    """Return the files with such names in a folder and below it, each folder's sorted.

    Hidden files and folders are left out. Linked folders are followed, but not in circles.
    """
    found = []
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in _shown(folders) if not _leads_back(where, name)]
        found.append((where, [name for name in _shown(names) if name.lower().endswith(suffixes)]))
    return [os.path.join(where, name) for where, names in sorted(found) for name in sorted(names)]


def names_below(folder: str | Path, suffixes: str | tuple[str, ...] = "") -> list[str]:
    """Return the paths below `folder` of such files, sorted."""
    return sorted(os.path.relpath(path, folder) for path in files_below(folder, suffixes))


def _shown(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(".")]


def _leads_back(where: str, name: str) -> bool:
    path = os.path.join(where, name)
    return os.path.islink(path) and Path(os.path.realpath(where)).is_relative_to(
        os.path.realpath(path)
    )


def parts_there(root: str | Path) -> list[str]:
    """Return those of train, val and test of which there is a folder; train if there is none."""
    return [part for part in PARTS if (Path(root) / part).is_dir()] or ["train"]


def names_of_parts(root: str | Path) -> list[str]:
    """Return every picture of the parts by its path below `root`, sorted.

    Raise DataError for one that is no file.
    """
    names = sorted(
        os.path.relpath(path, root)
        for part in PARTS
        for path in files_below(Path(root) / part, EXTENSIONS)
    )
    for name in names:
        if not os.path.isfile(path := os.path.join(root, name)):
            raise DataError(f"dataset.root={root}: {path} is no file, or leads nowhere; remove it")
    return names


def open_picture(source: Any, mode: str | None = None, name: object = "") -> Any:
    """Return the picture of Pillow's in a file, or one that is open, in its own mode or another.

    Raise DataError for what is none, by its path, or by the `name` of one that is open.
    """
    from PIL import Image

    is_path = isinstance(source, str | Path)
    with refuse_damaged(source if is_path else name):
        if not is_path:
            return in_mode(source, mode) if mode else source
        with Image.open(source) as picture:
            return in_mode(picture, mode) if mode else picture.copy()


@contextlib.contextmanager
def refuse_damaged(name: object) -> Iterator[None]:
    """Raise DataError for what Pillow raises of a picture."""
    from PIL.Image import DecompressionBombError

    try:
        yield
    except (OSError, ValueError, SyntaxError, DecompressionBombError) as error:
        raise DataError(
            f"{name} cannot be read as an image ({error}); replace or remove it"
        ) from error


def in_mode(image: Any, mode: str) -> Any:
    """Return a picture in L or RGB, of 16 bits too, which Pillow's own `convert` clips at 255.

    Raise ValueError for pixels whose range nobody knows.
    """
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        kind = "floats" if image.mode == "F" else "integers"
        raise ValueError(f"its pixels are 32-bit {kind}; save it with 8 or 16 bits")
    return image.convert(mode)


def decode(path: str, image_size: tuple[int, int] | None, channels: int = 3) -> np.ndarray:
    """Return an image as uint8 [height, width, channels], fitted to a size, if there is one."""
    import numpy as np

    image = open_picture(path, MODES[channels])
    pixels = np.array(image if image_size is None else fit(image, image_size))
    return pixels.reshape(*pixels.shape[:2], channels)


def fit(image: Any, image_size: tuple[int, int]) -> Any:
    """Scale a picture to cover height and width, then crop it at the centre.

    The bytes are those of torchvision's resize and center_crop, whose import takes a second.
    """
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


def stretch(image: Any, image_size: tuple[int, int]) -> Any:
    """Resize a picture to height and width, whatever its shape."""
    from PIL import Image

    return image.resize(image_size[::-1], Image.Resampling.BILINEAR)
