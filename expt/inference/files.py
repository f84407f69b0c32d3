"""The files that a run's model may be asked about, of the kind that it was trained on; no torch."""

from __future__ import annotations

import csv
import itertools
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from expt.data.columns import Column, as_numbers, columns_of, csv_names, number_of
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
            has_masks = kind is PICTURES and all(
                (path / name).is_dir() for name in ("images", "masks")
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
    if kind is PICTURES and len({Path(file).suffix.lower() in ARRAYS for file in found}) > 1:
        raise ConfigError("pictures and arrays: give one of them at a time")
    return found


class Samples(NamedTuple):
    """An array of samples, and what brings a piece of it [n, ...] to the model's layout."""

    path: str
    array: np.ndarray
    arrange: Callable[[np.ndarray], np.ndarray]


def open_array(path: str) -> np.ndarray:
    """Return the array of a .npy, mapped into memory, or that of an .npz that has one of NAMES.

    Raise DataError for a damaged file, ConfigError for an .npz of several others.
    """
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


def open_samples(path: str, kind: Kind, dataset: DatasetConfig, data: Mapping[str, Any]) -> Samples:
    """Return the samples in an array's file, for a model that was trained on `data`.

    Raise ConfigError for another shape, and for numbers that the model does not take.
    """
    array = open_array(path)
    channels, size = int(data.get("channels", 0)), tuple(data.get("image_size", ()))
    if array.ndim < 2 or not len(array) or array.dtype.kind not in "biuf":
        raise ConfigError(
            f"{path}: is {list(array.shape)} of {array.dtype}; give samples of numbers"
        )
    if kind is SAMPLES:
        shape = array.shape[1:]
        if size and len(shape) <= 3 and (1,) * (3 - len(shape)) + shape != (channels, *size):
            raise ConfigError(f"{path}: samples are {list(shape)}, not {[channels, *size]}")
        return Samples(path, array, lambda p: p.astype("float32") if p.dtype == "float64" else p)
    if array.dtype.kind != "f" and array.dtype != "uint8":
        raise ConfigError(f"{path}: holds {array.dtype}; give uint8, or floats from 0 to 1")
    layouts: dict[tuple[int, ...], Callable[[np.ndarray], np.ndarray]] = {
        (channels, *size): lambda piece: piece,
        (*size, channels): lambda piece: piece.transpose(0, 3, 1, 2),
        **({size: lambda piece: piece[:, None]} if channels == 1 else {}),
    }
    if array.shape in layouts:  # one image
        array = array[None]
    if array.shape[1:] not in layouts:
        wanted = f"[images, {channels}, {', '.join(map(str, size))}]"
        raise ConfigError(f"{path}: holds {list(array.shape)}, and the model takes {wanted}")
    arrange = layouts[array.shape[1:]]
    return Samples(path, array, arrange if dataset.custom_class else _in_unit_range(path, arrange))


def _in_unit_range(
    path: str, arrange: Callable[[np.ndarray], np.ndarray]
) -> Callable[[np.ndarray], np.ndarray]:
    def checked(piece: np.ndarray) -> np.ndarray:
        if piece.dtype.kind == "f" and not (piece.min() >= 0 and piece.max() <= 1):
            raise ConfigError(
                f"{path}: holds floats from {piece.min():g} to {piece.max():g}, expected 0 to 1"
            )
        return arrange(piece)

    return checked


class Rows(NamedTuple):
    """Some consecutive rows of a table."""

    first: int
    """Their place in the table, from 1."""
    features: np.ndarray
    """float64 [n, F]."""
    wrong: Mapping[int, str]
    """Why some have no features, by their place among these."""


class Features:
    """The columns that a model takes of a table: by name, or all but the `targets`."""

    def __init__(self, names: Sequence[str], targets: Sequence[str], number: int) -> None:
        self._names, self._targets, self._number = list(names), {*targets}, number

    def check(self, path: str) -> None:
        """Raise ConfigError where the table has not the columns, DataError where it is none."""
        if path.lower().endswith(".npy"):
            self._array(path)
        else:
            self._choose(path, next(_pieces(path, 1), ({}, {}))[0])

    def read(self, path: str, size: int) -> Iterator[Rows]:
        """Yield all rows, up to `size` at a time. Raise DataError where the file is damaged."""
        if path.lower().endswith(".npy"):
            array = self._array(path)
            for start in range(0, len(array), size):
                yield self._rows(start + 1, {"x": array[start : start + size]}, [("x", None)], {})
            return
        first, chosen = 1, None
        for columns, damaged in _pieces(path, size):
            chosen = chosen or self._choose(path, columns)
            rows = self._rows(first, columns, chosen, damaged)
            yield rows
            first += len(rows.features)

    def _array(self, path: str) -> np.ndarray:
        array = open_array(path)
        if array.ndim != 2 or array.shape[1] != self._number or array.dtype.kind not in "biuf":
            raise ConfigError(
                f"{path}: is {list(array.shape)} of {array.dtype}, and the model takes [rows,"
                f" {self._number}] numbers"
            )
        return array

    def _choose(self, path: str, columns: Mapping[str, Column]) -> list[tuple[str, int | None]]:
        """Return the columns, and of one with several numbers in each row which of them."""
        widths = {
            name: len(column[0]) if getattr(column, "ndim", 1) == 2 else 0
            for name, column in columns.items()
        }
        if self._names:
            return [self._find(path, name, widths) for name in self._names]
        chosen = [
            (name, part)
            for name, width in widths.items()
            if name not in self._targets
            for part in (range(width) if width else [None])
        ]
        if len(chosen) != self._number:
            raise ConfigError(
                f"{path}: has {len(chosen)} columns beside {', '.join(self._targets)}; the"
                f" model takes {self._number}"
            )
        return chosen

    def _find(self, path: str, name: str, widths: Mapping[str, int]) -> tuple[str, int | None]:
        if widths.get(name) in (0, 1):
            return name, None
        part = re.fullmatch(r"(.*)\[(\d+)\]", name)  # of an array with several numbers in a row
        if part and int(part[2]) < widths.get(part[1], 0):
            return part[1], int(part[2])
        has = ", ".join([*widths][:20])
        raise ConfigError(
            f"{path}: has no column {name} of one number in each row, which the model takes; it has"
            f" {has}.{did_you_mean(name, [*widths])}"
        )

    def _rows(
        self,
        first: int,
        columns: Mapping[str, Column],
        chosen: Sequence[tuple[str, int | None]],
        damaged: Mapping[int, str],
    ) -> Rows:
        import numpy as np

        numbers = {name: _numbers(columns[name]) for name, _ in chosen}
        parts = [
            numbers[name] if part is None else numbers[name][:, part, None] for name, part in chosen
        ]
        features = np.concatenate(parts, axis=1)
        bad, wrong = ~(np.abs(features) <= np.finfo(np.float32).max), dict(damaged)
        for row in map(int, np.flatnonzero(bad.any(1))):
            place = int(np.argmax(bad[row]))
            name, part = chosen[place] if len(chosen) > 1 else chosen[0]
            cell = columns[name][row] if part is None and len(chosen) > 1 else features[row, place]
            shown = self._names[place] if self._names else name
            wrong.setdefault(row, f"column {shown} holds {str(cell)[:40]!r}, which is no number")
        return Rows(first, features, wrong)


def _numbers(cells: Column) -> np.ndarray:
    """Return a column as float64 [n, K], nan where there is no number."""
    import numpy as np

    values = as_numbers(cells)
    return np.array([number_of(cell) for cell in cells])[:, None] if values is None else values


def _pieces(path: str, size: int) -> Iterator[tuple[Mapping[str, Column], dict[int, str]]]:
    """Yield the columns of up to `size` rows at a time, and why some of these are damaged."""
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        yield from _csv_pieces(path, size)
    elif suffix == ".parquet":
        try:
            from pyarrow import parquet

            for batch in parquet.ParquetFile(path).iter_batches(size):  # type: ignore[no-untyped-call, unused-ignore]
                names = batch.schema.names
                yield {n: batch.column(n).to_numpy(zero_copy_only=False) for n in names}, {}
        except ImportError:
            raise ConfigError(f"{path}: needs pyarrow; pip install pyarrow") from None
        except (OSError, ValueError) as error:  # pyarrow's own are of these
            raise DataError(f"{path} cannot be read ({first_line(error)})") from error
    else:
        columns = columns_of(Path(path))
        for start in range(0, len(next(iter(columns.values()))), size):
            yield {name: column[start : start + size] for name, column in columns.items()}, {}


def _csv_pieces(path: str, size: int) -> Iterator[tuple[Mapping[str, Column], dict[int, str]]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = (row for row in csv.reader(file, skipinitialspace=True) if row)
            names = csv_names(Path(path), next(rows, []))
            while True:
                piece = list(itertools.islice(rows, size))
                odd = {place: f"has {len(row)} cells for {len(names)} columns"
                       for place, row in enumerate(piece) if len(row) != len(names)}  # fmt: skip
                cells = [
                    [""] * len(names) if place in odd else row for place, row in enumerate(piece)
                ]
                columns = zip(*cells, strict=True) if cells else [()] * len(names)
                yield dict(zip(names, columns, strict=True)), odd
                if len(piece) < size:
                    return
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a .csv ({error}); replace it") from error
