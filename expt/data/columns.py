"""The columns of a table: a .csv, .npz or .parquet as numbers, labels, classes. Free of torch."""

from __future__ import annotations

import csv
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from expt.errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    import numpy as np

Column: TypeAlias = "Sequence[Any] | np.ndarray"
"""A cell for each row: texts of a .csv; else an array [N], of an .npz [N, K] too."""
FIX = "give it a number, or remove the row"
_FLAGS = {"true": 1.0, "false": 0.0}
_PADDED = re.compile(r"[+-]?0\d")
"""A text that is no number, though it could be read as one: a code such as 007."""


def columns_of(path: Path, damaged: dict[int, str] | None = None) -> Mapping[str, Column]:
    """Return a table's columns by name, all of one length. Raise DataError for another file.

    Lines of a .csv with too few or too many cells are left empty and noted in `damaged`, if given.
    """
    read = _READERS.get(path.suffix.lower())
    if read is None:
        known = ", ".join(_READERS)
        raise ConfigError(f"dataset.path={path}: is no {known}; convert it to one of them")
    try:
        return _csv(path, damaged) if read is _csv else read(path)
    except (OSError, UnicodeDecodeError, csv.Error, zipfile.BadZipFile, ValueError, EOFError) as e:
        raise DataError(f"{path} cannot be read as a {path.suffix} ({first_line(e)})") from e


def _csv(path: Path, damaged: dict[int, str] | None = None) -> Mapping[str, Column]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.reader(file, skipinitialspace=True) if row]
    if not rows:
        raise DataError(f"{path}: is empty; its first line names the columns")
    names = _names(path, rows.pop(0))
    for number, row in enumerate(rows):
        if len(row) != len(names):
            why = f"has {len(row)} cells for {len(names)} columns"
            if damaged is None:
                raise DataError(f"{path}: row {number + 1} {why}; fix it")
            damaged[number], rows[number] = why, [""] * len(names)
    return dict(zip(names, zip(*rows, strict=True) if rows else [()] * len(names), strict=True))


def _names(path: Path, first: Sequence[str]) -> list[str]:
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


def _npz(path: Path) -> Mapping[str, Column]:
    import numpy as np

    with np.load(path, allow_pickle=False) as file:
        is_npz = isinstance(file, np.lib.npyio.NpzFile)
        arrays = {name: file[name] for name in file.files} if is_npz else {}
    if not arrays:
        raise DataError(
            f"{path}: holds no arrays by name; write it with numpy.savez(path, x=..., y=...)"
        )
    for name, array in arrays.items():
        if array.ndim not in (1, 2) or not array[:1].size:
            raise DataError(
                f"{path}: the array {name} is {list(array.shape)}; a column is [rows] or [rows,"
                " numbers]"
            )
    lengths = {name: len(array) for name, array in arrays.items()}
    if len({*lengths.values()}) > 1:
        raise DataError(f"{path}: its arrays differ in their rows: {lengths}")
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


def numbers_of(
    path: Path,
    columns: Mapping[str, Column],
    names: Sequence[str],
    fix: str = FIX,
    damaged: dict[int, str] | None = None,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the columns `names` as float64 [N, K], and the names of these K.

    An array of an .npz may hold several numbers in each row. Raise DataError for what is none, or
    note its row in `damaged`, if given.
    """
    import numpy as np

    found = [_numbers(path, name, columns[name], fix, damaged) for name in names]
    parts = tuple(
        name if values.shape[1] == 1 else f"{name}[{number}]"
        for name, values in zip(names, found, strict=True)
        for number in range(values.shape[1])
    )
    return np.concatenate(found, axis=1), parts


def _numbers(
    path: Path, name: str, column: Column, fix: str, damaged: dict[int, str] | None = None
) -> np.ndarray:
    """Return a column as float64 [N, K], each a finite number of float32."""
    import numpy as np

    values = _all_numbers(column)
    if values is None and damaged is not None:
        values = np.array([_number(cell) for cell in column])[:, None]
    if values is None:
        row = next(row for row, cell in enumerate(column) if not _is_number(cell))
        raise _wrong(path, name, row, column[row], fix)
    wrong = ~(np.abs(values) <= np.finfo(np.float32).max)
    if damaged is not None:
        for place in np.flatnonzero(wrong.any(1)).tolist():
            cell = str(column[place])[:40]
            damaged.setdefault(place, f"column {name} holds {cell!r}, which is no number")
    elif wrong.any():
        row, part = np.argwhere(wrong)[0]
        cell = column[row] if values.shape[1] == 1 else values[row, part]
        raise _wrong(path, name, int(row), cell, FIX)
    return values


def _all_numbers(column: Column) -> np.ndarray | None:
    """Return a column as float64 [N, K], true and false as 1 and 0; None where a cell is neither.

    NumPy is not asked for dates, which it takes for numbers, nor for complex numbers, of which it
    drops a part.
    """
    import numpy as np

    dtype = getattr(column, "dtype", None)
    if dtype is not None and dtype.kind not in "biufUSO":
        return None
    try:
        values = np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError):
        texts = [str(cell).strip().lower() for cell in column]
        if not {*texts} <= {*_FLAGS}:
            return None
        values = np.array([_FLAGS[text] for text in texts])
    return values.reshape(len(values), -1)


def _number(cell: Any) -> float:
    """Return one cell's number, read as `_all_numbers` reads it; nan where it has none."""
    text = str(cell).strip().lower()
    if text in _FLAGS:
        return _FLAGS[text]
    try:
        return float(cell)
    except (TypeError, ValueError):
        return float("nan")


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return not hasattr(cell, "dtype") or cell.dtype.kind in "biufUSO"


def _wrong(path: Path, name: str, row: int, cell: Any, fix: str) -> DataError:
    text = str(cell).strip() if cell is not None else ""
    what = f"is {text}" if _is_number(cell) else f"{text[:40]!r} is no number"
    return DataError(f"{path}: column {name}, row {row + 1}: {what if text else 'is empty'}; {fix}")


def classes_of(path: Path, name: str, column: Column) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the class of each row, int64 [N], and their names.

    These are texts in order of the alphabet, integers, or False and True. Raise DataError for what
    is no class.
    """
    import numpy as np

    cells = np.asarray(column)
    if cells.ndim == 2 and cells.shape[1] == 1:
        cells = cells[:, 0]
    if cells.ndim != 1:
        raise DataError(
            f"{path}: column {name} has {cells.shape[1]} numbers in each row; a class is one"
        )
    texts = (
        ["" if cell is None else _text(cell).strip() for cell in cells]
        if cells.dtype.kind in "OUS"
        else []
    )
    if texts and not (all(map(_is_number, cells)) and not any(map(_PADDED.match, texts))):
        if "" in texts:
            raise _wrong(path, name, texts.index(""), "", "give it a class, or remove the row")
        found, classes = np.unique(texts, return_inverse=True)
    elif cells.dtype.kind == "b":  # as the texts of a .csv
        found, classes = np.unique(cells, return_inverse=True)
    elif (whole := _integers(cells, texts)) is not None:  # float64 has large ones alike
        found, classes = np.unique(whole, return_inverse=True)
    else:
        numbers = _numbers(path, name, column, FIX)[:, 0]
        if (odd := numbers != np.floor(numbers)).any():
            row = int(np.argmax(odd))
            raise DataError(
                f"{path}: column {name}, row {row + 1}: {numbers[row]:g} is no class, which is an"
                " integer or a text; fix it, or use task=regression"
            )
        found, classes = np.unique(numbers, return_inverse=True)
        found = np.array([f"{number:.0f}" for number in found])
    return classes.astype(np.int64), tuple(map(str, found.astype(str)))


def _integers(cells: np.ndarray, texts: Sequence[str]) -> np.ndarray | None:
    import numpy as np

    if cells.dtype.kind in "iu":
        return cells
    try:
        return np.array([int(text) for text in texts]) if texts else None
    except (ValueError, OverflowError):
        return None


def _text(cell: Any) -> str:
    return cell.decode(errors="replace") if isinstance(cell, bytes) else str(cell)


def check_learnable(path: Path, name: str, classes: np.ndarray, names: Sequence[str]) -> None:
    """Raise DataError where nothing can be learned of classes: only one, or few rows of each."""
    if len(names) == 1:
        raise DataError(
            f"{path}: column {name}: all rows are of one class, {names[0]}; name another target"
        )
    if len(names) > max(20, len(classes) / 2):
        raise DataError(
            f"{path}: column {name}: has {len(names)} classes in {len(classes)} rows, too few of"
            " each to learn one; use task=regression for numbers, or name another target"
        )


def check_labels(path: Path, names: Sequence[str], values: np.ndarray) -> None:
    """Raise DataError for what is neither 0 nor 1."""
    import numpy as np

    wrong = (values != 0) & (values != 1)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise DataError(
            f"{path}: column {names[column]}, row {row + 1}: {values[row, column]:g} is no label,"
            " which is 0 or 1; fix it, or use task=regression"
        )
