"""The inputs of a run's model, from files or from values in a program, as its dataset gave them.

They are pictures, rows of tables, a plain text, or samples of any kind; `by_feature` chooses. Free
of torch until something is computed.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from expt.data import folders, pictures
from expt.data.columns import (
    base,
    filled_gaps,
    known_column,
    read_as_known,
    text_of,
    texts_of,
    unknown_texts,
)
from expt.data.kinds import DatasetConfig
from expt.data.table_files import SUFFIXES, Arrays, Table, open_table, reading
from expt.errors import ConfigError, DataError, absent, did_you_mean, first_line, listed, warn
from expt.features import NO_TARGET, Columns, Features, Image, Tokens
from expt.features.feature import new_names
from expt.inference.arrays import are_arrays, array_of, as_tensor, samples_of
from expt.late import np, pa, torch
from expt.machine import usable_cpus

if TYPE_CHECKING:
    from torch import Tensor

Sample: TypeAlias = Any
"""A picture's path or a picture of Pillow's; a text; or a tensor or array, by itself or with a
batch's dimension.
"""
ARRAYS = (".npy", ".npz")
_AHEAD = 2  # batches of pictures that are read while one is computed
_NUMBERS, _MOST = 10_000_000, 1024
"""The inputs and the samples of a batch whose size nobody chose: 40 MB of float32."""


class Piece(NamedTuple):
    """Some samples of a file, in order."""

    about: Sequence[Mapping[str, str | int]]
    """The origin of each."""
    samples: Any
    """Values that `Inputs` takes; never mapped read-only."""
    skipped: Sequence[str] = ()
    """Why others of the file can't be used, a line each."""
    targets: Any = None
    """The targets that inputs imply."""
    sizes: Sequence[tuple[int, int]] = ()
    """Height and width of pictures as they lie."""


class Inputs:
    """`preprocess(SAMPLE)` and `preprocess([SAMPLE, ...])` return a batch on the model's device.

    Images are scaled to cover the size that the model was trained on and cropped at the centre, or
    stretched to it where those with masks were; as tensors they are uint8, or float in [0, 1], [C,
    H, W] or [N, C, H, W], of any size. They become float32 [N, C, H, W], normalised. Rows [F]
    or [N, F] of a table, lists of numbers too, become standardised, [N, 1, 1, F]; where it has
    texts or gaps, give lists of them (None is a gap) or a DataFrame, which are encoded as in
    training. A text becomes its tokens, int64 [1, length]. Other samples must be tensors or
    arrays, one or a batch, and are only moved.

    Raise ConfigError for other values, DataError for a damaged picture.
    """

    noun: ClassVar[str] = "sample"
    suffixes: ClassVar[tuple[str, ...]] = ARRAYS
    """Suffixes of named files that are not pictures; empty if any will do."""
    below: ClassVar[tuple[str, ...]] = ARRAYS
    """Suffixes of files in a folder that are not pictures."""

    def __init__(self, dataset: DatasetConfig, features: Features, device: Any = "cpu") -> None:
        self.dataset, self.feature, self.targets = dataset, features.inputs, features.targets
        self.device = device
        self.files: Sequence[str] = ()
        self._opened: Sequence[Any] = ()

    def __call__(self, samples: Sample | Sequence[Sample]) -> Tensor:
        """Return the batch."""
        if isinstance(samples, list | tuple):
            return torch.cat([self(sample) for sample in samples])
        return self._batch(samples)

    def _batch(self, samples: Sample) -> Tensor:
        given, shape = as_tensor(samples), getattr(self.feature, "shape", ())
        if shape and given.dim() not in (len(shape), len(shape) + 1):
            raise ConfigError(
                f"samples of shape {list(given.shape)}: those of training are {[*shape]}; give one,"
                " or a batch"
            )
        return (given[None] if given.dim() == len(shape) else given).to(self.device)

    @property
    def pictures(self) -> tuple[str, ...]:
        """The suffixes of pictures, where they are inputs."""
        return ()

    @property
    def size(self) -> int | None:
        """The number of samples in the files, where it is known before they are read."""
        return sum(len(one) for one in self._opened) or None

    @property
    def at_once(self) -> int:
        """The number of samples of a batch, where nobody chooses one."""
        shapes, own = self.feature.shapes, getattr(self.feature, "shape", ())
        image = shapes.get("channels", 1), *shapes.get("image_size", ())
        numbers: int = max(math.prod(image), math.prod(own), 256 * shapes.get("context", 0))
        return max(1, min(_MOST, _NUMBERS // numbers))

    def open(self, paths: Sequence[Path]) -> None:
        """Take the samples of files and folders.

        Raise ConfigError for paths and files that the model does not take, DataError for damaged
        ones.
        """
        self.files = [file for path in paths for file in self._files_of(path)]
        self._opened = [*map(self._open, folders.of_suffix(self.files, self.suffixes))]

    def take(self, texts: Sequence[str]) -> None:
        """Take texts by themselves. Raise ConfigError where the model does not."""
        raise ConfigError(f"--text: the run was trained on {self.noun}s; give files")

    def _files_of(self, path: Path) -> list[str]:
        """Return a file that is named, or of a folder those below it, sorted by folder."""
        suffixes = (*self.pictures, *(self.below if path.is_dir() else self.suffixes))
        own = [suffix for suffix in suffixes if suffix not in self.pictures]
        wanted = ", ".join(["pictures (.jpg, .png, ...)", *own] if self.pictures else own)
        if path.is_dir():
            # A part of a segmentation_folder has its masks next to its images.
            has_masks = (path / "images").is_dir() and (path / "masks").is_dir()
            folder = path / "images" if has_masks and self.pictures else path
            every = folders.files_below(folder)
            if not (found := folders.of_suffix(every, suffixes)):
                raise ConfigError(f"{path}: no {self.noun} lies in it or below; expected {wanted}")
            folders.report_left_out(folder, folders.left_out(every, found), self.noun)
            return found
        if not path.exists():
            raise ConfigError(f"{path}: {absent(path)}")
        if self.suffixes and path.suffix.lower() not in suffixes:
            raise ConfigError(f"{path}: the run was trained on {self.noun}s; give {wanted}")
        return [str(path)]

    def _open(self, path: str) -> Any:
        array = samples_of(path)
        shape, sizes = array.shape[1:], self.feature.shapes
        wanted = sizes.get("channels"), *sizes.get("image_size", ())
        if len(wanted) > 1 and len(shape) <= 3 and (1,) * (3 - len(shape)) + shape != wanted:
            raise ConfigError(f"{path}: samples are {list(shape)}, not {list(wanted)}")
        return array

    def pieces(self, size: int) -> Iterator[Piece]:
        """Yield the samples of the files, up to `size` at a time."""
        for path, array in zip(self.files, self._opened, strict=True):
            for start in range(0, len(array), size):
                part = array[start : start + size].copy()
                places = range(start, start + len(part))
                about: list[Mapping[str, str | int]] = [{"path": path, "index": x} for x in places]
                yield Piece(about, self._checked(path, part))

    def _checked(self, path: str, part: np.ndarray) -> np.ndarray:
        return part.astype("float32") if part.dtype == "float64" else part


class Pictures(Inputs):
    """Pictures in files, opened by Pillow, or in arrays and tensors."""

    noun, below = "image", ()
    feature: Image

    @functools.cached_property
    def _normalise(self) -> Any:
        from expt.data.loading import Finish, LoaderOptions

        options: Any = {"mean": self.dataset.mean, "std": self.dataset.std, "device": self.device}
        return Finish(LoaderOptions(batch_size=1, **options), self.feature.channels)

    @functools.cached_property
    def _transforms(self) -> Sequence[Callable[[Any], Any]]:
        from expt.data.checked_samples import build_transforms

        return build_transforms(getattr(self.dataset, "eval_transforms", None) or ())

    def _batch(self, samples: Sample) -> Tensor:
        images = as_tensor(samples) if are_arrays(samples) else self.picture(samples)[0]
        images = images.unsqueeze(0) if images.dim() == 3 else images
        if images.dim() != 4 or images.shape[1] != (channels := self.feature.channels):
            raise ConfigError(
                f"an image of shape {list(images.shape)}: give [{channels}, height, width], or many"
            )
        normalised: Tensor = self._normalise(images.to(self.device, copy=True))
        return normalised

    def picture(self, given: Any) -> tuple[Tensor, tuple[int, int]]:
        """Return a picture, or that of a path, as the model's size has it, and how it lies.

        These are a tensor [C, H, W], and a height and width. Raise DataError for a damaged one.
        """
        from expt.data.checked_samples import Transformed
        from expt.data.picture_sets import Pictures as Opened

        channels, image_size = self.feature.channels, self.feature.image_size
        if channels not in pictures.MODES:
            raise ConfigError(f"a picture: the model takes {channels} channels; give a tensor")
        needed = None if self._transforms else self.dataset.needed
        resize = pictures.stretch if self.targets.each == "pixel" else pictures.fit
        opened = Opened([(given, 0)], channels, image_size, needed=needed, resize=resize)
        picture, _ = opened.opened(0)
        width, height = picture.size
        if not self._transforms:
            return opened.pixels(picture.image), (height, width)
        shape = channels, *image_size
        made = Transformed([(picture.image, 0)], self._transforms, shape, "dataset.eval_transforms")
        return made[0][0], (height, width)

    @property
    def pictures(self) -> tuple[str, ...]:
        return pictures.picture_suffixes()

    @property
    def size(self) -> int | None:
        return super().size or len(self.files)

    def open(self, paths: Sequence[Path]) -> None:
        super().open(paths)
        _ = self._transforms  # once, before threads use them
        if 0 < len(self._opened) < len(self.files):
            raise ConfigError("pictures and arrays: give one of them at a time")
        if note := self.dataset.note("for pictures"):
            warn(note)

    def _open(self, path: str) -> np.ndarray:
        """Return images, or one, as [n, C, H, W]."""
        array, channels, size = samples_of(path), self.feature.channels, self.feature.image_size
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

    def _checked(self, path: str, part: np.ndarray) -> np.ndarray:
        self.dataset.check_pixels(path, part)
        return part

    def pieces(self, size: int) -> Iterator[Piece]:
        """Yield images of arrays; or pictures, decoded by threads ahead of the model."""
        if self._opened:
            yield from super().pieces(size)
            return

        def read(path: str) -> tuple[str, Tensor, tuple[int, int]] | str:
            try:
                return path, *self.picture(path)
            except DataError as error:
                return str(error)

        threads = ThreadPoolExecutor(min(usable_cpus(), 16))
        groups = (self.files[at : at + size] for at in range(0, len(self.files), size))
        begun = (threads.map(read, group) for group in groups)
        try:
            pending = collections.deque(itertools.islice(begun, _AHEAD))
            while pending:
                pending.extend(itertools.islice(begun, 1))
                found = [*pending.popleft()]
                skipped = [each for each in found if isinstance(each, str)]
                good = [each for each in found if not isinstance(each, str)]
                paths, pixels, sizes = zip(*good, strict=True) if good else ((), (), ())
                samples = torch.stack(pixels) if good else ()
                yield Piece([{"path": path} for path in paths], samples, skipped, sizes=sizes)
        finally:
            threads.shutdown(cancel_futures=True)


class _Opened(NamedTuple):
    """A table with the model's columns."""

    table: Table
    taken: Sequence[str]
    """The columns that have the features."""
    order: Sequence[int]
    """The place of each feature among the parts of these columns."""


class Rows(Inputs):
    """Rows of a table: columns by name, texts and gaps as in training."""

    noun, suffixes, below = "row", (*SUFFIXES, ".npy"), (*SUFFIXES, ".npy")
    feature: Columns

    @functools.cached_property
    def _encode(self) -> Any:
        from expt.data.encoding import Encoder

        feature = self.feature
        return Encoder(feature.names, feature.encoded, feature.scales, means=feature.means)

    def __call__(self, samples: Sample | Sequence[Sample]) -> Tensor:
        if are_arrays(samples):
            return super().__call__(samples)
        return self._batch(self._coded(samples))

    def _batch(self, samples: Sample) -> Tensor:
        rows, number = as_tensor(samples).double(), len(self.feature.names)
        rows = rows.unsqueeze(0) if rows.dim() == 1 else rows
        if rows.dim() != 2 or rows.shape[1] != number:
            raise ConfigError(f"rows of shape {list(rows.shape)}: give [N, {number}]")
        encoded: Tensor = self._encode(rows.cpu()).float()
        return encoded.to(self.device)

    def _coded(self, given: Any) -> np.ndarray:
        """Return rows of numbers, texts and None as the encoder takes them, float64 [N, F]."""
        names = self.feature.cell_names
        if hasattr(given, "columns"):  # of pandas, by their names
            if missing := [name for name in names if name not in given.columns]:
                raise ConfigError(f"rows without the column {missing[0]}: give {', '.join(names)}")
            given = given[[*names]].to_numpy(object)
        rows = np.atleast_1d(np.array(given, object))
        rows = rows.reshape(-1, max(1, rows.shape[-1]))
        if rows.shape[1] != len(names) or not len(rows):
            raise ConfigError(
                f"rows of {rows.shape[1] if len(rows) else 0} cells: give {', '.join(names)}"
            )
        columns = {name: self._cells(name, each) for name, each in zip(names, rows.T, strict=True)}
        known = self.feature.encoded, self.feature.filled
        values, wrong, unknown = read_as_known(columns, *known)
        for row, why in wrong.items():
            raise ConfigError(f"row {row + 1}: {why}; correct it")
        for name, texts in unknown.items():
            warn(self._unknown(name, texts))
        return values

    def _cells(self, name: str, cells: np.ndarray) -> Any:
        """Return a column of numbers, dates or texts as Arrow has them; several kinds as texts."""
        try:
            return pa.array(cells, from_pandas=True)
        except (pa.ArrowException, OverflowError) as error:
            if known_column(name, self.feature.encoded).way:
                raise ConfigError(f"column {name}: {first_line(error)}") from error
            return pa.array([*map(text_of, cells)], pa.string())

    def _unknown(self, name: str, texts: Counter[str]) -> str:
        is_text = "categories" in self.feature.encoded.get(name, {})
        several = texts.total()
        return unknown_texts(name, texts, several) if is_text else filled_gaps(name, several)

    def _open(self, path: str) -> _Opened:
        """Return the table. Raise ConfigError where the model's columns are not there."""
        wanted: Sequence[str] = self.feature.names
        if is_array := path.lower().endswith(".npy"):  # its columns have no names of theirs
            if self.feature.encoded:
                raise ConfigError(f"{path}: the run's columns are found by name; give a table")
            with reading(Path(path)):
                table: Table = Arrays(Path(path), {"x": array_of(path)})
        else:
            table = open_table(Path(path))
        encoded = getattr(self.feature, "encoded", {})
        ways = (encoded.get(name, {}).get("way", "") for name in wanted)
        pairs = zip(wanted, ways, strict=True)
        columns = {x: x if x in table.names else base(x, y) for x, y in pairs}
        own = [name for name in dict.fromkeys(columns.values()) if name in table.names]
        taken = table.names if is_array else own
        if (first := next(table.batches(taken or table.names[:1], {}), None)) is None:
            raise DataError(f"{path}: has no rows; give it some")
        parts = [part for name in taken for part in self._parts(name, first.column(name))]
        if is_array and len(parts) != len(wanted):
            raise ConfigError(
                f"{path}: has {len(parts)} columns, and the model takes {len(wanted)}"
            )
        if is_array:
            return _Opened(table, taken, [*range(len(parts))])
        if missing := next((name for name in wanted if name not in parts), None):
            missing = missing if columns[missing] in table.names else columns[missing]
            raise ConfigError(
                f"{path}: has no column {missing}, which the model takes; it has"
                f" {listed(table.names, 20)}.{did_you_mean(missing, table.names)}"
            )
        return _Opened(table, taken, [*map(parts.index, wanted)])

    @property
    def size(self) -> int | None:
        sizes = [one.table.size for one in self._opened]
        return sum(sizes) if all(sizes) else None

    def pieces(self, size: int) -> Iterator[Piece]:
        known = self.targets.columns
        tables = ((one.table.names, {*one.taken, *known}) for one in self._opened)
        others = {name: name for names, taken in tables for name in names if name not in taken}
        names = new_names(others, ("path", "row"))
        for path, opened in zip(self.files, self._opened, strict=True):
            yield from self._rows_of(path, opened, names, size)

    def _rows_of(
        self, path: str, opened: _Opened, own: Mapping[str, str], size: int
    ) -> Iterator[Piece]:
        """Yield rows; those without a finite number of float32 in each column are skipped.

        Their origin has all tables' other columns, such as an ID, by their `own` names, or empty.
        """
        new, damaged = collections.defaultdict[str, Counter[str]](Counter), dict[int, str]()
        (table, taken, order), done = opened, 0
        others = [name for name in own if name in table.names and name not in taken]
        for batch in table.batches([*taken, *others], damaged):
            columns = {name: batch.column(name) for name in taken}
            values, wrong, unknown = self._read(columns)
            values = values[:, order]
            lost = sum(done <= row < done + batch.num_rows for row in damaged)
            for name, counted in unknown.items():
                counted[""] -= lost  # such a row is one of gaps
                new[name] += counted
            cells = {name: [""] * batch.num_rows for name in own.values()}
            cells |= {own[x]: texts_of(batch.column(x)) for x in others}
            wrong |= {row - done: why for row, why in damaged.items() if row >= done}
            for start in range(0, batch.num_rows, size):
                places = range(start, min(start + size, batch.num_rows))
                good = [place for place in places if place not in wrong]
                about: list[Mapping[str, str | int]] = [
                    {"path": path, "row": done + at + 1, **{x: cells[x][at] for x in cells}}
                    for at in good
                ]
                why = [f"row {done + at + 1}: {wrong[at]}" for at in places if at in wrong]
                yield self._piece(about, values[good], [f"{path}: {each}" for each in why])
            done += batch.num_rows
        for name, counted in new.items():
            if not counted:
                continue
            warn(f"{path}: {self._unknown(name, counted)}")

    def _parts(self, name: str, cells: Any) -> Sequence[str]:
        """Return the names of the numbers that a column becomes; a date is several."""
        column = known_column(name, self.feature.encoded)
        column.read(cells)
        return column.parts

    def _read(self, columns: Mapping[str, Any]) -> Any:
        """Return new rows [N, K], why some can't be used, and unknown texts."""
        return read_as_known(columns, self.feature.encoded, self.feature.filled)

    def _piece(self, about: Sequence[Any], rows: np.ndarray, skipped: Sequence[str]) -> Piece:
        return Piece(about, rows, skipped)


class Texts(Inputs):
    """Texts: the lines of files."""

    noun, suffixes, below = "line", (), (".txt",)
    feature: Tokens

    def __call__(self, samples: Sample | Sequence[Sample]) -> Tensor:
        if isinstance(samples, bytes):
            samples = samples.decode(errors="surrogateescape")
        several = [samples] if isinstance(samples, str) else samples
        if isinstance(several, list | tuple) and all(isinstance(each, str) for each in several):
            encoded = [torch.tensor(self.dataset.encode(each)) for each in several]
            samples = torch.nn.utils.rnn.pad_sequence(encoded, batch_first=True)
        tokens = as_tensor(samples).long().to(self.device)
        return tokens.unsqueeze(0) if tokens.dim() == 1 else tokens

    def pieces(self, size: int) -> Iterator[Piece]:
        """Yield lines that are not blank, in windows as an evaluation has them, in their order."""
        windows = (
            ({"path": path, "line": number}, window)
            for path in self.files
            for number, tokens in self.dataset.lines(path)
            for window in _windows(tokens, self.feature.context)
        )
        pad = torch.nn.utils.rnn.pad_sequence
        while several := list(itertools.islice(windows, size)):
            about, tokens = zip(*several, strict=True)
            inputs = [as_tensor(window[:-1]) for window in tokens]
            targets = [as_tensor(window[1:]) for window in tokens]
            wanted = pad(targets, batch_first=True, padding_value=NO_TARGET)
            yield Piece(about, pad(inputs, batch_first=True), targets=wanted)


def _windows(tokens: np.ndarray, context: int) -> Iterator[np.ndarray]:
    if len(tokens) == 1:  # no token follows
        yield np.array([tokens[0], NO_TARGET])
    for start in range(0, len(tokens) - 1, context):
        yield tokens[start : start + context + 1].astype(np.int64)
