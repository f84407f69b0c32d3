"""Arrays of samples in a .npy or .npz, mapped into memory where that can be. Free of torch."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from expt.errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    import numpy as np

NAMES = ("x", "images", "inputs")
"""Of an .npz that holds several arrays, the one that is taken."""


class Samples(NamedTuple):
    """An array, and what makes samples of a piece of it [n, ...]."""

    path: str
    array: np.ndarray
    """[N, ...]"""
    arranged: Callable[[np.ndarray], np.ndarray]


def opened(path: str) -> np.ndarray:
    """The array of a .npy, or that of an .npz that is alone or has one of NAMES.

    Raises DataError for a damaged file, ConfigError for an .npz of several others.
    """
    import numpy as np

    try:
        if path.lower().endswith(".npy"):
            array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
            return array
        with np.load(path, allow_pickle=False) as file:
            names = file.files
            name = (
                names[0]
                if len(names) == 1
                else next((name for name in NAMES if name in names), None)
            )
            if name is None:
                has = ", ".join(names) or "none"
                raise ConfigError(
                    f"{path}: holds the arrays {has}; call the one of the samples"
                    f" {' or '.join(NAMES)}"
                )
            found: np.ndarray = file[name]
            return found
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        what = first_line(error)
        raise DataError(
            f"{path} cannot be read as {Path(path).suffix} ({what}); mend or replace it"
        ) from error


def images(
    path: str, array: np.ndarray, data: Mapping[str, Any], *, in_unit_range: bool
) -> Samples:
    """Images of the size that a model was trained on, as [N, C, H, W]; C may also come last, or be
    missing.

    Raises ConfigError for other shapes, numbers that are neither uint8 nor float, and where they
    are to be `in_unit_range` for others than 0 to 1."""
    channels, (height, width) = data["channels"], data["image_size"]
    first, last, grey = (channels, height, width), (height, width, channels), (height, width)
    shape = array.shape
    if array.dtype.kind != "f" and array.dtype != "uint8":
        raise ConfigError(
            f"{path}: holds {array.dtype}; an image is uint8 from 0 to 255, or float from 0 to 1"
        )
    if shape in (first, last) or (channels == 1 and shape == grey):
        array, shape = array[None], (1, *shape)
    if shape[1:] == first:
        return Samples(path, array, _checked(path, in_unit_range))
    if shape[1:] == last:
        check = _checked(path, in_unit_range)
        return Samples(path, array, lambda piece: check(piece).transpose(0, 3, 1, 2))
    if channels == 1 and shape[1:] == grey:
        check = _checked(path, in_unit_range)
        return Samples(path, array, lambda piece: check(piece)[:, None])
    wanted = f"[images, {channels}, {height}, {width}]"
    raise ConfigError(
        f"{path}: holds {list(array.shape)}, and the run was trained on {wanted}; bring it to that"
    )


def _checked(path: str, in_unit_range: bool) -> Callable[[np.ndarray], np.ndarray]:
    def check(piece: np.ndarray) -> np.ndarray:
        if (
            in_unit_range
            and piece.dtype.kind == "f"
            and not (piece.min() >= 0 and piece.max() <= 1)
        ):
            low, high = piece.min(), piece.max()
            raise ConfigError(
                f"{path}: holds floats from {low:g} to {high:g}, expected 0 to 1; divide them"
                " by 255"
            )
        return piece

    return check


def any_samples(path: str, array: np.ndarray, data: Mapping[str, Any]) -> Samples:
    """Samples of a dataset of one's own, as that gives them to the model.

    Raises ConfigError for another shape.
    """
    shape = array.shape[1:]
    if "image_size" in data and len(shape) <= 3:
        seen, wanted = (1,) * (3 - len(shape)) + shape, (data["channels"], *data["image_size"])
        if seen != wanted:
            raise ConfigError(
                f"{path}: its samples are {list(shape)}, and the run was trained on {list(wanted)}"
            )
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"{path}: holds {array.dtype}; give numbers")
    return Samples(
        path, array, lambda piece: piece.astype("float32") if piece.dtype == "float64" else piece
    )
