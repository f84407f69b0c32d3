"""The columns of a table's file: .csv, .npz or .parquet. Free of torch."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from expt.errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    import numpy as np

Column: TypeAlias = "Sequence[Any] | np.ndarray"
"""A cell for each row: texts of a .csv; else an array [N], of an .npz [N, K] too."""


def columns_of(path: Path) -> Mapping[str, Column]:
    """A table's columns by name, all of one length.

    Raises DataError for a file that is no table.
    """
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise ConfigError(
            f"dataset.path={path}: is no {', '.join(_READERS)}; convert it to one of them"
        )
    try:
        return read(path)
    except (
        OSError,
        UnicodeDecodeError,
        csv.Error,
        zipfile.BadZipFile,
        ValueError,
        EOFError,
    ) as error:
        what = first_line(error)
        raise DataError(
            f"{path} cannot be read as a {path.suffix} ({what}); mend or replace it"
        ) from error


def _csv(path: Path) -> Mapping[str, Column]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.reader(file, skipinitialspace=True) if row]
    if not rows:
        raise DataError(f"{path}: is empty; its first line names the columns")
    names = csv_names(path, rows.pop(0))
    for number, row in enumerate(rows):
        if len(row) != len(names):
            raise DataError(
                f"{path}: row {number + 1} has {len(row)} cells for {len(names)} columns; mend it"
            )
    return dict(zip(names, zip(*rows, strict=True) if rows else [()] * len(names), strict=True))


def csv_names(path: Path, first: Sequence[str]) -> list[str]:
    """The names of a .csv's columns, which its first line holds.

    Raises DataError where they are none.
    """
    names = [name.strip() for name in first]
    if len(names) == 1 and any(other in names[0] for other in ";\t"):
        raise DataError(f"{path}: its columns are not separated by commas; write it with commas")
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}: two columns are called {twice[0]!r}; rename one")
    if all(map(_is_number, names)):
        raise DataError(
            f"{path}: its first line is one of numbers ({', '.join(names)[:40]}); name the columns"
            " there"
        )
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _npz(path: Path) -> Mapping[str, Column]:
    import numpy as np

    with np.load(path, allow_pickle=False) as file:
        arrays = (
            {name: file[name] for name in file.files}
            if isinstance(file, np.lib.npyio.NpzFile)
            else {}
        )
    if not arrays:
        raise DataError(
            f"{path}: holds no arrays by name; write it with numpy.savez(path, x=..., y=...)"
        )
    first = next(iter(arrays))
    for name, array in arrays.items():
        if array.ndim not in (1, 2) or not array[:1].size:
            raise DataError(
                f"{path}: the array {name} is {list(array.shape)}; a column is [rows] or [rows,"
                " numbers]"
            )
        if len(array) != len(arrays[first]):
            raise DataError(
                f"{path}: {first} has {len(arrays[first])} rows, and {name} {len(array)}; make them"
                " equal"
            )
    return arrays


def _parquet(path: Path) -> Mapping[str, Column]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            f"dataset.path={path}: is read by pyarrow; install it: pip install pyarrow"
        ) from None
    table = parquet.read_table(path)  # type: ignore[no-untyped-call, unused-ignore]
    return {name: table.column(name).to_numpy() for name in table.column_names}


_READERS: dict[str, Callable[[Path], Mapping[str, Column]]] = {
    ".csv": _csv,
    ".npz": _npz,
    ".parquet": _parquet,
}
