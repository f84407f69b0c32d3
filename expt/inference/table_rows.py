"""The features of a table's rows, in the order in which a model was trained on them, piece by
piece. Free of torch.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from expt.data.columns import Column, as_numbers, columns_of, csv_names, number_of
from expt.errors import ConfigError, DataError, did_you_mean, first_line
from expt.inference import arrays

if TYPE_CHECKING:
    import numpy as np


class Rows(NamedTuple):
    """Some consecutive rows of a table."""

    first: int
    """which they are, from 1"""
    features: np.ndarray
    """float64 [n, F]"""
    wrong: Mapping[int, str]
    """of those that have no features, by their place among these: why"""


class Features:
    """What a model takes of a table: columns by name, or where they are not known all but the
    `targets`.
    """

    def __init__(self, names: Sequence[str], targets: Sequence[str], number: int) -> None:
        self._names, self._targets, self._number = list(names), {*targets}, number

    def check(self, path: str) -> None:
        """Raise ConfigError where the table has not the columns, DataError where it is none."""
        if path.lower().endswith(".npy"):
            self._of_array(path)
        else:
            self._chosen(path, _head(path))

    def read(self, path: str, size: int) -> Iterator[Rows]:
        """All rows, up to `size` at a time. Raises DataError where the file is damaged."""
        if path.lower().endswith(".npy"):
            array = self._of_array(path)
            for start in range(0, len(array), size):
                yield _rows(
                    path,
                    start + 1,
                    {"x": array[start : start + size]},
                    [("x", None)],
                    self._names,
                    {},
                )
            return
        chosen = self._chosen(path, _head(path))
        first = 1
        for columns, damaged in _pieces(path, size, [name for name, _ in chosen]):
            rows = _rows(path, first, columns, chosen, self._names, damaged)
            yield rows
            first += len(rows.features)

    def _of_array(self, path: str) -> np.ndarray:
        array = arrays.opened(path)
        if array.ndim != 2 or array.shape[1] != self._number or array.dtype.kind not in "biuf":
            wanted = f"[rows, {self._number}]"
            raise ConfigError(
                f"{path}: is {list(array.shape)} of {array.dtype}, and the model takes {wanted}"
                " numbers"
            )
        return array

    def _chosen(self, path: str, columns: Mapping[str, int]) -> list[tuple[str, int | None]]:
        """Columns, and which number of one that has several in each row.

        `columns` says how many each has.
        """
        if not self._names:
            chosen = [
                (name, part if width > 1 else None)
                for name, width in columns.items()
                for part in range(width)
                if name not in self._targets
            ]
            if len(chosen) != self._number:
                has = f"has {len(chosen)} columns beside {', '.join(self._targets)}"
                raise ConfigError(
                    f"{path}: {has}, and the model takes {self._number}; leave the others out"
                )
            return chosen
        return [self._find(path, name, columns) for name in self._names]

    def _find(self, path: str, name: str, columns: Mapping[str, int]) -> tuple[str, int | None]:
        if columns.get(name) == 1:
            return name, None
        part = re.fullmatch(r"(.*)\[(\d+)\]", name)  # of an array with several numbers in a row
        if part and int(part[2]) < columns.get(part[1], 0):
            return part[1], int(part[2])
        if name in columns:
            raise ConfigError(
                f"{path}: column {name} has {columns[name]} numbers in a row, expected one"
            )
        has = ", ".join(list(columns)[:20]) + (", ..." if len(columns) > 20 else "")
        raise ConfigError(
            f"{path}: has no column {name}, which the model takes; it has"
            f" {has}.{did_you_mean(name, list(columns))}"
        )


def _head(path: str) -> dict[str, int]:
    """The names of a table's columns, and how many numbers each has in a row."""
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        with _open_csv(path) as rows:
            return dict.fromkeys(_csv_head(path, rows), 1)
    if suffix == ".parquet":
        return dict.fromkeys(_parquet(path).schema_arrow.names, 1)
    return {
        name: len(column[0]) if getattr(column, "ndim", 1) == 2 else 1
        for name, column in _whole(path).items()
    }


def _whole(path: str) -> Mapping[str, Column]:
    try:
        return columns_of(Path(path))
    except DataError:
        raise
    except ConfigError as error:  # speaks of dataset.path
        raise ConfigError(
            [problem.removeprefix("dataset.path=") for problem in error.problems]
        ) from error


def _pieces(
    path: str, size: int, names: Sequence[str]
) -> Iterator[tuple[Mapping[str, Any], dict[int, str]]]:
    """Columns of up to `size` rows at a time, and which of them are damaged."""
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        yield from _csv_pieces(path, size)
    elif suffix == ".parquet":
        for batch in _parquet(path).iter_batches(
            batch_size=size, columns=list(dict.fromkeys(names))
        ):
            yield (
                {
                    name: batch.column(name).to_numpy(zero_copy_only=False)
                    for name in batch.schema.names
                },
                {},
            )
    else:
        columns = _whole(path)
        length = len(next(iter(columns.values())))
        for start in range(0, length, size):
            yield {name: columns[name][start : start + size] for name in names}, {}


@contextlib.contextmanager
def _open_csv(path: str) -> Iterator[Iterator[list[str]]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield (row for row in csv.reader(file, skipinitialspace=True) if row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a .csv ({error}); mend or replace it") from error


def _csv_head(path: str, rows: Iterator[list[str]]) -> list[str]:
    if (first := next(rows, None)) is None:
        raise DataError(f"{path}: is empty; its first line names the columns")
    return csv_names(Path(path), first)


def _csv_pieces(path: str, size: int) -> Iterator[tuple[Mapping[str, Any], dict[int, str]]]:
    with _open_csv(path) as rows:
        names = _csv_head(path, rows)
        while piece := list(itertools.islice(rows, size)):
            odd = {place: len(row) for place, row in enumerate(piece) if len(row) != len(names)}
            blank = [""] * len(names)
            cells = [blank if place in odd else row for place, row in enumerate(piece)]
            damaged = {
                place: f"has {number} cells for {len(names)} columns"
                for place, number in odd.items()
            }
            yield dict(zip(names, zip(*cells, strict=True), strict=True)), damaged


def _parquet(path: str) -> Any:
    try:
        from pyarrow import lib, parquet
    except ImportError:
        raise ConfigError(f"{path}: is read by pyarrow; install it: pip install pyarrow") from None
    try:
        return parquet.ParquetFile(path)  # type: ignore[no-untyped-call, unused-ignore]
    except (OSError, lib.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read as a .parquet ({first_line(error)}); mend it"
        ) from error


def _rows(
    path: str,
    first: int,
    columns: Mapping[str, Any],
    chosen: Sequence[tuple[str, int | None]],
    names: Sequence[str],
    damaged: Mapping[int, str],
) -> Rows:
    import numpy as np

    numbers = {name: _numbers(columns[name]) for name, _ in chosen}
    features = np.concatenate([numbers[name] if part is None else numbers[name][:, part, None]
                               for name, part in chosen], axis=1)  # fmt: skip
    bad = ~(np.abs(features) <= np.finfo(np.float32).max)
    wrong = dict(damaged)
    for place in map(int, np.flatnonzero(bad.any(1))):
        if place not in wrong:
            column = int(np.argmax(bad[place]))
            name, part = chosen[column] if len(chosen) > 1 else chosen[0]
            cell = (
                columns[name][place]
                if part is None and numbers[name].shape[1] == 1
                else features[place, column]
            )
            shown = names[column] if column < len(names) else name
            wrong[place] = f"column {shown} {_told(cell)}"
    return Rows(first, features, wrong)


def _numbers(cells: Column) -> np.ndarray:
    """A column as float64 [n, K], nan where there is no number."""
    import numpy as np

    values = as_numbers(cells)
    return np.array([number_of(cell) for cell in cells])[:, None] if values is None else values


def _told(cell: Any) -> str:
    text = "" if cell is None else str(cell).strip()
    if not text:
        return "is empty"
    try:
        float(text)
    except ValueError:
        return f"holds {text[:40]!r}, which is no number"
    return f"is {text}"
