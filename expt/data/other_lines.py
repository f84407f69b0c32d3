"""Lines of a text that are no rows of its table: titles, comments, totals, a header again."""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_COMMENT = r"^\s*(#+|//+|;|%+|!|--+|\*+)\s+\S"
"""The beginning of a comment; a name such as #1 or #id is none."""
_RULE = re.compile(r" *([-=_*])\1{2,}[-=_*+: ]*")
_TOTAL = re.compile(
    r"(grand |sub-?)?(totals?|sums?|means?|averages?|avg|counts?|summe|gesamt|mittelwert|somme|"
    r"moyenne|suma|media|totale|std|end|eof|end of (file|data|report))(\s*[:=.].*)?",
    re.IGNORECASE,
)
"""A text in the last row that names a sum, or the end."""
_SURE = re.compile(r"(grand |sub-?)?(totals?|sums?)\b|eof|end of", re.IGNORECASE)
"""One of those that is hardly a value; media and end may be."""
_HEAD = 200
"""The lines in which a header is looked for."""
_FEW = 5
"""The most lines that may be named, and the most comments; more are data."""


def rows_of(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each row and the line where it ends, the header's first."""
    with path.open(encoding="utf-8-sig", newline="") as text, contextlib.suppress(csv.Error):
        reader = csv.reader(text, delimiter=separator)
        for cells in reader:
            if len(cells) > 1 or "".join(cells).strip():
                yield reader.line_num, cells


def named(path: Path, separator: str, rows: Sequence[int]) -> str:
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


def shown(path: Path, separator: str, row: int, names: Sequence[str]) -> tuple[str, str]:
    """Return the line of a row with its text, and advice if it has other cells than `names`."""
    line, cells = next(itertools.islice(rows_of(path, separator), row + 1, None), (0, [""]))
    sign, more = repr(separator), len(cells) - len(names)
    if more == 1 and not cells[-1]:
        fix = f"it ends with a {sign}, and line 1 does not; let both do it, or none"
    elif more == -1 and names[-1].startswith("Unnamed: "):
        fix = f"line 1 ends with a {sign}, and it does not; let both do it, or none"
    else:
        fix = f"a {sign} in a cell needs quotes, a decimal sign is a point"
    return f"line {line} ({separator.join(cells)[:40]!r})", fix


def header_below(path: Path, name: str, separators: str) -> str:
    """Return advice where the header, with the column `name`, is a later line than the first."""
    for separator in separators:
        for line, cells in itertools.islice(rows_of(path, separator), _HEAD):
            if name in map(str.strip, cells) and line > 1:
                above = f"lines 1 to {line - 1}, which are" if line > 2 else "line 1, which is"
                return f" Line {line} has it: remove {above} no header"
    return ""


def among(batch: Any, first: str | None, *, is_last: bool) -> dict[int, str]:
    """Return why rows of texts are no data, by their place in the batch.

    The table's `first` column may have comments, the last row of all may be a total.
    """
    import numpy as np
    from pyarrow import compute as pc

    compute: Any = pc  # it makes its functions when it is imported
    names, found = batch.schema.names, dict[int, str]()
    if len(names) > 1:
        lower = [name.lower() for name in names]
        cells = compute.utf8_lower(compute.utf8_trim_whitespace(batch.column(0)))
        is_name = compute.equal(cells, lower[0]).fill_null(False)
        for row in np.flatnonzero(is_name)[:_FEW].tolist():
            if [_text(column, row).lower() for column in batch.columns] == lower:
                found[row] = "repeats the header"
    if first in names:
        is_comment = compute.match_substring_regex(batch.column(first), _COMMENT)
        rows = np.flatnonzero(is_comment.fill_null(False)).tolist()
        rows = [row for row in rows if _is_comment(batch, row)]
        found |= dict.fromkeys(rows if len(rows) <= _FEW else (), "is a comment")
    if batch.num_rows and all(_RULE.fullmatch(_text(column, 0)) for column in batch.columns):
        found[0] = "is a rule"
    if is_last and batch.num_rows > 1 and (why := _total(batch)):
        found[batch.num_rows - 1] = why
    return found


def _is_comment(batch: Any, row: int) -> bool:
    """Return whether a row that begins like a comment is one: -- none -- may be a value."""
    begins = any(_text(column, row).startswith(("#", "//")) for column in batch.columns)
    return begins or not all(_text(column, row) for column in batch.columns)


def _total(batch: Any) -> str:
    """Return why the last row is none of data: it names a total, or has a single cell."""
    last = batch.num_rows - 1
    filled = [column for column in batch.columns if _text(column, last)]
    for column in filled:
        if not _TOTAL.fullmatch(_text(column, last)) or _occurs(column, last) > 1:
            continue
        is_sure = bool(_SURE.match(_text(column, last))) or len(filled) < batch.num_columns
        if is_sure or _numbers(column[:last]) or _adds_up(batch):
            return "is a total, or an end"
    have_gaps = any(column[:last].null_count for column in batch.columns)
    if len(filled) == 1 < batch.num_columns - 1 and not have_gaps:
        return "has a single cell that is not empty, and no other row has an empty one"
    return ""


def _occurs(column: Any, row: int) -> int:
    """Return how often a row's cell is in its column."""
    return int(column.to_pylist().count(column[row].as_py()))


def _numbers(cells: Any) -> list[float]:
    """Return the numbers of a column's cells; none where one is a text."""
    try:
        return [float(cell) for cell in cells.to_pylist() if (cell or "").strip()]
    except ValueError:
        return []


def _adds_up(batch: Any) -> bool:
    """Return whether the last row has the sum, or the mean, of all numbers above it."""
    found = [numbers for column in batch.columns if len(numbers := _numbers(column)) > 2]
    pairs = [(numbers[-1], sum(numbers[:-1]), len(numbers) - 1) for numbers in found]
    sums = all(math.isclose(last, total, rel_tol=1e-3) for last, total, _ in pairs)
    means = all(math.isclose(last, total / number, rel_tol=1e-3) for last, total, number in pairs)
    return bool(pairs) and (sums or means)


def _text(column: Any, row: int) -> str:
    return (column[row].as_py() or "").strip()
