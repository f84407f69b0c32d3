"""The files that a run's model may be asked about, of the kind that it was trained on; no torch."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from expt.data.columns import Column, as_numbers, columns_of, number_of
from expt.data.image_files import EXTENSIONS, files_below
from expt.data.kinds import DatasetConfig
from expt.errors import ConfigError, DataError, did_you_mean, first_line

if TYPE_CHECKING:
    import numpy as np

ARRAYS = (".npy", ".npz")
TABLES = (".csv", ".parquet", *ARRAYS)
NAMES = ("x", "images", "inputs")
"""Of an .npz with several arrays, the one that is taken."""


class Kind(NamedTuple):
    """What the files hold."""

    name: Literal["pictures", "rows", "texts", "samples"]
    noun: str
    """A sample of it."""
    suffixes: tuple[str, ...]
    """Of a file that is named; empty where any will do."""
    below: tuple[str, ...]
    """Of those that are looked for in a folder."""


PICTURES = Kind("pictures", "image", (*EXTENSIONS, *ARRAYS), EXTENSIONS)
ROWS = Kind("rows", "row", TABLES, TABLES)
TEXTS = Kind("texts", "line", (), (".txt",))
SAMPLES = Kind("samples", "sample", ARRAYS, ARRAYS)


def kind_of(dataset: DatasetConfig, data: Mapping[str, Any]) -> Kind:
    """Return what a model takes, by its dataset and by the shapes in its record."""
    if dataset.has_tokens:
        return TEXTS
    if dataset.has_rows:
        return ROWS
    custom = dataset.custom_class and (dataset.passes_as_is or "channels" not in data)
    return SAMPLES if custom or "vocab_size" in data else PICTURES


def list_files(kind: Kind, given: Sequence[Path]) -> list[str]:
    """Return the files that are named, and of a folder those below it, sorted by folder.

    Raise ConfigError for a path where nothing lies, a folder without such files, and a file of
    another kind.
    """
    found = list[str]()
    for path in given:
        wanted = ", ".join(kind.below if path.is_dir() else kind.suffixes)
        if path.is_dir():
            # A part of a segmentation_folder has its masks beside its images.
            has_masks = (
                kind is PICTURES and (path / "images").is_dir() and (path / "masks").is_dir()
            )
            below = files_below(path / "images" if has_masks else path, kind.below)
            if not below:
                raise ConfigError(
                    f"{path}: no {kind.name} lie in it or below it; expected {wanted}"
                )
            found += below
        elif not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder")
        elif kind.suffixes and path.suffix.lower() not in kind.suffixes:
            raise ConfigError(f"{path}: the run was trained on {kind.name}; give {wanted}")
        else:
            found.append(str(path))
    if kind is PICTURES and len({path.lower().endswith(ARRAYS) for path in found}) > 1:
        raise ConfigError("pictures and arrays: give one of them at a time")
    return found


class Samples(NamedTuple):
    """The samples of a file that holds several."""

    path: str
    array: np.ndarray
    """[n, ...] in the model's layout; of a table the features, float64 [n, F]."""
    wrong: Mapping[int, str] = {}
    """Why some rows have no features, by their place."""


def open_samples(path: str, kind: Kind, dataset: DatasetConfig, data: Mapping[str, Any]) -> Samples:
    """Return the samples in an array's file or a table, for a model that was trained on `data`.

    Raise ConfigError for another shape, for numbers that the model does not take, and for a table
    without its columns, DataError for a damaged file.
    """
    if kind is ROWS:
        return _rows(path, data)
    array = _array(path)
    if array.ndim < 2 or not len(array) or array.dtype.kind not in "biuf":
        raise ConfigError(
            f"{path}: is {list(array.shape)} of {array.dtype}; give samples of numbers"
        )
    if kind is PICTURES:
        return Samples(path, _images(path, array, data))
    shape, wanted = array.shape[1:], (data.get("channels"), *data.get("image_size", ()))
    if len(wanted) > 1 and len(shape) <= 3 and (1,) * (3 - len(shape)) + shape != wanted:
        raise ConfigError(f"{path}: samples are {list(shape)}, not {list(wanted)}")
    return Samples(path, array)


def _array(path: str) -> np.ndarray:
    """Return the array of a .npy, mapped into memory, or that of an .npz that has one of NAMES."""
    import numpy as np

    try:
        if path.lower().endswith(".npy"):
            array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
            return array
        with np.load(path, allow_pickle=False) as file:
            names = [name for name in file.files if name in NAMES or len(file.files) == 1]
            if not names:
                has = ", ".join(file.files) or "none"
                raise ConfigError(f"{path}: holds the arrays {has}; call one {' or '.join(NAMES)}")
            array = file[names[0]]
            return array
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({first_line(error)}); replace it") from error


def _images(path: str, array: np.ndarray, data: Mapping[str, Any]) -> np.ndarray:
    """Return images, or one, as [n, C, H, W]."""
    channels, size = data["channels"], tuple(data["image_size"])
    if array.dtype.kind != "f" and array.dtype != "uint8":
        raise ConfigError(f"{path}: holds {array.dtype}; give uint8, or floats from 0 to 1")
    shapes = [(channels, *size), (*size, channels), *([size] if channels == 1 else [])]
    images = array[None] if array.shape in shapes else array
    if images.shape[1:] not in shapes:
        wanted = f"[images, {channels}, {', '.join(map(str, size))}]"
        raise ConfigError(f"{path}: holds {list(array.shape)}, and the model takes {wanted}")
    if images.ndim == 3:
        return images[:, None]
    return images if images.shape[1:] == shapes[0] else images.transpose(0, 3, 1, 2)


def _rows(path: str, data: Mapping[str, Any]) -> Samples:
    """Return the columns that a model takes of a table: by name, or all but the targets."""
    import numpy as np

    damaged, names = dict[int, str](), data.get("feature_names", ())
    columns: Mapping[str, Column]
    if path.lower().endswith(".npy"):
        columns, names = {"x": _array(path)}, ()  # features alone, in their order
    else:
        columns = columns_of(Path(path), damaged)
    if not len(next(iter(columns.values()))):
        raise DataError(f"{path}: has no rows; give it some")
    chosen = _chosen(path, columns, names, data.get("target_names", ()), data["image_size"][1])
    numbers = {name: _numbers(columns[name]) for name, _ in chosen}
    features = np.stack([numbers[name][:, part] for name, part in chosen], axis=1)
    bad, wrong = ~(np.abs(features) <= np.finfo(np.float32).max), dict(damaged)
    for row in map(int, np.flatnonzero(bad.any(1))):
        name, _ = chosen[int(np.argmax(bad[row]))]
        cell = str(columns[name][row])[:40]
        wrong.setdefault(row, f"column {name} holds {cell!r}, which is no number")
    return Samples(path, features, wrong)


def _chosen(
    path: str,
    columns: Mapping[str, Column],
    names: Sequence[str],
    targets: Sequence[str],
    number: int,
) -> list[tuple[str, int]]:
    """Return the columns, and of one with several numbers in each row which of them."""
    widths = {
        name: len(column[0]) if getattr(column, "ndim", 1) == 2 and len(column) else 1
        for name, column in columns.items()
    }
    parts = {
        f"{name}[{part}]" if width > 1 else name: (name, part)
        for name, width in widths.items()
        for part in range(width)
    }
    if not names:
        names = [part for part, (name, _) in parts.items() if not {part, name} & {*targets}]
    for name in names:
        if name not in parts:
            has = ", ".join([*parts][:20])
            raise ConfigError(
                f"{path}: has no column {name} of one number in each row, which the model takes; it"
                f" has {has}.{did_you_mean(name, [*parts])}"
            )
    if len(names) != number:
        raise ConfigError(f"{path}: has {len(names)} columns of features; the model takes {number}")
    return [parts[name] for name in names]


def _numbers(cells: Column) -> np.ndarray:
    """Return a column as float64 [n, K], nan where there is no number."""
    import numpy as np

    values = as_numbers(cells)
    return np.array([number_of(cell) for cell in cells])[:, None] if values is None else values
