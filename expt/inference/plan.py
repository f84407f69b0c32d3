"""Plan a prediction: what is asked of a run's model, and of which files; free of torch."""

from __future__ import annotations

import collections
import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.data.columns import Column, base, read_as_known, texts_of, unknown_texts
from expt.data.image_files import (
    files_below,
    left_out,
    of_suffix,
    parts_there,
    picture_suffixes,
    report_left_out,
)
from expt.data.table_files import SUFFIXES, Arrays, Table, open_table
from expt.errors import ConfigError, DataError, did_you_mean, first_line, listed, warn
from expt.features import Columns, Feature, Features, Image, Tokens
from expt.runs.named_checkpoint import found

if TYPE_CHECKING:
    import numpy as np

ARRAYS = (".npy", ".npz")
TABLES = (*SUFFIXES, ".npy")
SPLITS = ("train", "val", "test")
OURS = ("path", "row", "class", "probability", "labels", "target")
"""Columns of predictions, which those of a table do not take the place of."""
NAMES = ("x", "images", "inputs")
"""The names of the array that is taken from an .npz with several."""


class Kind(NamedTuple):
    """A kind of files, by what they hold."""

    name: Literal["pictures", "rows", "texts", "samples"]
    noun: str
    """A sample of it."""
    suffixes: tuple[str, ...]
    """Suffixes of named files, besides pictures; empty if any will do."""
    below: tuple[str, ...]
    """Suffixes looked for in a folder, besides pictures."""

    @property
    def pictures(self) -> tuple[str, ...]:
        """The suffixes of pictures, where it has them."""
        return picture_suffixes() if self.name == "pictures" else ()


PICTURES = Kind("pictures", "image", ARRAYS, ())
ROWS = Kind("rows", "row", TABLES, TABLES)
TEXTS = Kind("texts", "line", (), (".txt",))
SAMPLES = Kind("samples", "sample", ARRAYS, ARRAYS)


KINDS: Mapping[type[Feature], Kind] = {Image: PICTURES, Columns: ROWS, Tokens: TEXTS}
"""The files that hold such inputs; SAMPLES of others."""


class Plan:
    """The plan of a prediction; see `python -m expt predict --help`."""

    def __init__(
        self,
        run: Path,
        paths: Sequence[Path] = (),
        *,
        which: str = "best",
        split: str | None = None,
        batch_size: int | None = None,
        device: str = "auto",
        amp: Any = "recorded",
        top: int | None = None,
        trust_code: bool = False,
    ) -> None:
        """Raise ConfigError for no run, and for samples that it does not take."""
        self.run, self.which, self.split, self.batch_size = run, which, split, batch_size
        self.device, self.amp, self.trust_code = device, amp, trust_code
        self.record, _ = found(run, which)
        self.config: RunConfig = recorded(self.record["config"])
        self.data: dict[str, Any] = self.record["data"]
        self.features = Features.read(self.data)
        self._check(paths)
        form = self.config.task.outputs(self.features.targets)
        self.form: Feature = form if top is None else form.likeliest(top)
        dataset, inputs = self.config.dataset, self.features.inputs
        self.kind = KINDS.get(type(inputs), SAMPLES)
        self.files = list_files(self.kind, paths)
        if self.kind is PICTURES and self.files and dataset.custom_class:
            warn(
                f"{dataset.custom_class}: what this class does to a picture is not known: it is"
                f" scaled to {inputs.shapes['image_size']}, counted in [0, 1] and normalised by"
                " dataset.mean and std; --split has its own"
            )
        of_several = [path for path in self.files if path.lower().endswith(self.kind.suffixes)]
        self.samples = [open_samples(path, self.features) for path in of_several]
        """Samples of arrays and tables."""

    def _check(self, paths: Sequence[Path]) -> None:
        split = self.split
        if bool(paths) == bool(split):
            raise ConfigError(
                "name files or folders, or --split test for a part of the run's dataset"
            )
        there = [name for name in SPLITS if self.data.get(f"{name}_size", 0) != 0]
        if split is not None and split not in there:
            raise ConfigError(f"--split {split}: the run's dataset has {', '.join(there)}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"--batch-size {self.batch_size}: must be 1 or more")

    @property
    def total(self) -> int | None:
        """The number of samples, where it is known before they are read."""
        if self.split is not None:
            size: int | None = self.data[f"{self.split}_size"]
            return size
        if all(sizes := [each.size for each in self.samples]) and sizes:
            return sum(sizes)
        return len(self.files) if self.kind is PICTURES else None

    @property
    def noun(self) -> str:
        """The noun for a sample."""
        return self.kind.noun if self.split is None else self.features.inputs.noun

    @property
    def masks_root(self) -> str:
        """The folder below which all pictures lie, absolute."""
        if self.split is None:
            return os.path.commonpath([os.path.dirname(os.path.abspath(f)) for f in self.files])
        root = os.path.abspath(getattr(self.config.dataset, "root", ""))
        parts = parts_there(root)
        part = parts.get(str(self.split), parts.get("train", Path(root)))
        return str(part / "images")


def list_files(kind: Kind, given: Sequence[Path]) -> list[str]:
    """Return the files that are named, and of a folder those below it, sorted by folder.

    Raise ConfigError for a path where nothing lies, a folder without such files, and a file of
    another kind.
    """
    found = list[str]()
    for path in given:
        suffixes = kind.below if path.is_dir() else kind.suffixes
        wanted = ", ".join([*(["pictures (.jpg, .png, ...)"] if kind.pictures else []), *suffixes])
        if path.is_dir():
            # A part of a segmentation_folder has its masks beside its images.
            has_masks = (
                kind is PICTURES and (path / "images").is_dir() and (path / "masks").is_dir()
            )
            folder = path / "images" if has_masks else path
            every = files_below(folder)
            below = of_suffix(every, (*kind.pictures, *kind.below))
            if not below:
                raise ConfigError(
                    f"{path}: no {kind.name} lie in it or below it; expected {wanted}"
                )
            report_left_out(folder, left_out(every, below), kind.noun)
            found += below
        elif not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder")
        elif kind.suffixes and path.suffix.lower() not in (*kind.pictures, *kind.suffixes):
            raise ConfigError(f"{path}: the run was trained on {kind.name}; give {wanted}")
        else:
            found.append(str(path))
    if kind is PICTURES and len({path.lower().endswith(ARRAYS) for path in found}) > 1:
        raise ConfigError("pictures and arrays: give one of them at a time")
    return found


class Piece(NamedTuple):
    """Some samples of a file, in order."""

    array: np.ndarray
    """[n, ...], as the model takes them."""
    wrong: Mapping[int, str] = {}
    """Why some can't be used, by their place."""
    beside: Mapping[str, Sequence[str]] = {}
    """The other columns of a table, by their names."""


class Samples:
    """The samples of a file that holds several: an array [n, ...] in the model's layout."""

    def __init__(self, path: str, array: np.ndarray) -> None:
        self.path, self.array, self.size = path, array, len(array)

    def pieces(self, size: int) -> Iterator[Piece]:
        """Yield up to `size` samples at a time."""
        for start in range(0, len(self.array), size):
            yield Piece(self.array[start : start + size])


class Cells(Samples):
    """The features in a table, float64 [n, F], read as they are needed.

    Texts are the places of their categories, and gaps nan where training rows had some. Columns
    that the model neither takes nor predicts, such as an ID, are read too.
    """

    def __init__(self, path: str, inputs: Columns, targets: Sequence[str]) -> None:
        """Read the first rows. Raise ConfigError where the model's columns are not there."""
        wanted = [*inputs.names]
        self._encoded = inputs.encoded
        if path.lower().endswith(".npy"):
            if self._encoded:
                raise ConfigError(f"{path}: the run's columns are found by name; give a table")
            table: Table = Arrays(Path(path), {"x": _array(path)})
            known = wanted = []  # only features, in their order
        else:
            table, known = open_table(Path(path)), wanted or [*targets]
        named = {name if name in table.names else base(name) for name in known}
        self._names = [name for name in table.names if (name in named) == bool(wanted)]
        others = {*self._names, *targets}
        self._beside = {
            name: f"table.{name}" if name in OURS else name
            for name in table.names
            if wanted and name not in others
        }
        self.path, self.size, self._table = path, table.size, table
        first = next(table.batches(self._names or table.names[:1], {}), None)
        if first is None:
            raise DataError(f"{path}: has no rows; give it some")
        several = [Column(name) for name in self._names]
        for each in several:
            each.read(first.column(each.name))
        parts, columns = [part for each in several for part in each.parts], listed(table.names, 20)
        for name in wanted:
            if name not in parts:
                what = f"has no column {name}, which the model takes; it has {columns}"
                raise ConfigError(f"{path}: {what}.{did_you_mean(name, table.names)}")
        if len(wanted or parts) != (number := len(wanted) or inputs.width):
            what = f"has {len(parts)} columns ({columns}), and the model takes {number}"
            raise ConfigError(f"{path}: {what}")
        self._order = [parts.index(name) for name in wanted or parts]

    def pieces(self, size: int) -> Iterator[Piece]:
        """See Samples; what is not a finite number of float32 can't be used."""
        new = collections.defaultdict[str, Counter[str]](Counter)
        names, damaged, done = [*self._names, *self._beside], dict[int, str](), 0
        for batch in self._table.batches(names, damaged):
            columns = {name: batch.column(name) for name in self._names}
            values, wrong, unknown = read_as_known(columns, self._encoded)
            for name, counted in unknown.items():
                new[name] += counted
            beside = {x: texts_of(batch.column(name)) for name, x in self._beside.items()}
            wrong |= {row - done: why for row, why in damaged.items() if row >= done}
            done += batch.num_rows
            for start in range(0, batch.num_rows, size):
                places = range(start, min(start + size, batch.num_rows))
                yield Piece(
                    values[start : places.stop, self._order],
                    {place - start: wrong[place] for place in places if place in wrong},
                    {name: each[start : places.stop] for name, each in beside.items()},
                )
        for name, counted in new.items():
            warn(f"{self.path}: {unknown_texts(name, counted, counted.total())}")


def open_samples(path: str, features: Features) -> Samples:
    """Return the samples in an array's file or a table, for a model of such `features`.

    Raise ConfigError for another shape, for numbers that the model does not take, and for a table
    without its columns, DataError for a damaged file.
    """
    inputs = features.inputs
    if isinstance(inputs, Columns):
        return Cells(path, inputs, features.targets.columns)
    array = _array(path)
    if array.ndim < 2 or not len(array) or array.dtype.kind not in "biuf":
        raise ConfigError(
            f"{path}: is {list(array.shape)} of {array.dtype}; give samples of numbers"
        )
    if isinstance(inputs, Image):
        return Samples(path, _images(path, array, inputs))
    shape = array.shape[1:]
    wanted = inputs.shapes.get("channels"), *inputs.shapes.get("image_size", ())
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


def _images(path: str, array: np.ndarray, inputs: Image) -> np.ndarray:
    """Return images, or one, as [n, C, H, W]."""
    channels, size = inputs.channels, inputs.image_size
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
