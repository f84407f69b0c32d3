"""The columns of a table: a .csv, .npz or .parquet as numbers, labels, classes. Free of torch."""

from __future__ import annotations

import csv
import math
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from expt.data.plain_text import composed, opened
from expt.errors import ConfigError, DataError, collected, first_line

if TYPE_CHECKING:
    import numpy as np

Column: TypeAlias = "Sequence[Any] | np.ndarray"
"""A cell for each row: texts of a .csv; else an array [N], of an .npz [N, K] too."""
FIX = "give it a number, or remove the row"
_FLAGS = {"true": 1.0, "false": 0.0}
_NUMBER = re.compile(
    r"\s*[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|inf|infinity)\s*", re.ASCII | re.IGNORECASE
)
"""A text that is a number: float() takes 1_0 for 10, too."""
_INTEGER = re.compile(r"-?\d+(\.0*)?", re.ASCII)
"""A text that is a class by its value, for pandas writes 7 as 7.0 where a cell is empty."""
_PADDED = re.compile(r"[+-]?0\d")
"""A text that is not a number, though it could be read as one: a code such as 007."""
_COMMA = re.compile(r"[+-]?[\d.]*\d,\d[\d,]*")
MISSING = frozenset(
    "#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|"
    "null|".split("|")
)
"""Texts that pandas reads as no value."""
_UNNAMED = re.compile(r"Unnamed: \d+|__index_level_\d+__")
"""What pandas calls a column without a name, which is where it writes its index."""
_SHOWN = 8
"""Columns with something wrong that are listed."""
FEW = 20
"""Rows of which numbers may follow each other by chance."""


class Columns(dict[str, Column]):
    """A table's columns by name, all of one length."""

    index: frozenset[str] = frozenset()
    """Those that pandas wrote as its index, or without a name."""


def columns_of(path: Path, damaged: dict[int, str] | None = None) -> Columns:
    """Return a table's columns. Raise DataError for another file.

    Lines of a .csv with too few or too many cells are left empty and noted in `damaged`, if given.
    """
    read = _READERS.get(path.suffix.lower())
    if read is None:
        known = ", ".join(_READERS)
        raise ConfigError(f"dataset.path={path}: is no {known}; convert it to one of them")
    try:
        columns = _csv(path, damaged) if read is _csv else read(path)
    except (OSError, zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as e:
        raise DataError(f"{path} cannot be read as a {path.suffix} ({first_line(e)})") from e
    columns.index |= {*filter(_UNNAMED.fullmatch, columns)}
    return columns


def _csv(path: Path, damaged: dict[int, str] | None = None) -> Columns:
    rows, limit = list[list[str]](), csv.field_size_limit(2**31 - 1)
    with opened(path, "utf-8-sig") as file:
        try:
            rows.extend(csv.reader(file, skipinitialspace=True, strict=True))
        except csv.Error as error:  # a quote that is never closed is noticed at the file's end
            line = 1 + len(rows) + sum(cell.count("\n") for row in rows for cell in row)
            raise DataError(
                f"{path}: a quote is wrong in the row of line {line} ({error}); fix it there"
            ) from error
        finally:
            csv.field_size_limit(limit)
    rows = [row for row in rows if row]
    while rows and not any(map(str.strip, rows[-1])):  # as spreadsheets end a file
        rows.pop()
    if not rows:
        raise DataError(f"{path}: is empty; its first line names the columns")
    names = _names(path, rows.pop(0))
    for number, row in enumerate(rows):
        if len(row) != len(names):
            why = f"has {len(row)} cells for {len(names)} columns"
            if damaged is None:
                cause = "a comma in a cell needs quotes, a decimal sign is a point"
                header = ", ".join(names)[:60]
                raise DataError(
                    f"{path}: row {number + 1} {why}, which line 1 names ({header}); {cause}"
                )
            damaged[number], rows[number] = why, [""] * len(names)
    cells = zip(*rows, strict=True) if rows else [()] * len(names)
    return Columns(zip(names, cells, strict=True))


def _names(path: Path, first: Iterable[str]) -> list[str]:
    names = [name.strip() or f"Unnamed: {place}" for place, name in enumerate(first)]
    if len(names) == 1 and (other := next((each for each in ";\t|" if each in names[0]), None)):
        sign = ", decimal=','" if other == ";" else ""  # where commas are decimal signs
        new = path.with_name(f"{path.stem}_commas.csv")
        raise DataError(
            f"{path}: its columns are separated by {other!r} and not by commas; pip install pandas,"
            f" and in Python: import pandas; pandas.read_csv({str(path)!r}, sep={other!r}{sign})"
            f".to_csv({str(new)!r}, index=False)"
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}: two columns are called {twice[0]!r}; rename one")
    return names


def _npz(path: Path) -> Columns:
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
    return Columns(arrays)


def _parquet(path: Path) -> Columns:
    try:
        from pyarrow import DictionaryType, parquet  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        raise ConfigError(
            f"dataset.path={path}: is read by pyarrow; install it: pip install pyarrow"
        ) from None
    table = parquet.read_table(path)  # type: ignore[no-untyped-call, unused-ignore]
    # decoded: the codes of a dictionary are -1 where there is no value
    plain = (
        each.cast(each.type.value_type) if isinstance(each.type, DictionaryType) else each
        for each in table.columns
    )
    names = _names(path, table.column_names)
    found = Columns(zip(names, (each.to_numpy() for each in plain), strict=True))
    indices = (table.schema.pandas_metadata or {}).get("index_columns", ())
    found.index = frozenset(name for name in indices if isinstance(name, str))
    return found


_READERS: dict[str, Callable[[Path], Columns]] = {
    ".csv": _csv,
    ".npz": _npz,
    ".parquet": _parquet,
}


def base(name: str) -> str:
    """Return the column that a name of numbers_of is of: x[0] and x[1] are of x."""
    return re.sub(r"\[\d+\]$", "", name)


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

    found = collected(
        lambda name: _numbers(path, name, columns[name], fix, damaged), names, most=_SHOWN
    )
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

    values = _read(column)
    wrong = ~(np.abs(values) <= np.finfo(np.float32).max)
    if damaged is not None:
        for place in np.flatnonzero(wrong.any(1)).tolist():
            cell = str(column[place])[:40]
            damaged.setdefault(place, f"column {name} holds {cell!r}, which is not a number")
    elif wrong.any():
        row, part = np.argwhere(wrong)[0]
        cell = column[row] if values.shape[1] == 1 else values[row, part]
        raise _wrong(path, name, int(row), cell, fix, int(wrong.any(1).sum()))
    return values


def _read(column: Column) -> np.ndarray:
    """Return a column as float64 [N, K]: true is 1, false 0, what is not a number nan.

    NumPy is not asked for dates, which it takes for numbers, nor for complex numbers, of which it
    drops a part.
    """
    import numpy as np

    dtype = getattr(column, "dtype", None)
    if dtype is not None and dtype.kind not in "biufUSO":
        return np.full((len(column), 1), np.nan)
    try:
        values = np.asarray(column, dtype=np.float64)
        texts: Iterable[str] = column if isinstance(next(iter(column), None), str) else ()
        if dtype is not None and dtype.kind in "USO":
            texts = map(str, column)
        if not (joined := "".join(texts)).isascii() or "_" in joined:
            raise ValueError("these may be numbers to Python only")
    except (TypeError, ValueError):
        values = np.array([*map(_number, column)])
    return values.reshape(len(values), -1)


def _number(cell: Any) -> float:
    flag = _FLAGS.get(str(cell).strip().lower())
    return (float(cell) if is_number(cell) else math.nan) if flag is None else flag


def is_number(cell: Any) -> bool:
    """Return whether a cell is a number, or a text of one."""
    if isinstance(cell, str):
        return _NUMBER.fullmatch(cell) is not None
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return not hasattr(cell, "dtype") or cell.dtype.kind in "biufUSO"


def is_feature(column: Column) -> bool:
    """Return whether all cells of a column are numbers, true or false, and don't count the rows."""
    import numpy as np

    values = _read(column)
    counts = values.shape[1] == 1 and counts_rows(values[:, 0])
    return bool(np.isfinite(values).all()) and not counts


def counts_rows(values: np.ndarray) -> bool:
    """Return whether integers [N] number the rows, in whichever order these are now."""
    import numpy as np

    number = len(values)
    if number < FEW or np.ptp(values) != number - 1 or (values != np.floor(values)).any():
        return False
    return len(np.unique(values)) == number


def _wrong(path: Path, name: str, row: int, cell: Any, fix: str, number: int = 1) -> DataError:
    text = str(cell).strip() if cell is not None else ""
    what = f"is {text}" if is_number(cell) else f"{text[:40]!r} is not a number"
    if _COMMA.fullmatch(text):
        fix = "write a point as the decimal sign, and no sign between thousands"
    rows = f"row {row + 1}" + (f" and {number - 1} more" if number > 1 else "")
    return DataError(f"{path}: column {name}, {rows}: {what if text else 'is empty'}; {fix}")


def classes_of(path: Path, name: str, column: Column) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the class of each row, int64 [N], and their names.

    These are texts in order of the alphabet, integers, or False and True. Raise DataError for what
    is not a class.
    """
    import numpy as np

    if not hasattr(column, "dtype"):
        return _classes_of_texts(path, name, [composed(cell.strip()) for cell in column])
    cells = np.asarray(column)
    if cells.ndim == 2 and cells.shape[1] == 1:
        cells = cells[:, 0]
    if cells.ndim != 1:
        raise DataError(
            f"{path}: column {name} has {cells.shape[1]} numbers in each row; a class is one"
        )
    if cells.dtype.kind in "OUS":
        return _classes_of_texts(path, name, [_text(path, name, cell) for cell in cells])
    if is_float := cells.dtype.kind not in "biu":  # of which float64 has large ones alike
        cells = _numbers(path, name, column, FIX)[:, 0]
        _refuse_fractions(path, name, cells.tolist())
    found, classes = np.unique(cells, return_inverse=True)
    names = (f"{number:.0f}" for number in found) if is_float else map(str, found)
    return classes.astype(np.int64), tuple(names)


def _classes_of_texts(
    path: Path, name: str, texts: Sequence[str]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return classes that are texts as they are spelled, or integers by their value."""
    import numpy as np

    different = {*texts}
    if different & MISSING:
        row, text = next((row, text) for row, text in enumerate(texts) if text in MISSING)
        what = f"{text!r} stands for no value" if text else "is empty"
        fix = ", or write it otherwise if it is one" if text else ""
        raise DataError(
            f"{path}: column {name}, row {row + 1}: {what}; give it a class, or remove the row{fix}"
        )
    names = {text: text for text in different}
    key: Callable[[str], Any] | None = None
    if all(map(_NUMBER.fullmatch, different)) and not any(map(_PADDED.match, different)):
        _refuse_fractions(path, name, map(float, texts))
        key = _value_and_text
        if all(map(_INTEGER.fullmatch, different)):
            names, key = {text: str(int(text.partition(".")[0])) for text in different}, int
    found = sorted({*names.values()}, key=key)
    places = {each: place for place, each in enumerate(found)}
    return np.array([places[names[text]] for text in texts], np.int64), tuple(found)


def _value_and_text(text: str) -> tuple[float, str]:
    return float(text), text


def _refuse_fractions(path: Path, name: str, numbers: Iterable[float]) -> None:
    for row, number in enumerate(numbers):
        if not number.is_integer():
            raise DataError(
                f"{path}: column {name}, row {row + 1}: {number:g} is not a class, which is an"
                " integer or a text; fix it, or use task=regression"
            )


def _text(path: Path, name: str, cell: Any) -> str:
    try:
        text = cell.decode() if isinstance(cell, bytes) else "" if cell is None else str(cell)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: column {name}: {cell!r} is not UTF-8 ({error})") from error
    return composed(text.strip())


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
            f"{path}: column {names[column]}, row {row + 1}: {values[row, column]:g} is not a"
            " label, which is 0 or 1; fix it, or use task=regression"
        )
