"""Lines of a text that are no rows of its table: titles, comments, totals, a header again."""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import math
import mmap
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from expt.late import compute, np, pa

_COMMENT = r"^\s*(#+|//+|;|%+|!|--+|\*+)\s+\S"
"""The beginning of a comment; a name such as #1 or #id is none."""
_RULE = re.compile(r" *([-=_*])\1{2,}[-=_*+: ]*")
_TOTAL = re.compile(
    r"(grand |sub-?)?(totals?|sums?|means?|averages?|avg|counts?|summe|gesamt|mittelwert|somme|"
    r"moyenne|suma|media|totale|std|end|eof|end of (file|data|report))(\s*[:=.].*)?",
    re.IGNORECASE,
)
"""A text in the last row that names a sum, or the end."""
_MARK = re.compile(
    r"(?P<median>median|50 ?%)|(?P<low>25 ?%)|(?P<high>75 ?%)|"
    r"(?P<min>min(imum)?)|(?P<max>max(imum)?)|(over)?all",
    re.IGNORECASE,
)
"""A text that names a statistic, or is a value: only the numbers in its row tell."""
_QUANTILES = {"min": 0.0, "low": 0.25, "median": 0.5, "high": 0.75, "max": 1.0}
_SURE = re.compile(r"(grand |sub-?)?(totals?|sums?)\b|eof|end of", re.IGNORECASE)
"""One of those that is hardly a value; media and end may be."""
_HEAD = 200
"""The lines in which a header is looked for."""
_LONG = 1 << 16
"""The most bytes of a last line that are looked at."""
_MANY = 10
"""The least number of different cells whose sum is not equal to the last cell by chance."""
_FEW = 5
"""The most lines that may be named, and the most comments; more are data."""


def rows_of(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each row and the line where it ends, the header's first."""
    wrong = csv.Error, UnicodeDecodeError  # the rest is not read
    with path.open(encoding="utf-8-sig", newline="") as text, contextlib.suppress(*wrong):
        reader = csv.reader(text, delimiter=separator)
        for cells in reader:
            if len(cells) > 1 or "".join(cells).strip():
                yield reader.line_num, cells


def lines_of(path: Path, separator: str, rows: Sequence[int]) -> str:
    """Return which lines some rows are, if they are few, as the beginning of advice."""
    if not 0 < len(rows) <= _FEW:
        return ""
    wanted, last = {*rows}, max(rows) + 2
    found = itertools.islice(enumerate(rows_of(path, separator), -1), last)
    lines = [str(line) for row, (line, _) in found if row in wanted]
    if not lines:
        return ""
    which, are = ("lines", "these are") if len(lines) > 1 else ("line", "it is")
    return f"remove {which} {', '.join(lines)} if {are} no data, or "


def line_and_fix(path: Path, separator: str, row: int, names: Sequence[str]) -> tuple[str, str]:
    """Return the line of a row with its text, and advice if it has other cells than `names`."""
    line, cells = next(itertools.islice(rows_of(path, separator), row + 1, None), (0, [""]))
    sign, more = repr(separator), len(cells) - len(names)
    if more == 1 and not cells[-1]:
        fix = f"it ends with a {sign}, and line 1 does not; let both do it, or none"
    elif more == -1 and names[-1].startswith("Unnamed: "):
        fix = f"line 1 ends with a {sign}, and it does not; let both do it, or none"
    else:
        fix = f"a {sign} in a cell needs quotes"
        fix += ", a decimal sign is a point" if separator == "," else ""
    return f"line {line} ({separator.join(cells)[:40]!r})", fix


def header_below(path: Path, name: str, separators: str) -> str:
    """Return advice where the header, with the column `name`, is a later line than the first."""
    for separator in separators:
        for line, cells in itertools.islice(rows_of(path, separator), _HEAD):
            if name in map(str.strip, cells) and line > 1:
                above = f"lines 1 to {line - 1}, which are" if line > 2 else "line 1, which is"
                return f" Line {line} has it: remove {above} no header"
    return ""


def tail(path: Path, separator: str) -> tuple[int, list[str]]:
    """Return the number of rows without a text at the end, and the cells of the line above them."""
    blank = 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = len(content)
        while end > 0:
            start = content.rfind(b"\n", 0, end) + 1
            line = content[start:end]
            if line.strip(b" \t\r" + separator.encode()):
                text = line[:_LONG].decode(errors="replace")
                with contextlib.suppress(csv.Error):
                    return blank, next(csv.reader([text], delimiter=separator))
                break
            blank, end = blank + (separator.encode() in line), start - 1
    return blank, []


def is_word(cell: str) -> bool:
    """Return whether a cell may name a total or a statistic."""
    return bool(_TOTAL.fullmatch(cell.strip()) or _MARK.fullmatch(cell.strip()))


def among(
    batch: Any, first: str | None, read: Sequence[str], targets: Sequence[str], *, is_last: bool
) -> dict[int, str]:
    """Return why rows of texts are no data, by their place in the batch.

    The table's `first` column may have comments, the last row of all may be a total: of the columns
    that are `read`, or of another, which names it.
    """
    names = batch.schema.names
    found = dict[int, str]()
    if len(names) > 1:
        lower = [name.lower() for name in names]
        cells = compute.utf8_lower(compute.utf8_trim_whitespace(batch.column(0)))
        is_name = compute.equal(cells, lower[0]).fill_null(False)
        for row in np.flatnonzero(is_name)[:_FEW].tolist():
            if [_text(column, row).lower() for column in batch.columns] == lower:
                found[row] = "repeats the header"
    if first in names:
        is_comment = compute.match_substring_regex(batch.column(first), _COMMENT)
        rows = list[int]()
        for row in np.flatnonzero(is_comment.fill_null(False)).tolist():
            cells = [_text(column, row) for column in batch.columns]  # -- none -- may be a value
            if not all(cells) or any(cell.startswith(("#", "//")) for cell in cells):
                rows.append(row)
        if len(rows) <= _FEW:
            found |= dict.fromkeys(rows, "is a comment")
    if batch.num_rows and all(_RULE.fullmatch(_text(column, 0)) for column in batch.columns):
        found[0] = "is a rule"
    if is_last and batch.num_rows > 1:
        with np.errstate(all="ignore"):
            found |= _LastRows(batch, read, targets).others()
    return found


class _LastRows:
    """The last row of a table of texts, which may be no data, and the rows above it."""

    def __init__(self, batch: Any, read: Sequence[str], targets: Sequence[str]) -> None:
        self._batch, self._read, self._targets = batch, read, targets
        self._last = batch.num_rows - 1
        self._above = batch.slice(0, self._last)
        self._texts = {name: _text(batch[name], self._last) for name in batch.schema.names}

    def others(self) -> dict[int, str]:
        """Return why the last rows are none of data, by their places: totals, statistics, notes."""
        filled = [name for name, text in self._texts.items() if text]
        for name in filter(lambda name: is_word(self._texts[name]), filled):
            if (size := _named(self._batch[name])) and self._ends(name, size):
                why = "is a total, or an end"
                if size > 1:
                    why += f", and so {'is' if size == 2 else 'are'} the {size - 1} below it"
                return dict.fromkeys(range(self._last + 1 - size, self._last + 1), why)
        if len(filled) == 1 < self._batch.num_columns - 1 and self._is_note(filled[0]):
            why = "has a single cell that is not empty, and no other row has an empty one"
            return {self._last: why}
        return {self._last: "is the sum of the rows above it"} if self._is_sum() else {}

    def _ends(self, name: str, size: int) -> bool:
        """Return whether the words in the last rows of a column say that these are no data."""
        above = self._batch.slice(0, self._last + 1 - size)
        counts = _counts(_numbers(above[name]))
        return counts or self._is_statistic(above, self._texts[name]) or self._is_total(name)

    def _is_total(self, name: str) -> bool:
        """Return whether a word is no value: of a class, or next to the only gaps.

        A total may be a value, too, and its numbers the largest: only its sum or a gap tells.
        """
        text = self._texts[name]
        if not _SURE.match(text) and not (name in self._read and _TOTAL.fullmatch(text)):
            return False
        lacks = (not self._texts[x] and not self._above[x].null_count for x in self._read)
        return any(lacks) or (name in self._targets and bool(_SURE.match(text)))

    def _is_note(self, name: str) -> bool:
        """Return whether the only cell is no number like those above, and none there has gaps."""
        own, others = self._numbers(name), _numbers(self._above[name])
        is_like = len(own) and len(others) and others.min() <= own[0] <= others.max()
        return not is_like and not any(column.null_count for column in self._above.columns)

    def _numbers(self, name: str) -> np.ndarray:
        """Return the number in the last row of a column; none where that is a text or empty."""
        return _numbers(self._batch[name][self._last :])

    def _is_statistic(self, above: Any, text: str) -> bool:
        """Return whether the last row has the statistic that a word names, of all numbers.

        If the word may be a value, two columns have it to their digits, and no row `above` is like
        it.
        """
        mark = _MARK.fullmatch(text)
        pairs = [
            (numbers, cell)
            for name, cell in self._texts.items()
            if len(numbers := _numbers(above[name])) > 2 and len(self._numbers(name))
        ]
        if not pairs or (mark and (len(pairs) < 2 or len({len(x) for x, _ in pairs}) > 1)):
            return False
        if mark and np.all([x == float(cell) for x, cell in pairs], axis=0).any():
            return False
        ways: list[Any] = [np.sum, np.mean]
        if mark and mark.lastgroup:
            ways = [functools.partial(np.quantile, q=_QUANTILES[mark.lastgroup])]
        elif text.lower().startswith(("count", "std")):
            ways = [len, functools.partial(np.std, ddof=1)]
        near = (1e-6, 1.001) if mark else (1e-3, 0.0)
        return any(all(_is_near(way(x), cell, *near) for x, cell in pairs) for way in ways)

    def _is_sum(self) -> bool:
        """Return whether the last row, unlike the one above it, is the sum of those above it.

        It is so in all columns of numbers, and in two of them, of many values, it is out of range.
        """
        pairs = [(_numbers(self._above[name]), self._numbers(name)) for name in self._texts]
        sums = [(above, float(own[0])) for above, own in pairs if len(above) > 1 and len(own)]
        out = [
            not above.min() <= own <= above.max() and len(np.unique(above)) >= _MANY
            for above, own in sums
        ]
        if sum(out) < 2 or not all(_adds_up(*pair) for pair in sums):
            return False
        return not all(_adds_up(above[:-1], float(above[-1])) for above, _ in sums)


def _named(column: Any) -> int:
    """Return how many last rows name totals or statistics, each in a word of its own."""
    cells = [(text or "").strip() for text in column.to_pylist()]
    for size, text in enumerate(reversed(cells)):
        if not is_word(text) or cells.count(text) > 1:
            return size
    return 0


def _counts(numbers: np.ndarray) -> bool:
    """Return whether numbers count the rows, as an index does."""
    return len(numbers) > 1 and bool((numbers[1:] == numbers[:-1] + 1).all())


def _numbers(cells: Any) -> np.ndarray:
    """Return the numbers of a column's cells; none where one is a text."""
    texts = compute.utf8_trim_whitespace(cells).drop_null()
    with contextlib.suppress(pa.ArrowInvalid):
        found: np.ndarray = texts.filter(compute.not_equal(texts, "")).cast(pa.float64()).to_numpy()
        return found
    return np.empty(0)


def _is_near(number: float, text: str, share: float, halves: float) -> bool:
    """Return whether a text is a number but for a share of it, or for halves of its last digit."""
    digits = len(text.partition(".")[2])
    half = 0.0 if "e" in text.lower() else 0.5 * 10.0**-digits
    return math.isclose(number, float(text), rel_tol=share, abs_tol=halves * half)


def _adds_up(above: np.ndarray, number: float) -> bool:
    are_whole = bool((above == above.round()).all())
    relative, absolute = (0.0, 0.5) if are_whole else (1e-6, 1e-9)  # 1, 2, 4, 8 is no sum
    return math.isclose(above.sum(), number, rel_tol=relative, abs_tol=absolute)


def _text(column: Any, row: int) -> str:
    return (column[row].as_py() or "").strip()
