"""The columns of a table as numbers, labels, classes. Free of torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expt.data.plain_text import composed
from expt.data.table_files import MISSING, Column, Texts, texts_of
from expt.errors import DataError, listed

if TYPE_CHECKING:
    import numpy as np

FIX = "give it a number, or remove the row"
_NO_VALUE = "has no value, and had one in each row of training"
_FILLED = {"median", "categories"}
_TEXTS = "give it a number, or empty the cell, or if these are categories use dataset.categories"
_FLAGS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
_NUMBER = re.compile(
    r"\s*[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|inf|infinity)\s*", re.ASCII | re.IGNORECASE
)
"""A text that is a number: float() takes 1_0 for 10, too."""
_INTEGER = re.compile(r"-?\d+(\.0*)?", re.ASCII)
"""A text that is a class by its value, for pandas writes 7 as 7.0 where a cell is empty."""
_PADDED = re.compile(r"[+-]?0\d")
"""A text that is not a number, though it could be read as one: a code such as 007."""
_AMOUNT = re.compile(
    r"[+-]?([$€£]? ?\d[\d.,_' ]*(e[+-]?\d+)?[%$€£]?|inf)|\[[\d.,\se+-]*\]", re.IGNORECASE
)
"""A text that is meant as numbers, such as 1,5 or 1_000 or 12% or 1e39 or [1, 2]."""
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
MOST = float.fromhex("0x1.fffffep127")
"""The largest number of float32."""
FEW = 20
"""Rows of which numbers may follow each other by chance."""
_HEAD = 1000


def base(name: str) -> str:
    """Return the column that a part is of: x[0] and x[1] are of x."""
    return re.sub(r"\[\d+\]$", "", name)


class Cells:
    """What a column holds, batch after batch, as numbers: nan is a gap, and a text has a code.

    Codes are multiples of TEXT in the order of the texts, until all rows are read.
    """

    values: np.ndarray
    """All rows, float64 [N, K]; whoever has them together sets it"""

    def __init__(self, name: str, *, are_texts: bool = False, most: float = math.inf) -> None:
        """Take numbers for texts too if they `are_texts`; `most` different texts have a code."""
        self.name, self.parts, self._are_texts, self._most = name, [name], are_texts, most
        self._codes = dict[str, float]()
        self._has_numbers = self.has_gaps = False

    def read(self, column: Column) -> np.ndarray:
        """Return cells as float64 [N, K]."""
        import numpy as np

        values: np.ndarray
        if isinstance(column, np.ndarray) and column.dtype.kind in "biuf" and not self._are_texts:
            values = column.astype(np.float64).reshape(len(column), -1)
            for place in zip(*np.nonzero(np.abs(values) > MOST), strict=True):
                values[place] = self._code(str(values[place]))
        else:
            texts = as_texts(column)
            codes = np.array([self._code(text) for text in texts.different], float)
            values = codes[texts.rows].reshape(len(column), -1)
        if (width := values.shape[1]) > 1:
            self.parts = [f"{self.name}[{number}]" for number in range(width)]
        if not (are_numbers := values < TEXT).all():
            self.has_gaps = self.has_gaps or bool(np.isnan(values).any())
        self._has_numbers = self._has_numbers or bool(are_numbers.any())
        return values

    def _code(self, text: str) -> float:
        text = composed(text.strip())
        if text in MISSING:
            return math.nan
        if not self._are_texts and _NUMBER.fullmatch(text) and not abs(float(text)) > MOST:
            return float(text)
        if len(self._codes) < self._most:
            self._codes.setdefault(text, TEXT * (1 + len(self._codes)))
        return self._codes.get(text, TEXT * len(self._codes))

    @property
    def is_empty(self) -> bool:
        """Whether no row has a value."""
        return not (self._has_numbers or self._codes)

    @property
    def texts(self) -> list[str]:
        """Those that there are, by their codes."""
        return [*self._codes]

    @property
    def flags(self) -> list[str]:
        """Yes and no, or true and false, that of 0 first; none where there are other texts."""
        texts = {text.casefold() for text in self._codes}
        return [] if self._are_texts or not texts <= _FLAGS.keys() else sorted(texts)

    @property
    def categories(self) -> list[str]:
        """The texts in order of the alphabet, unless they are flags."""
        return [] if self.flags else sorted(self._codes)

    def number(self) -> None:
        """Write 1 and 0 in place of flags, and of other texts their places among `categories`."""
        places = {text: float(place) for place, text in enumerate(self.categories)} or _FLAGS
        if self._codes:
            numbers = [places.get(x, places.get(x.casefold(), 0.0)) for x in self._codes]
            self.values[:] = replaced(self.values, numbers)

    def odd_rows(self, fix: str, *, may_have_gaps: bool = False) -> str:
        """Return which rows hold texts that are no flags, or gaps, if any do."""
        import numpy as np

        odd = [code for text, code in self._codes.items() if text.casefold() not in _FLAGS]
        if not odd and (may_have_gaps or not self.has_gaps):
            return ""
        wrong = np.isin(self.values, odd) | (np.isnan(self.values) & (not may_have_gaps))
        (row, place), number = np.argwhere(wrong)[0], int(wrong.any(1).sum())
        text = self.text_at(self.values[row, place])
        if _COMMA.fullmatch(text):
            fix = "write a point as the decimal sign, and no sign between thousands"
        what = f"{text[:40]!r} is not a number" if text else "has no value"
        return f", row {row + 1}{f' and {number - 1} more' * (number > 1)}: {what}; {fix}"

    def text_at(self, code: float) -> str:
        """Return the text that a code stands for, none for a gap."""
        return "" if math.isnan(code) else self.texts[int(code / TEXT) - 1]

    def problem(self, most: int | None) -> str:
        """Return why the rows can't be features, of at `most` so many categories, if so."""
        if len(self.parts) > 1:
            return self.odd_rows(FIX)
        some = self.categories[:_HEAD]
        if some and not self._are_texts:
            if all(map(_DATE.fullmatch, some)):
                fix = "give numbers of them, such as the year, the month or the days since one"
                return f" holds dates ({some[0]}); {fix}"
            if self._has_numbers or any(map(_AMOUNT.fullmatch, some)):
                return self.odd_rows(_TEXTS, may_have_gaps=True)
        if most is not None and len(self.categories) > most:
            number, is_all = len(self._codes), len(self._codes) < self._most
            there = f"{number}{' or more' * (not is_all)} different texts"
            fix = f"set dataset.max_categories={number}" if is_all else "give it fewer"
            return f" holds {there} ({', '.join(some[:3])}, ...), more than {most}; {fix}"
        return ""


def replaced(codes: np.ndarray, numbers: Sequence[float]) -> np.ndarray:
    """Return numbers in place of the codes of texts."""
    import numpy as np

    values: np.ndarray = codes.copy()
    are_texts = codes >= TEXT
    values[are_texts] = np.array(numbers)[(codes[are_texts] / TEXT).astype(int) - 1]
    return values


def as_texts(column: Column) -> Texts:
    """Return cells as texts, of an array one after the other."""
    import numpy as np

    if isinstance(column, Texts):
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


def read_as_known(
    columns: Mapping[str, Column], encoded: Mapping[str, Mapping[str, Any]]
) -> tuple[np.ndarray, dict[int, str], dict[str, Counter[str]]]:
    """Return new rows as a run has them, float64 [N, K], see `memory.Encoder`.

    Also why rows can't be used, by their place, and how often texts occur in a column that the run
    does not know: they are -1.
    """
    import numpy as np

    found, wrong, unknown = list[np.ndarray](), dict[int, str](), dict[str, Counter[str]]()
    for name, column in columns.items():
        how = encoded.get(name, {})
        cells = Cells(name, are_texts="categories" in how)
        codes = cells.read(column)
        if "categories" in how:
            known = {text: float(place) for place, text in enumerate(how["categories"])}
            numbers = [known.get(text, -1.0) for text in cells.texts]
        else:
            numbers = [_FLAGS.get(text.casefold(), math.inf) for text in cells.texts]
        found.append(replaced(codes, numbers))
        if (new := codes[found[-1] == -1]).size and "categories" in how:
            unknown[name] = Counter(map(cells.text_at, new.tolist()))
        if "categories" in how and None not in how["categories"] and cells.has_gaps:
            unknown.setdefault(name, Counter())[""] = int(np.isnan(codes).sum())
        odd = np.isinf(found[-1]) | (np.isnan(found[-1]) & how.keys().isdisjoint(_FILLED))
        for row, place in np.argwhere(odd).tolist():
            text = cells.text_at(codes[row, place])[:40]
            what = f"holds {text!r}, which is not a number" if text else _NO_VALUE
            wrong.setdefault(row, f"column {name} {what}")
    return np.concatenate(found, axis=1), wrong, unknown


def unknown_texts(name: str, unknown: Iterable[str | None], rows: int = 0) -> str:
    """Return what to say of texts of a column, in so many rows, that no training row has."""
    texts = listed([repr(text) if text else "a gap" for text in unknown], 5)
    where = f" ({rows} rows)" * bool(rows)
    return f"column {name}: no training row has {texts}{where}: they are 0 in all its categories"


def numbers_of(path: Path, columns: Mapping[str, Column]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return columns as float64 [N, K], and the names of these. Raise DataError for others."""
    import numpy as np

    every = [Cells(name) for name in columns]
    for each in every:
        each.values = each.read(columns[each.name])
    refuse(path, {each.name: each.odd_rows(FIX) for each in every})
    for each in every:
        each.number()
    numbers = np.concatenate([each.values for each in every], axis=1)
    return np.ascontiguousarray(numbers), tuple(part for each in every for part in each.parts)


def refuse(path: Path, wrong: Mapping[str, str], more: str = "") -> None:
    """Raise DataError where columns have something wrong."""
    first, *others = [f"{path}: column {name}{why}" for name, why in wrong.items() if why] or [""]
    if first:
        raise DataError([f"{first}{more}", *others])


def are_numbers(names: Iterable[str]) -> bool:
    """Return whether all texts are numbers."""
    return all(map(_NUMBER.fullmatch, names))


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


def classes_of(path: Path, cells: Cells) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the class of each row, int64 [N], and the classes' names.

    These are texts in order of the alphabet, or integers by their value. Raise DataError for what
    is not a class.
    """
    import numpy as np

    if (number := len(cells.parts)) > 1:
        what = f"has {number} numbers in each row; a class is one"
        raise DataError(f"{path}: column {cells.name} {what}")
    values, texts, at = cells.values[:, 0], cells.texts, f"{path}: column {cells.name}, row"
    names = dict(zip(texts, texts, strict=True))
    if cells.has_gaps:
        row = int(np.isnan(values).argmax())
        fix = "give it a class, remove the row, or write another word if it is one"
        raise DataError(f"{at} {row + 1}: is empty, or NA or such; {fix}")
    key: Callable[[str], Any] | None = None
    if are_numbers(texts) and not any(map(_PADDED.match, texts)):
        if fraction := next((text for text in texts if not float(text).is_integer()), None):
            row = int((values == TEXT * (1 + texts.index(fraction))).argmax())
            what = f"{fraction} is not a class, which is an integer or a text"
            fix = "fix it, or use task=regression"
            raise DataError(f"{at} {row + 1}: {what}; {fix}")
        key = lambda text: (float(text), text)  # noqa: E731
        if all(map(_INTEGER.fullmatch, texts)):
            names, key = {text: str(int(text.partition(".")[0])) for text in texts}, int
    found = sorted({*names.values()}, key=key)
    places = {each: float(place) for place, each in enumerate(found)}
    classes = replaced(values, [places[names[text]] for text in texts])
    return classes.astype(np.int64), tuple(found)


def check_learnable(path: Path, name: str, classes: np.ndarray, names: Sequence[str]) -> None:
    """Raise DataError where nothing can be learned of classes: only one, or few rows of each."""
    what = f"all rows are of one class, {names[0]}"
    if len(names) > 1:
        what = f"has {len(names):,} classes in {len(classes):,} rows, too few of each to learn one"
        what += " (of numbers: task=regression)"
    if not 1 < len(names) <= max(20, len(classes) / 2):
        raise DataError(f"{path}: column {name}: {what}; name another by dataset.targets")


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
