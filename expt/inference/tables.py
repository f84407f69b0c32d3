"""Rows of tables and texts as the inputs of a run's model, which its feature chooses."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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
from expt.data.table_files import SUFFIXES, Arrays, Table, Uses, open_table, reading
from expt.errors import ConfigError, DataError, did_you_mean, first_line, listed, warn
from expt.features import NO_TARGET, Columns, Feature, Features, Image, Text, Tokens
from expt.features.feature import new_names
from expt.inference.inputs import Inputs, Pictures, Piece, Sample, are_arrays, array_of, as_tensor
from expt.late import np, pa, torch

if TYPE_CHECKING:
    from torch import Tensor

    from expt.data.table_source import Encoder


_Read: TypeAlias = tuple[Any, Mapping[int, str], Mapping[str, Counter[str]]]
"""The values of rows, why some can't be used, and how often columns have unknown texts."""


class _Opened(NamedTuple):
    """A table with the model's columns."""

    table: Table
    taken: Sequence[str]
    """The columns that have the features."""
    order: Sequence[int]
    """The place of each feature among the parts of these columns."""
    uses: Uses = Uses()


class _Batch(NamedTuple):
    """Some rows that follow each other in a table."""

    rows: range
    """Their numbers, from 0."""
    whole: np.ndarray
    """The numbers of those that are not damaged."""
    values: Any
    """The values of these."""
    wrong: Mapping[int, str]
    """Why a row can't be used, by its number."""
    others: Mapping[str, Sequence[str]]
    """The cells of other columns, by their names among the answers."""


class TableInputs(Inputs):
    """Rows of tables, whose columns are found by name."""

    @property
    def _encoded(self) -> Mapping[str, Mapping[str, Any]]:
        return self.feature.encoded if isinstance(self.feature, Columns) else {}

    def _files_of(self, path: Path) -> list[str]:
        """Return the files, or the folder where folders `key=value` have a column of the model."""
        found = super()._files_of(path)
        below = (Path(file).relative_to(path).parts[:-1] for file in found if path.is_dir())
        keys = {part.partition("=")[0] for parts in below for part in parts if "=" in part}
        if not (needed := keys.intersection(self._bases().values())):
            return found
        has_them = found[0].endswith(".npy") or needed <= {*open_table(Path(found[0])).names}
        return found if has_them else [str(path)]

    def _bases(self) -> dict[str, str]:
        """Return the column that each feature is made from."""
        return {x: base(x, self._encoded.get(x, {}).get("way", "")) for x in self.feature.names}

    def _open(self, path: str) -> _Opened:
        """Return the table. Raise ConfigError where the model's columns are not there."""
        table, wanted = open_table(Path(path)), self.feature.names
        columns = {x: x if x in table.names else y for x, y in self._bases().items()}
        taken = [name for name in dict.fromkeys(columns.values()) if name in table.names]
        if (first := next(table.batches(taken or table.names[:1], {}), None)) is None:
            raise DataError(f"{path}: has no rows; give it some")
        parts = [part for name in taken for part in self._parts(name, first.column(name))]
        if missing := next((name for name in wanted if name not in parts), None):
            missing = missing if columns[missing] in table.names else columns[missing]
            raise ConfigError(
                f"{path}: has no column {missing}, which the model takes; it has"
                f" {listed(table.names, 20)}.{did_you_mean(missing, table.names)}"
            )
        return _Opened(table, taken, [*map(parts.index, wanted)])

    @property
    def size(self) -> int | None:
        sizes = [opened.table.size for opened in self._opened]
        return sum(sizes) if all(sizes) else None

    @functools.cached_property
    def columns(self) -> Mapping[str, str]:
        """See Inputs."""
        known = self.targets.columns
        tables = ((opened.table.names, {*opened.taken, *known}) for opened in self._opened)
        others = {name: name for names, taken in tables for name in names if name not in taken}
        return new_names(others, ("path", "row"))

    def pieces(self, size: int) -> Iterator[Piece]:
        """Yield the rows that can be used, and why others can't, of `size` rows at a time.

        Their origin has all tables' `columns`, empty where a table lacks one.
        """
        for path, opened in zip(self.files, self._opened, strict=True):
            unknown = collections.defaultdict[str, Counter[str]](Counter)
            for batch in self._batches(opened, unknown):
                for rows in (batch.rows[at : at + size] for at in range(0, len(batch.rows), size)):
                    yield self._piece(path, batch, rows)
            for name, texts in unknown.items():
                warn(f"{path}: {self._unknown(name, texts)}")

    def _batches(self, opened: _Opened, unknown: dict[str, Counter[str]]) -> Iterator[_Batch]:
        """Yield all rows of a table, and count the texts that no training row has."""
        table, taken, _, uses = opened
        others = [name for name in self.columns if name in {*table.names}.difference(taken)]
        begin, damaged = 0, dict[int, str]()
        for batch in table.batches([*taken, *others], damaged, uses._replace(kept=others)):
            rows = range(begin, begin + batch.num_rows)
            wrong = {row: why for row, why in damaged.items() if row in rows}
            whole = np.setdiff1d(np.arange(begin, rows.stop), [*wrong])
            columns = {x: batch.column(x) for x in taken}
            if wrong:
                columns = {x: cells.take(pa.array(whole - begin)) for x, cells in columns.items()}
            values, unfit, new = self._read(columns, opened)
            for name, texts in new.items():
                unknown[name] += texts
            wrong |= {int(whole[place]): why for place, why in unfit.items()}
            cells = {name: [""] * len(rows) for name in self.columns.values()}
            cells |= {self.columns[x]: texts_of(batch.column(x)) for x in others}
            yield _Batch(rows, whole, values, wrong, cells)
            begin = rows.stop

    def _piece(self, path: str, batch: _Batch, rows: range) -> Piece:
        begin, wrong, others = batch.rows.start, batch.wrong, batch.others
        good = [row for row in rows if row not in wrong]
        skipped = [f"{path}: row {row + 1}: {wrong[row]}" for row in rows if row in wrong]
        about: list[Mapping[str, str | int]] = [
            {"path": path, "row": row + 1, **{x: others[x][row - begin] for x in others}}
            for row in good
        ]
        places = np.searchsorted(batch.whole, good)
        samples, targets = self._chosen(batch.values, places) if good else ((), None)
        return Piece(about, samples, skipped, targets)

    def _unknown(self, name: str, texts: Counter[str]) -> str:
        is_text = "categories" in self._encoded.get(name, {})
        several = texts.total()
        return unknown_texts(name, texts, several) if is_text else filled_gaps(name, several)

    def _parts(self, name: str, cells: Any) -> Sequence[str]:
        """Return the names of the values that a column becomes."""
        return [name]

    def _read(self, columns: Mapping[str, Any], opened: _Opened) -> _Read:
        """Return the values of rows that are not damaged, by their columns."""
        raise NotImplementedError

    def _chosen(self, values: Any, places: np.ndarray) -> tuple[Any, Any]:
        """Return the samples at these places, and the targets that they imply."""
        raise NotImplementedError


class Rows(TableInputs):
    """Rows of numbers: texts and gaps as in training."""

    noun, suffixes, below = "row", (*SUFFIXES, ".npy"), (*SUFFIXES, ".npy")
    feature: Columns

    @functools.cached_property
    def _encoder(self) -> Encoder:
        from expt.data.table_source import Encoder

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
        encoded: Tensor = self._encoder(rows.cpu()).float()
        return encoded.to(self.device)

    def _coded(self, given: Any) -> np.ndarray:
        """Return rows of numbers, texts and None as the encoder takes them, float64 [N, F]."""
        names = self.feature.cell_names
        if hasattr(given, "columns"):  # of pandas, by their names
            if missing := [name for name in names if name not in given.columns]:
                raise ConfigError(f"rows without the column {missing[0]}: give {', '.join(names)}")
            given = given[[*names]].to_numpy(object)
        rows = np.atleast_1d(np.array(given, object))
        if any(isinstance(cell, list | tuple | np.ndarray) for cell in rows.flat):
            raise ConfigError(f"rows of different lengths: give {', '.join(names)} in each")
        rows = rows.reshape(-1, max(1, rows.shape[-1]))
        if rows.shape[1] != len(names) or not len(rows):
            raise ConfigError(
                f"rows of {rows.shape[1] if len(rows) else 0} cells: give {', '.join(names)}"
            )
        columns = {name: self._cells(name, each) for name, each in zip(names, rows.T, strict=True)}
        values, wrong, unknown = read_as_known(columns, self.feature.encoded, self.feature.filled)
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

    def _open(self, path: str) -> _Opened:
        """Return the table, or the rows of an array, whose columns have no names but their order.

        Raise ConfigError where the model's columns are not there.
        """
        if not path.lower().endswith(".npy"):
            return super()._open(path)
        if self.feature.encoded:
            raise ConfigError(f"{path}: the run's columns are found by name; give a table")
        with reading(Path(path)):
            array = array_of(path)
            table = Arrays(Path(path), {"x": array})
        width, wanted = math.prod(array.shape[1:]), len(self.feature.names)
        if width != wanted:
            raise ConfigError(f"{path}: has {width} columns, and the model takes {wanted}")
        return _Opened(table, table.names, range(width))

    def _parts(self, name: str, cells: Any) -> Sequence[str]:
        """Return the names of the numbers that a column becomes; a date is several."""
        column = known_column(name, self.feature.encoded)
        column.read(cells)
        return column.parts

    def _read(self, columns: Mapping[str, Any], opened: _Opened) -> _Read:
        values, wrong, unknown = read_as_known(columns, self.feature.encoded, self.feature.filled)
        return values[:, opened.order], wrong, unknown

    def _chosen(self, values: Any, places: np.ndarray) -> tuple[Any, Any]:
        return values[places], None


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


class TextRows(TableInputs):
    """Texts by themselves, or those of a table's columns by name."""

    noun, suffixes, below = "text", SUFFIXES, SUFFIXES
    feature: Text
    _taken: Sequence[str] = ()

    def _encode(self, columns: Sequence[Sequence[Any]]) -> tuple[Any, Any]:
        """Return the inputs and the following tokens of texts, given by column."""
        from expt.data import texts
        from expt.data.tokenizer import Tokenizer

        own, is_causal = self.feature, isinstance(self.targets, Tokens)
        tokenizer = Tokenizer(own.tokenizer, own.role, own.max_tokens, is_causal=is_causal)
        found = tokenizer.encode(columns)
        inputs, following = texts.padded(own, found.ids, found.counted, found.types)
        return inputs, following if is_causal else None

    def __call__(self, samples: Sample | Sequence[Sample]) -> Any:
        """Return the batch of texts; one that is a batch already is only moved."""
        if isinstance(samples, Mapping):
            return {name: as_tensor(one).to(self.device) for name, one in samples.items()}
        asks = self.feature.role == "prompt"
        is_pair = asks and isinstance(samples, tuple) and [*map(type, samples)] == [str, str]
        several = [samples] if is_pair or isinstance(samples, str) else [*samples]
        first = several[0] if several else None
        columns: Sequence[Any] = [several]
        if isinstance(first, Mapping):  # a message: all are one conversation
            columns = [[several]]
        if asks and not isinstance(first, str):  # with its response
            columns = [*zip(*several, strict=True)]
        return self(self._encode(columns)[0])

    def take(self, texts: Sequence[str]) -> None:
        """See Inputs."""
        if self.feature.role != "text":
            names = ", ".join(self.feature.names)
            raise ConfigError(f"--text: give a table with {names}, which the model takes")
        self._taken = texts

    @property
    def size(self) -> int | None:
        rows = super().size
        return None if rows is None else rows + len(self._taken)

    def pieces(self, size: int) -> Iterator[Piece]:
        """Yield texts, then rows with the other columns of their table, such as an ID."""
        for start in range(0, len(self._taken), size):
            texts = self._taken[start : start + size]
            inputs, following = self._encode([texts])
            yield Piece([{"text": text} for text in texts], inputs, targets=following)
        yield from super().pieces(size)

    def _open(self, path: str) -> _Opened:
        opened = super()._open(path)
        return opened._replace(uses=Uses(texts=opened.taken))

    def _read(self, columns: Mapping[str, Any], opened: _Opened) -> _Read:
        from expt.data.texts import cells_of

        gaps = {x: Counter({"": each.null_count}) for x, each in columns.items() if each.null_count}
        return [cells_of(cells, name) for name, cells in columns.items()], {}, gaps

    def _unknown(self, name: str, texts: Counter[str]) -> str:
        return f"column {name}: {texts.total()} cells are empty, and are read as empty texts"

    def _chosen(self, values: Any, places: np.ndarray) -> tuple[Any, Any]:
        return self._encode([[texts[place] for place in places] for texts in values])


_BY_FEATURE: Mapping[type[Feature], type[Inputs]] = {
    Image: Pictures,
    Columns: Rows,
    Tokens: Texts,
    Text: TextRows,
}


def inputs_of(dataset: DatasetConfig, features: Features, device: Any = "cpu") -> Inputs:
    """Return the inputs of a run's model, by its dataset and the features in its record."""
    return _BY_FEATURE.get(type(features.inputs), Inputs)(dataset, features, device)
