"""The inputs of a run's model by the feature in its record: pictures, rows of tables, texts."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from expt.data.columns import base, read_as_known, text_of, texts_of, unknown_texts
from expt.data.image_files import (
    MODES,
    fit,
    of_suffix,
    open_picture,
    picture_suffixes,
    size_of,
    stretch,
)
from expt.data.kinds import DatasetConfig
from expt.data.table_files import SUFFIXES, Arrays, Table, open_table
from expt.errors import ConfigError, DataError, did_you_mean, listed, warn
from expt.features import NO_TARGET, Columns, Feature, Features, Image, Tokens
from expt.inference.inputs import ARRAYS, Inputs, Piece, Sample, array_of, as_tensor
from expt.machine import usable_cpus

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

T = TypeVar("T")
OURS = ("path", "row", "class", "probability", "labels", "target")
"""Columns of predictions, which those of a table do not take the place of."""
_AHEAD = 2
"""Batches of pictures that are read while one is computed."""


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

    def __call__(self, samples: Sample | Sequence[Sample]) -> Tensor:
        if isinstance(samples, list | tuple):
            return self._joined(samples)
        is_picture = isinstance(samples, str | Path) or hasattr(samples, "convert")
        images = self.picture(samples)[0] if is_picture else as_tensor(samples)
        images = images.unsqueeze(0) if images.dim() == 3 else images
        if images.dim() != 4 or images.shape[1] != (channels := self.feature.channels):
            raise ConfigError(
                f"an image of shape {list(images.shape)}: give [{channels}, height, width], or many"
            )
        normalised: Tensor = self._normalise(images.to(self.device, copy=True))
        return normalised

    def picture(self, given: Any, name: str = "the picture") -> tuple[Tensor, tuple[int, int]]:
        """Return a picture, or that of a path, as [C, H, W] of the model's size.

        And the height and width that it had. Raise DataError for a damaged one, by its path or
        `name`.
        """
        import numpy as np
        import torch

        channels, (height, width) = self.feature.channels, self.feature.image_size
        if channels not in MODES:
            raise ConfigError(f"a picture: the model takes {channels} channels; give a tensor")
        needed = None if self._transforms else self.dataset.needed
        picture = open_picture(given, MODES[channels], name, needed)
        size = size_of(picture)[1], size_of(picture)[0]
        if self._transforms:
            from expt.data.checked_samples import Transformed

            shape = channels, height, width
            made = Transformed([(picture, 0)], self._transforms, shape, "dataset.eval_transforms")
            return made[0][0], size
        resize = stretch if self.targets.each == "pixel" else fit
        pixels = torch.from_numpy(np.array(resize(picture, (height, width))))
        return pixels.reshape(height, width, -1).permute(2, 0, 1), size

    @property
    def pictures(self) -> tuple[str, ...]:
        return picture_suffixes()

    @property
    def size(self) -> int | None:
        return super().size or len(self.files)

    @property
    def _numbers(self) -> int:
        return self.feature.channels * math.prod(self.feature.image_size)

    def open(self, paths: Sequence[Path]) -> None:
        self.files = [file for path in paths for file in self._files_of(path)]
        arrays = of_suffix(self.files, ARRAYS)
        if len(arrays) not in (0, len(self.files)):
            raise ConfigError("pictures and arrays: give one of them at a time")
        self._opened = [*map(self._open, arrays)]
        if note := self.dataset.note_on_pictures(self.feature.image_size):
            warn(note)

    def _open(self, path: str) -> np.ndarray:
        """Return images, or one, as [n, C, H, W]."""
        array, channels, size = array_of(path), self.feature.channels, self.feature.image_size
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
        import torch

        if self._opened:
            yield from super().pieces(size)
            return

        def read(path: str) -> tuple[str, Tensor, tuple[int, int]] | str:
            try:
                return path, *self.picture(path)
            except DataError as error:
                return str(error)

        for found in _ahead(read, self.files, size):
            skipped = [each for each in found if isinstance(each, str)]
            good = [each for each in found if not isinstance(each, str)]
            paths, pixels, sizes = zip(*good, strict=True) if good else ((), (), ())
            about = [{"path": path} for path in paths]
            yield Piece(about, torch.stack(pixels) if good else (), skipped, sizes=sizes)


def _ahead(read: Callable[[str], T], paths: Sequence[str], size: int) -> Iterator[list[T]]:
    """Yield what `read` returns of each path, `size` at a time, while the next are being read."""
    threads = ThreadPoolExecutor(min(usable_cpus(), 16))
    pending = collections.deque[Iterator[T]]()
    try:
        for start in range(0, len(paths), size):
            pending.append(threads.map(read, paths[start : start + size]))
            if len(pending) > _AHEAD:
                yield list(pending.popleft())
        while pending:
            yield list(pending.popleft())
    finally:
        threads.shutdown(cancel_futures=True)


class Rows(Inputs):
    """Rows of a table: columns by name, texts and gaps as in training."""

    noun, suffixes, below = "row", (*SUFFIXES, ".npy"), (*SUFFIXES, ".npy")
    feature: Columns

    @functools.cached_property
    def _encode(self) -> Any:
        from expt.data.memory import Encoder

        return Encoder(self.feature.names, self.feature.encoded, self.feature.scales)

    def __call__(self, samples: Sample | Sequence[Sample]) -> Tensor:
        import torch

        if self.feature.encoded and not _are_arrays(samples):
            samples = self._coded(samples)
        elif isinstance(samples, list | tuple):
            if any(hasattr(sample, "dtype") for sample in samples):
                return self._joined(samples)
            try:
                samples = torch.tensor(samples, dtype=torch.float64)
            except (TypeError, ValueError) as error:
                fix = "give lists of numbers, as many in each"
                raise ConfigError(f"rows: {error}; {fix}") from error
        rows, number = as_tensor(samples).double(), len(self.feature.names)
        rows = rows.unsqueeze(0) if rows.dim() == 1 else rows
        if rows.dim() != 2 or rows.shape[1] != number:
            raise ConfigError(f"rows of shape {list(rows.shape)}: give [N, {number}]")
        encoded: Tensor = self._encode(rows.cpu()).float()[:, None, None]
        return encoded.to(self.device)

    def _coded(self, given: Any) -> np.ndarray:
        """Return rows of numbers, texts and None as the encoder takes them, float64 [N, F]."""
        import numpy as np
        import pyarrow as pa

        names = self.feature.names
        if hasattr(given, "columns"):  # of pandas, by their names
            given = given[[*names]].to_numpy(object)
        rows = np.array(given, object)
        rows = rows.reshape(-1, rows.shape[-1])
        if rows.shape[1] != len(names):
            raise ConfigError(f"rows of {rows.shape[1]} cells: give {', '.join(names)}")
        cells = (pa.array([*map(text_of, each)], pa.string()) for each in rows.T)
        columns = dict(zip(names, cells, strict=True))
        values, wrong, unknown = read_as_known(columns, self.feature.encoded)
        for row, why in wrong.items():
            raise ConfigError(f"row {row + 1}: {why}; correct it")
        for name, texts in unknown.items():
            warn(unknown_texts(name, texts, texts.total()))
        return values

    @property
    def _numbers(self) -> int:
        return self.feature.width

    def _open(self, path: str) -> Table:
        """Return the table. Raise ConfigError where the model's columns are not there."""
        if path.lower().endswith(".npy"):
            if self.feature.encoded:
                raise ConfigError(f"{path}: the run's columns are found by name; give a table")
            return Arrays(Path(path), {"x": array_of(path)})
        table = open_table(Path(path))
        for name in self._taken(table):
            if name not in table.names:
                has = f"has no column {name}, which the model takes; it has"
                names = listed(table.names, 20)
                raise ConfigError(f"{path}: {has} {names}.{did_you_mean(name, table.names)}")
        return table

    def _taken(self, table: Table) -> list[str]:
        """Return the columns that have the features; those of an array have no names of theirs."""
        if isinstance(table, Arrays) and table.path.suffix.lower() == ".npy":
            return [*table.names]
        names = (name if name in table.names else base(name) for name in self.feature.names)
        return [*dict.fromkeys(names)]

    def _size_of(self, opened: Table) -> int:
        return opened.size

    def pieces(self, size: int) -> Iterator[Piece]:
        for path, table in zip(self.files, self._opened, strict=True):
            yield from self._rows_of(path, table, size)

    def _rows_of(self, path: str, table: Table, size: int) -> Iterator[Piece]:
        """Yield rows; those without a finite number of float32 in each column are skipped.

        Columns that the model neither takes nor predicts, such as an ID, are said of each.
        """
        new, damaged = collections.defaultdict[str, Counter[str]](Counter), dict[int, str]()
        taken, done, number = self._taken(table), 0, len(self.feature.names)
        others = [name for name in table.names if name not in (*taken, *self.targets.columns)]
        for batch in table.batches([*taken, *others], damaged):
            columns = {name: batch.column(name) for name in taken}
            values, wrong, unknown = read_as_known(columns, self.feature.encoded)
            if (has := values.shape[1]) != number:
                raise ConfigError(f"{path}: has {has} columns, and the model takes {number}")
            for name, counted in unknown.items():
                new[name] += counted
            told = {f"table.{x}" if x in OURS else x: texts_of(batch.column(x)) for x in others}
            wrong |= {row - done: why for row, why in damaged.items() if row >= done}
            for start in range(0, batch.num_rows, size):
                places = range(start, min(start + size, batch.num_rows))
                good = [place for place in places if place not in wrong]
                about: list[Mapping[str, str | int]] = [
                    {"path": path, "row": done + at + 1, **{x: told[x][at] for x in told}}
                    for at in good
                ]
                why = [f"row {done + at + 1}: {wrong[at]}" for at in places if at in wrong]
                yield Piece(about, values[good], [f"{path}: {each}" for each in why])
            done += batch.num_rows
        if not done:
            raise DataError(f"{path}: has no rows; give it some")
        for name, counted in new.items():
            warn(f"{path}: {unknown_texts(name, counted, counted.total())}")


class Texts(Inputs):
    """Texts, of which a file has one in each line."""

    noun, suffixes, below = "line", (), (".txt",)
    feature: Tokens

    def __call__(self, samples: Sample | Sequence[Sample]) -> Tensor:
        import torch

        if isinstance(samples, str):
            samples = torch.tensor([self.dataset.encode(samples)])
        elif isinstance(samples, bytes):
            samples = torch.tensor([list(samples)])
        return as_tensor(samples).long().to(self.device)

    @property
    def _numbers(self) -> int:
        return self.feature.context * 256

    def _open(self, path: str) -> Any:
        return ()

    def pieces(self, size: int) -> Iterator[Piece]:
        """Yield lines that are not blank, in windows as an evaluation has them, in their order."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        windows = (
            ({"path": path, "line": number}, window)
            for path in self.files
            for number, tokens in self.dataset.lines(path)
            for window in _windows(tokens, self.feature.context)
        )
        while several := list(itertools.islice(windows, size)):
            about, tokens = zip(*several, strict=True)
            inputs = [torch.from_numpy(window[:-1]) for window in tokens]
            targets = [torch.from_numpy(window[1:]) for window in tokens]
            wanted = pad_sequence(targets, batch_first=True, padding_value=NO_TARGET)
            yield Piece(about, pad_sequence(inputs, batch_first=True), targets=wanted)


def _windows(tokens: np.ndarray, context: int) -> Iterator[np.ndarray]:
    import numpy as np

    if len(tokens) == 1:  # no token follows
        yield np.array([tokens[0], NO_TARGET])
    for start in range(0, len(tokens) - 1, context):
        yield tokens[start : start + context + 1].astype(np.int64)


_BY_FEATURE: Mapping[type[Feature], type[Inputs]] = {Image: Pictures, Columns: Rows, Tokens: Texts}


def inputs_of(dataset: DatasetConfig, features: Features, device: Any = "cpu") -> Inputs:
    """Return the inputs of a run's model, by its dataset and the features in its record."""
    return _BY_FEATURE.get(type(features.inputs), Inputs)(dataset, features, device)


def _are_arrays(given: Any) -> bool:
    """Return whether samples are numbers already: a tensor, an array, or several."""
    import numpy as np
    from torch import Tensor

    if isinstance(given, list | tuple):
        return any(map(_are_arrays, given))
    return isinstance(given, Tensor) or (isinstance(given, np.ndarray) and given.dtype.kind != "O")
