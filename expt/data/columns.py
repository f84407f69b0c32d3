"""The columns of a table as numbers, labels, classes. Free of torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expt.data.plain_text import composed
from expt.data.table_files import MISSING, Column, Texts, are_numbers, texts_of
from expt.errors import DataError, listed

if TYPE_CHECKING:
    import numpy as np

FIX = "give it a number, or remove the row"
_FLAGS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
_NUMBER = re.compile(
    r"\s*[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|inf|infinity)\s*", re.ASCII | re.IGNORECASE
)
"""A text that is a number: float() takes 1_0 for 10, too."""
_INTEGER = re.compile(r"-?\d+(\.0*)?", re.ASCII)
"""A text that is a class by its value, for pandas writes 7 as 7.0 where a cell is empty."""
_PADDED = re.compile(r"[+-]?0\d")
"""A text that is not a number, though it could be read as one: a code such as 007."""
_AMOUNT = re.compile(r"[+-]?[$€£]? ?\d[\d.,_' ]*[%$€£]?")
"""A text that is meant as a number, such as 1,5 or 1_000 or 12%."""
_COMMA = re.compile(r"[+-]?[\d.]*\d,\d[\d,]*")
_DATE = re.compile(
    r"(\d{4}([-/.])\d\d?\2\d\d?|\d\d?([-/.])\d\d?\3\d{2,4}|\d{1,2}[ -][a-z]{3,9}[ -]\d{2,4}|"
    r"[a-z]{3,9} \d{1,2}, ?\d{4})([ t]\d\d?:\d\d.*)?",
    re.ASCII | re.IGNORECASE,
)
TEXT = 2.0**200
"""The first text of a column is this number, the second twice as much, ... until all rows are
read: a number of float32 is never as large.
"""
FEW = 20
"""Rows of which numbers may follow each other by chance."""
_HEAD = 1000


def base(name: str) -> str:
    """Return the column that a name of numbers_of is of: x[0] and x[1] are of x."""
    return re.sub(r"\[\d+\]$", "", name)


def parts_of(columns: Mapping[str, Column], names: Iterable[str]) -> list[str]:
    """Return the names of the numbers in each row: an array of an .npz may hold several."""
    found = list[str]()
    for name in names:
        width = [*getattr(columns[name], "shape", (0,)), 1][1]
        found += [name] if width == 1 else [f"{name}[{number}]" for number in range(width)]
    return found


class Wrong:
    """What is not a finite number of float32 in a column: the first of it, and in how many rows."""

    def __init__(self, row: int, cell: Any) -> None:
        self.row, self.cell, self.number = row, cell, 0

    def problem(self, fix: str) -> str:
        """Return what is wrong, and a fix."""
        text = str(self.cell).strip() if self.cell is not None else ""
        what = f"is {text}" if is_number(self.cell) else f"{text[:40]!r} is not a number"
        what = "has no value" if text in MISSING else what
        if _COMMA.fullmatch(text):
            fix = "write a point as the decimal sign, and no sign between thousands"
        rows = f"row {self.row + 1}" + (f" and {self.number - 1} more" if self.number > 1 else "")
        return f"{rows}: {what}; {fix}"


class Cells:
    """What a column of features holds, batch after batch: numbers, texts, and gaps."""

    def __init__(self, limit: int | None, *, are_texts: bool) -> None:
        """Take numbers for texts too if they `are_texts`, and at most `limit` different ones."""
        self._limit, self._are_texts = limit, are_texts
        self._places = dict[str, int]()
        self._has_numbers = self._are_many = self.has_gaps = False
        self._wrong: Wrong | None = None
        self._odd: Wrong | None = None
        """The first text that is neither true nor false, yes nor no."""

    def read(self, column: Column, before: int) -> np.ndarray:
        """Return cells as float64 [N, K]: nan is a gap, and a text its multiple of TEXT.

        `before` rows came before these.
        """
        import numpy as np

        if self._are_texts or getattr(column, "dtype", np.dtype(float)).kind not in "biuf":
            column = _as_texts(column)
        if not isinstance(column, Texts):
            values = read_numbers(column)
            may_have = column.dtype.kind == "f" and column[:1].size == 1
            gaps, texts = np.isnan(values) & may_have, np.zeros(values.shape, bool)
        else:
            values = np.array([*map(self._value, column.different)])[column.rows].reshape(-1, 1)
            gaps, texts = np.isnan(values), values >= TEXT
        good = are_numbers(values)
        self._has_numbers = self._has_numbers or bool(good.any())
        if good.all():
            return values
        self.has_gaps = self.has_gaps or bool(gaps.any())
        self._wrong = _counted(self._wrong, ~(good | gaps | texts).all(1), column, before)
        if isinstance(column, Texts) and texts.any():
            is_odd = [_plain(text).casefold() not in _FLAGS for text in column.different]
            odd = np.array(is_odd)[column.rows] & texts[:, 0]
            self._odd = _counted(self._odd, odd, column, before)
        return values

    def _value(self, text: str) -> float:
        text = _plain(text)
        if text in MISSING:
            return math.nan
        if not self._are_texts and _NUMBER.fullmatch(text):
            number = float(text)
            return math.inf if abs(number) >= TEXT else number
        if self._limit is not None and len(self._places) == self._limit:
            self._are_many = self._are_many or text not in self._places
        if not self._are_many:
            self._places.setdefault(text, len(self._places))
        return TEXT * (1 + self._places.get(text, 0))

    @property
    def is_empty(self) -> bool:
        """Whether no row has a value."""
        return not (self._has_numbers or self._places or self._wrong)

    @property
    def texts(self) -> list[str]:
        """The categories in order of the alphabet; none of numbers, yes and no, true and false."""
        return sorted(self._places) if self._odd or self._are_texts else []

    @property
    def numbers(self) -> list[float]:
        """What each text becomes, in the order of their first rows."""
        places = {text: float(place) for place, text in enumerate(self.texts)}
        return [places.get(text, _FLAGS.get(text.casefold(), 0.0)) for text in self._places]

    def problem(self) -> Wrong | str | None:
        """Return why the column can't be used, if so."""
        some = [*self._places][:_HEAD]
        if self._wrong or not self.texts:
            return self._wrong
        if not self._are_texts and all(map(_DATE.fullmatch, some)):
            fix = "give numbers of them, such as the year, the month or the days since one"
            return f"holds dates ({some[0]}); {fix}"
        if not self._are_texts and (self._has_numbers or any(map(_AMOUNT.fullmatch, some))):
            return self._odd
        if self._are_many:
            what = f"{self._limit} different texts ({listed(some, 3)}), and each is a column"
            return f"holds more than {what}; raise dataset.max_categories={self._limit}"
        return None


def _counted(known: Wrong | None, rows: np.ndarray, column: Column, before: int) -> Wrong | None:
    """Return the first of what is wrong, with the number of such rows, these among them."""
    if rows.any():
        row = int(rows.argmax())
        known = known or Wrong(before + row, column[row])
        known.number += int(rows.sum())
    return known


def _plain(text: str) -> str:
    """Return a text by which categories are compared."""
    return composed(text.strip())


def _as_texts(column: Column) -> Column:
    """Return the cells of an array as texts, unless they hold several each."""
    import numpy as np

    if isinstance(column, Texts) or column[:1].size != 1 or np.ndim(column.flat[0]):
        return column
    if column.dtype.kind == "O":
        return texts_of([*map(text_of, column.flat)])
    different, rows = np.unique(column.reshape(-1), return_inverse=True)
    is_date = different.dtype.kind in "mM"  # of which a list has integers
    return Texts([*map(text_of, different if is_date else different.tolist())], rows)


def text_of(cell: Any) -> str:
    """Return a cell as a .csv has it, an integer without a point."""
    if isinstance(cell, float) and cell.is_integer():
        return f"{cell:.0f}"
    return cell.decode(errors="replace") if isinstance(cell, bytes) else str(cell)


def read_as(column: Column, how: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, Counter[str]]:
    """Return a column of new rows as a run has it, float64 [N, K], see `memory.Encoder`.

    Also which rows can't be used, and how often texts occur that the run does not know: they are
    -1.
    """
    import numpy as np

    unknown = Counter[str]()
    if "categories" not in how:
        values = read_numbers(column)
        wrong = np.asarray(~are_numbers(values).all(1))
        for row in np.flatnonzero(wrong).tolist() if how else ():
            wrong[row] = text_of(column[row]).strip() not in MISSING
        return values, wrong, unknown
    cells = _as_texts(column)
    assert isinstance(cells, Texts)
    known = {text: float(place) for place, text in enumerate(how["categories"])}
    texts = [*map(_plain, cells.different)]
    codes = np.array([math.nan if text in MISSING else known.get(text, -1.0) for text in texts])
    number = np.bincount(cells.rows, minlength=len(texts))
    for place in np.flatnonzero(codes == -1).tolist():
        unknown[texts[place]] += int(number[place])
    values = codes[cells.rows].reshape(-1, 1)
    return values, np.zeros(len(values), bool), unknown


def unknown_texts(name: str, unknown: Iterable[str], rows: int = 0) -> str:
    """Return what to say of texts of a column, in so many rows, that no training row has."""
    texts, where = listed([*map(repr, unknown)], 5), f" ({rows} rows)" * bool(rows)
    return f"column {name}: no training row has {texts}{where}: they are 0 in all its categories"


def numbers_of(
    columns: Mapping[str, Column], names: Sequence[str], wrong: dict[str, Wrong], before: int = 0
) -> np.ndarray:
    """Return the columns `names` as float64 [N, K], see parts_of.

    What is wrong in them is added to `wrong`; `before` rows came before these.
    """
    import numpy as np

    found = list[Any]()
    for name in names:
        column = columns[name]
        values = read_numbers(column)
        good = are_numbers(values)
        if not good.all():
            row, part = np.argwhere(~good)[0].tolist()
            cell = column[row] if values.shape[1] == 1 else column[row, part]
            here = wrong.setdefault(name, Wrong(before + row, cell))
            here.number += len(values) - int(good.all(1).sum())
        found.append(values)
    numbers: np.ndarray = np.concatenate(found, axis=1)
    return np.ascontiguousarray(numbers)


def refuse(path: Path, wrong: Mapping[str, Wrong | str], more: str = "", fix: str = FIX) -> None:
    """Raise DataError where columns have something wrong."""
    if wrong:
        said = {
            x: each if isinstance(each, str) else each.problem(fix) for x, each in wrong.items()
        }
        problems = (f"{path}: column {name}, {each}" for name, each in said.items())
        first, *others = problems
        raise DataError([f"{first}{more}", *others])


def read_numbers(column: Column) -> np.ndarray:
    """Return a column as float64 [N, K]: true is 1, false 0, what is not a number nan.

    NumPy is not asked for dates, which it takes for numbers, nor for complex numbers, of which it
    drops a part.
    """
    import numpy as np

    if isinstance(column, Texts):
        values: np.ndarray = np.array([*map(_number, column.different)])[column.rows]
    elif column.dtype.kind in "biuf":
        values = column.astype(np.float64)
    elif column.dtype.kind in "USO":
        values = np.array([*map(_number, column.flat)]).reshape(column.shape)
    else:
        values = np.full(column.shape, np.nan)
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


def counts_rows(values: np.ndarray) -> bool:
    """Return whether integers [N] number the rows, in whichever order these are now."""
    import numpy as np

    return len(values) >= FEW and _are_ids(values) and bool(np.ptp(values) == len(values) - 1)


def may_be_ids(values: np.ndarray) -> bool:
    """Return whether integers [N] rise or fall with each row, or all differ, and not by chance."""
    import numpy as np

    if len(values) < FEW or not _are_ids(values):
        return False
    alike = len(values) ** 2 / (2 * np.ptp(values) + 2)  # pairs of random numbers
    steps = np.diff(values)
    return alike > FEW or bool((steps > 0).all() or (steps < 0).all())


def _are_ids(values: np.ndarray) -> bool:
    """Return whether values [N] are integers of which no two are alike: the first mostly show."""
    import numpy as np

    return all(
        bool((some == np.floor(some)).all() and np.diff(np.sort(some)).all())
        for some in (values[:_HEAD], values)
    )


def joined(cells: Sequence[Column]) -> Column:
    """Return the rows of a column one after the other."""
    import numpy as np

    texts = [each for each in cells if isinstance(each, Texts)]
    if not texts:
        return np.concatenate([each for each in cells if isinstance(each, np.ndarray)])
    known, rows = dict[str, int](), list[np.ndarray]()
    for each in texts:
        numbers = [known.setdefault(text, len(known)) for text in each.different]
        rows.append(np.array(numbers)[each.rows])
    return Texts([*known], np.concatenate(rows))


def classes_of(path: Path, name: str, column: Column) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the class of each row, int64 [N], and their names.

    These are texts in order of the alphabet, integers, or False and True. Raise DataError for what
    is not a class.
    """
    import numpy as np

    if isinstance(column, Texts):
        return _classes_of_texts(path, name, column)
    cells = column[:, 0] if column.ndim == 2 and column.shape[1] == 1 else column
    if cells.ndim != 1:
        raise DataError(
            f"{path}: column {name} has {cells.shape[1]} numbers in each row; a class is one"
        )
    if cells.dtype.kind in "OUS":
        return _classes_of_texts(path, name, texts_of([_text(path, name, each) for each in cells]))
    if is_float := cells.dtype.kind not in "biu":  # of which float64 has large ones alike
        wrong = dict[str, Wrong]()
        cells = numbers_of({name: cells}, [name], wrong)[:, 0]
        refuse(path, wrong)
        if (fractions := np.flatnonzero(cells % 1)).size:
            raise _fraction(path, name, int(fractions[0]), cells[fractions[0]])
    found, classes = np.unique(cells, return_inverse=True)
    names = (f"{number:.0f}" for number in found) if is_float else map(str, found)
    return classes.astype(np.int64), tuple(names)


def _classes_of_texts(path: Path, name: str, cells: Texts) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return classes that are texts as they are spelled, or integers by their value."""
    import numpy as np

    texts = [composed(text.strip()) for text in cells.different]
    names = dict(zip(texts, texts, strict=True))  # in the order in which the rows have them
    if missing := [place for place, text in enumerate(texts) if text in MISSING]:
        text, row = texts[missing[0]], int((cells.rows == missing[0]).argmax())
        what = f"{text!r} stands for no value" if text else "is empty"
        fix = ", or write it otherwise if it is one" if text else ""
        raise DataError(
            f"{path}: column {name}, row {row + 1}: {what}; give it a class, or remove the row{fix}"
        )
    key: Callable[[str], Any] | None = None
    if all(map(_NUMBER.fullmatch, names)) and not any(map(_PADDED.match, names)):
        for place, text in enumerate(texts):
            if not float(text).is_integer():
                row = int((cells.rows == place).argmax())
                raise _fraction(path, name, row, float(text))
        key = _value_and_text
        if all(map(_INTEGER.fullmatch, names)):
            names, key = {text: str(int(text.partition(".")[0])) for text in names}, int
    found = sorted({*names.values()}, key=key)
    places = {each: place for place, each in enumerate(found)}
    return np.array([places[names[text]] for text in texts])[cells.rows], tuple(found)


def _fraction(path: Path, name: str, row: int, number: float) -> DataError:
    return DataError(
        f"{path}: column {name}, row {row + 1}: {number:g} is not a class, which is an integer or a"
        " text; fix it, or use task=regression"
    )


def _value_and_text(text: str) -> tuple[float, str]:
    return float(text), text


def _text(path: Path, name: str, cell: Any) -> str:
    try:
        return cell.decode() if isinstance(cell, bytes) else "" if cell is None else str(cell)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: column {name}: {cell!r} is not UTF-8 ({error})") from error


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
