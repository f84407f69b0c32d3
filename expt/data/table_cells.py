"""What the columns of a table hold: numbers, labels and classes. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expt.data.table_files import Column
from expt.errors import DataError

if TYPE_CHECKING:
    import numpy as np

MEND = "give it a number, or remove the row"
_FLAGS = {"true": 1.0, "false": 0.0}
_PADDED = re.compile(r"[+-]?0\d")
"""A text that is no number, though it could be read as one: a code, as 007."""


def _integers(cells: np.ndarray, texts: Sequence[str]) -> np.ndarray | None:
    """The cells, where all are integers."""
    import numpy as np

    if cells.dtype.kind in "iu":
        return cells
    try:
        return np.array([int(text) for text in texts]) if texts else None
    except (ValueError, OverflowError):
        return None


def numbers_of(
    path: Path, columns: Mapping[str, Column], names: Sequence[str], mend: str = MEND
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The columns `names` as float64 [N, K], and the names of these K.

    Raises DataError for what is no number.
    """
    import numpy as np

    found = [_numbers(path, name, columns[name], mend) for name in names]
    parts = tuple(
        each for name, values in zip(names, found, strict=True) for each in _parts(name, values)
    )
    return np.concatenate(found, axis=1), parts


def _parts(name: str, values: np.ndarray) -> list[str]:
    """The names of a column's numbers: an array of an .npz may hold several in each row."""
    return (
        [name]
        if values.shape[1] == 1
        else [f"{name}[{number}]" for number in range(values.shape[1])]
    )


def _numbers(path: Path, name: str, column: Column, mend: str) -> np.ndarray:
    """A column as float64 [N, K].

    Raises DataError for a cell that is no finite number of float32.
    """
    import numpy as np

    values = as_numbers(column)
    if values is None:
        row = next(row for row, cell in enumerate(column) if not _is_number(cell))
        raise _wrong(path, name, row, column[row], mend)
    wrong = ~(np.abs(values) <= np.finfo(np.float32).max)
    if wrong.any():
        row, part = np.argwhere(wrong)[0]
        cell = column[row] if values.shape[1] == 1 else values[row, part]
        raise _wrong(path, name, int(row), cell, MEND)
    return values


def as_numbers(column: Column) -> np.ndarray | None:
    """A column as float64 [N, K], texts of true and false as 1 and 0; None where a cell is neither
    number nor such.
    """
    import numpy as np

    try:
        values = np.asarray(column, dtype=np.float64) if _may_be_numbers(column) else None
    except (TypeError, ValueError):
        values = _flags(column)
    return None if values is None else values.reshape(len(values), -1)


def number_of(cell: Any) -> float:
    """One cell's, read as `as_numbers` reads it; nan where it has none."""
    text = str(cell).strip().lower()
    if text in _FLAGS:
        return _FLAGS[text]
    try:
        return float(cell)
    except (TypeError, ValueError):
        return float("nan")


def _flags(column: Column) -> np.ndarray | None:
    """Texts of true and false as 1 and 0; None where there are others."""
    import numpy as np

    texts = [str(cell).strip().lower() for cell in column]
    return np.array([_FLAGS[text] for text in texts]) if {*texts} <= {*_FLAGS} else None


def _may_be_numbers(column: Column) -> bool:
    """Whether numpy may be asked: it takes a date for a number too, and drops the imaginary part of
    one.
    """
    dtype = getattr(column, "dtype", None)
    return dtype is None or dtype.kind in "biufUSO"


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return not hasattr(cell, "dtype") or cell.dtype.kind in "biufUSO"


def _wrong(path: Path, name: str, row: int, cell: Any, mend: str) -> DataError:
    text = str(cell).strip() if cell is not None else ""
    what = (
        "is empty"
        if not text
        else f"is {text}"
        if _is_number(cell)
        else f"{text[:40]!r} is no number"
    )
    return DataError(f"{path}: column {name}, row {row + 1}: {what}; {mend}")


def classes_of(path: Path, name: str, column: Column) -> tuple[np.ndarray, tuple[str, ...]]:
    """The class of each row, int64 [N], and their names: texts in order of the alphabet, integers,
    or False and True.

    Raises DataError for what is no class.
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
        names, classes = np.unique(texts, return_inverse=True)
    elif cells.dtype.kind == "b":  # as the texts of a .csv
        found, classes = np.unique(cells, return_inverse=True)
        names = found.astype(str)
    elif (
        whole := _integers(cells, texts)
    ) is not None:  # not by float64, in which large ones are alike
        found, classes = np.unique(whole, return_inverse=True)
        names = found.astype(str)
    else:
        numbers = _numbers(path, name, column, MEND)[:, 0]
        if (numbers != np.floor(numbers)).any():
            row = int(np.argmax(numbers != np.floor(numbers)))
            raise DataError(
                f"{path}: column {name}, row {row + 1}: {numbers[row]:g} is no class, which is an"
                " integer or a text; mend it, or use task=regression"
            )
        found, classes = np.unique(numbers, return_inverse=True)
        names = np.array([f"{number:.0f}" for number in found])
    return classes.astype(np.int64), tuple(map(str, names))


def check_learnable(path: Path, name: str, classes: np.ndarray, names: Sequence[str]) -> None:
    """Raise DataError where nothing can be learned of the column's classes: one alone, or too few
    rows of each.
    """
    if len(names) == 1:
        raise DataError(
            f"{path}: column {name}: all rows are of one class, {names[0]}; name another target"
        )
    if len(names) > max(20, len(classes) / 2):
        told = f"has {len(names)} classes in {len(classes)} rows, too few of each to learn one"
        raise DataError(
            f"{path}: column {name}: {told}; use task=regression for numbers, or name another"
            " target"
        )


def _text(cell: Any) -> str:
    return cell.decode(errors="replace") if isinstance(cell, bytes) else str(cell)


def check_labels(path: Path, names: Sequence[str], values: np.ndarray) -> None:
    """Raise DataError for what is neither 0 nor 1."""
    import numpy as np

    wrong = (values != 0) & (values != 1)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise DataError(
            f"{path}: column {names[column]}, row {row + 1}: {values[row, column]:g} is no label,"
            " which is 0 or 1; mend it, or use task=regression"
        )
