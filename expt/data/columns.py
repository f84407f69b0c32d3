"""The columns of a table as numbers, labels, classes. Free of torch."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expt.data.plain_text import composed
from expt.data.table_files import MISSING
from expt.data.written import LOCAL, PARTS, WAYS, is_date, plain_time, ways_of
from expt.errors import DataError, listed
from expt.late import np, pa

if TYPE_CHECKING:
    from expt.data.table_files import Table
    from expt.features import Encoding

_NO_VALUE = "has no value, and had one in each row of training"
_TEXTS = "or empty the cell, or if these are categories use dataset.categories"
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
_SPAN = re.compile(r"-?\d+ days \+?\d\d:\d\d:\d\d(\.\d+)?", re.ASCII)
"""A duration as pandas writes it."""
_OF_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
MOST = float.fromhex("0x1.fffffep127")
"""The largest number of float32."""
FEW = 20
"""The number of rows up to which numbers may follow each other by chance."""
_HEAD = 1000
_SHOWS = 10_000
"""Rows that show in which way a column is written."""


def base(name: str, way: str = "") -> str:
    """Return the column that a part is of: x[0] and x[1] are of x, as is x.year of dates."""
    return name.rpartition(".")[0] if is_date(way) else re.sub(r"\[\d+\]$", "", name)


class Column:
    """A column, batch after batch: its numbers, and the texts between them by their places."""

    values: np.ndarray
    """All rows, float64 [N, W], nan for a gap and a text; whoever has them together sets it"""

    def __init__(
        self,
        name: str,
        *,
        are_texts: bool = False,
        most: float = math.inf,
        known: Sequence[str] = (),
        way: str | None = None,
    ) -> None:
        """Take numbers for texts too if they `are_texts`, and distinguish at `most` that number.

        Texts that are `known` come first, even if they look like numbers. Numbers are written in a
        `way` of `WAYS`; with None the first texts show it, and with "" there is none.
        """
        self.name, self.parts, self.known, self.way = name, [name], [*known], way or ""
        self._finds_way = way is None and not (are_texts or known)
        if is_date(self.way):
            self.parts = [f"{name}.{part}" for part in PARTS]
        self._are_texts, self._most = are_texts or bool(known), most
        self.texts = {text: place for place, text in enumerate(known)}
        """Those that there are, and their places."""
        self._coded: list[tuple[int, np.ndarray]] = []
        self._rows, self._first = 0, pa.nulls(0)
        self.has_numbers = self.has_gaps = False

    def read(self, cells: Any) -> np.ndarray:
        """Return an array of Arrow's as float64 [N, W], nan for a gap and a text."""
        self._first = self._first if self._rows else cells[:_SHOWS]
        number, (flat, width) = len(cells), _flat(cells, len(self.parts) if self._rows else None)
        if not self._rows and width > 1:
            self.parts = [f"{self.name}[{place}]" for place in range(width)]
        # A float32 that is written as a text is none.
        is_text = pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)
        by_text = self._are_texts or is_date(self.way) or (self.way and is_text)
        values = None if by_text else _numbers(flat)
        if values is None and self._finds_way and not self._rows:
            self._find_way(flat)
        shape, width = (number, len(self.parts)), len(self.parts) if is_date(self.way) else width
        codes = np.full(1, -1, np.int32)
        if values is None or np.nanmax(np.abs(values), initial=0) > MOST:
            values, codes = self._numbers_and_codes(flat)
        if width != shape[1]:  # lists of another length, each a text
            values, codes = (each.repeat(shape[1]) for each in (values, codes))
        if (codes >= 0).any():
            self._coded.append((self._rows, codes.reshape(shape)))
        gaps = np.isnan(values)
        self.has_gaps = self.has_gaps or bool((gaps & (codes < 0)).any())
        self.has_numbers = self.has_numbers or not gaps.all()
        self._rows += number
        return values.reshape(shape)

    def _find_way(self, cells: Any) -> None:
        """Set the way in which the first texts are written, if there is but one."""
        texts = [text for text in map(_plain, _distinct(cells[:_SHOWS])[0]) if text not in MISSING]
        if len(ways := ways_of(texts)) == 1 and self.parts == [self.name]:
            self.way = ways[0]
            if is_date(self.way):
                self.parts = [f"{self.name}.{part}" for part in PARTS]

    def _numbers_and_codes(self, cells: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers, and the places of texts: -1 for a number or a gap."""
        texts, rows = _distinct(cells)
        is_time = is_date(self.way) and pa.types.is_temporal(cells.type)
        is_plain = not (self.way or self._are_texts)
        way = "year-month-day" if is_time else self.way
        shape = (len(texts) + 1, len(self.parts)) if is_date(self.way) else (len(texts) + 1,)
        values, codes = np.full(shape, np.nan), np.full(shape, -1, np.int32)
        for place, text in enumerate(map(_plain, texts)):
            if text in MISSING and text not in self.known:
                continue
            if way and (read := WAYS[way](text)) and not abs(read[0]) > MOST:
                values[place] = read if is_date(self.way) else read[0]
                continue
            if is_plain and _NUMBER.fullmatch(text) and not abs(float(text)) > MOST:
                values[place] = float(text)
                continue
            if self._are_texts and text not in self.known and _INTEGER.fullmatch(text):
                text = text.partition(".")[0]
            if len(self.texts) < self._most:
                self.texts.setdefault(text, len(self.texts))
            codes[place] = self.texts.get(text, len(self.texts) - 1)
        return values[rows], codes[rows]

    @property
    def may_be_local(self) -> str:
        """A text with a point, if all of the first numbers may be written as `LOCAL`."""
        if self.way or self._are_texts or not pa.types.is_string(self._first.type):
            return ""
        texts = [text for text in map(_plain, _distinct(self._first)[0]) if text not in MISSING]
        may_be = all(map(WAYS[LOCAL], texts))
        return next((text for text in texts if "." in text), "") if may_be else ""

    @property
    def codes(self) -> np.ndarray:
        """The places of the cells' texts among `texts`, int [N, W]: -1 for a number or a gap."""
        found = np.full((self._rows, len(self.parts)), -1, np.int32)
        for start, codes in self._coded:
            found[start : start + len(codes)] = codes
        return found

    def texts_as(self, numbers: Sequence[float]) -> None:
        """Write a number in place of each text."""
        if self._coded:
            codes = self.codes
            self.values[:] = np.where(codes < 0, self.values, np.array([*numbers, 0.0])[codes])

    @property
    def flags(self) -> list[str]:
        """Yes and no, or true and false, that of 0 first; none where there are other texts."""
        texts = {text.casefold() for text in self.texts}
        return [] if self._are_texts or self.way or not texts <= _FLAGS.keys() else sorted(texts)

    @property
    def names_rows(self) -> bool:
        """True if each row has another text; the last code stands for all beyond very many."""
        if not FEW <= min(self._rows, self._most) == len(self.texts):
            return False
        return bool((np.bincount(self.codes.ravel() + 1)[1:-1] == 1).all())

    @property
    def categories(self) -> list[str]:
        """The texts in order of the alphabet, or as they were known, unless they are flags."""
        return [] if self.flags else self.known or sorted({*_booleans(self.texts).values()})

    def number(self) -> None:
        """Write 1 and 0 in place of flags, and of other texts their places among `categories`."""
        places = {text: float(place) for place, text in enumerate(self.categories)} or _FLAGS
        names = {x: x for x in self.texts} if self.known else _booleans(self.texts)
        self.texts_as([places.get(names[x], places.get(x.casefold(), 0.0)) for x in self.texts])

    @property
    def remedy(self) -> str:
        """The advice for a cell that is not written as the others."""
        return "write it so" if self.way else "give it a number"

    def odd_rows(self, fix: str, table: Table, *, may_have_gaps: bool = False) -> str:
        """Return which rows hold texts that are no flags, or gaps, if any do."""
        odd = [bool(self.way) or text.casefold() not in _FLAGS for text in self.texts]
        if not any(odd) and (may_have_gaps or not self.has_gaps):
            return ""
        codes = self.codes
        wrong = np.array([*odd, False])[codes]
        wrong |= np.isnan(self.values) & (codes < 0) & (not may_have_gaps)
        rows, (first, place) = np.flatnonzero(wrong.any(1)), np.argwhere(wrong)[0]
        number = len(rows)
        text = [*self.texts, ""][codes[first, place]]
        noun = f"written as {self.way}" if self.way else "a number"
        if _COMMA.fullmatch(text) and not self.way:
            fix = "write a point as the decimal sign, and no sign between thousands"
        fault = f"{text[:40]!r} is not {noun}" if text else "has no value"
        lines = table.lines(rows.tolist()) if number <= FEW else ""
        more = f" and {number - 1} more" if number > 1 else ""
        return f", {table.row(first)}{more}: {fault}; {lines}{fix}"

    def problem(self, most: int | None, table: Table) -> str:
        """Return why the rows can't be features, such as more than `most` categories."""
        if self.way or len(self.parts) > 1:
            fix = f"{self.remedy}, {_TEXTS if self.way else 'or remove the row'}"
            return self.odd_rows(fix, table, may_have_gaps=bool(self.way))
        some = self.categories[:_HEAD]
        if some and not self._are_texts:
            for kind, one, fix in (
                ("dates", _DATE, "write them in one way, such as 2024-01-31"),
                ("durations", _SPAN, "give numbers of them, such as the seconds"),
            ):
                if all(map(one.fullmatch, some)):
                    return f" holds {kind} ({some[0]}); {fix}"
            if self.has_numbers or any(map(_AMOUNT.fullmatch, some)):
                return self.odd_rows(f"{self.remedy}, {_TEXTS}", table, may_have_gaps=True)
        if most is not None and len(self.categories) > most:
            there, fix = f"{len(self.texts)} or more", "give it fewer"
            if len(self.texts) < self._most:
                there = str(len(self.texts))
                fix = f"set dataset.max_categories={there}, or name sentences as dataset.text"
            such = ", ".join(some[:3])
            return f" holds {there} different texts ({such}, ...), more than {most}; {fix}"
        return ""


def _flat(cells: Any, wanted: int | None) -> tuple[Any, int]:
    """Return the numbers in lists of one length, the `wanted` one if there is, and that length.

    A float32 that is 0.1 in a .csv is 0.1, unless it is in a list.
    """
    types, found, width = pa.types, cells, 1
    if types.is_float16(cells.type):
        return pa.array(cells.to_numpy(zero_copy_only=False).astype(str)), 1
    if types.is_float32(cells.type):
        return cells.cast(pa.string()), 1
    while types.is_nested(getattr(found.type, "storage_type", found.type)):
        found = getattr(found, "storage", found)
        is_list = types.is_list(found.type) or types.is_large_list(found.type)
        if found.null_count or not (is_list or types.is_fixed_size_list(found.type)):
            return cells, 1
        lengths = np.diff(found.offsets) if is_list else [found.type.list_size]
        if len({*lengths}) != 1 or not lengths[0]:
            return cells, 1
        found, width = found.flatten(), width * int(lengths[0])
    return (found, width) if wanted in (None, width) else (cells, 1)


def _numbers(cells: Any) -> np.ndarray | None:
    """Return cells as float64 [N] if all are numbers or gaps."""
    kinds = pa.types.is_temporal, pa.types.is_boolean, pa.types.is_dictionary
    if any(is_one(cells.type) for is_one in kinds):
        return None
    if pa.types.is_decimal(cells.type):
        cells = cells.cast(pa.string())
    try:
        found = cells if cells.type == pa.float64() else cells.cast(pa.float64(), safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    numbers: np.ndarray = found.to_numpy(zero_copy_only=False)
    return numbers


def _distinct(cells: Any) -> tuple[list[str], np.ndarray]:
    """Return the different cells as texts, and the place of each cell among these, -1 for none."""
    if pa.types.is_nested(cells.type) or isinstance(cells.type, pa.BaseExtensionType):
        texts = [None if cell is None else str(cell) for cell in cells.to_pylist()]
        cells = pa.array(texts, pa.string())
    elif pa.types.is_dictionary(cells.type):
        cells = cells.dictionary_decode()
    found, text = cells, text_of
    if pa.types.is_duration(cells.type):
        found, text = cells.cast(pa.int64()), functools.partial(_span, cells.type.unit)
    elif pa.types.is_null(cells.type) or pa.types.is_temporal(cells.type):
        found = cells.cast(pa.string())
    found = found.dictionary_encode()
    rows: np.ndarray = found.indices.fill_null(-1).to_numpy()
    return [*map(text, found.dictionary.to_pylist())], rows


def _span(unit: str, number: int) -> str:
    """Return a duration as pandas writes it."""
    seconds, part = divmod(number, _OF_SECOND[unit])
    days, seconds = divmod(seconds, 24 * 3600)
    clock = f"{'+' * (days < 0)}{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    fraction = f".{part * 10**9 // _OF_SECOND[unit]:09}" if part else ""
    return f"{days} days {clock}{fraction}"


def texts_of(cells: Any) -> list[str]:
    """Return cells as texts, empty for a gap."""
    texts, rows = _distinct(cells)
    return [*map([*texts, ""].__getitem__, rows)]


def _plain(text: str) -> str:
    """Return a text without blanks around it, nor quotes that come after a blank in a .csv.

    Times are spelled in one way, whichever program has written them.
    """
    text = composed(text.strip())
    if time := plain_time(text):
        return time
    if _SPAN.fullmatch(text) and "." in text:
        text = text.rstrip("0").rstrip(".")
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _boolean(text: str) -> str:
    return text.capitalize() if text.casefold() in ("true", "false") else text


def _booleans(texts: Iterable[str]) -> dict[str, str]:
    """Return how texts are written: if all are booleans as pandas does it, True also for true."""
    names = {text: _boolean(text) for text in texts}
    return names if {*names.values()} <= {"True", "False"} else {text: text for text in names}


def text_of(cell: Any) -> str:
    """Return a cell as a .csv has it, an integer without a point; bytes may be no UTF-8."""
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 1e16:
        return f"{cell:.0f}"
    return cell.decode(errors="backslashreplace") if isinstance(cell, bytes) else str(cell)


def known_column(name: str, encoded: Mapping[str, Encoding]) -> Column:
    """Return a column that reads cells as a run has."""
    how, way = encoded.get(name, {}), encoded.get(f"{name}.{PARTS[0]}", {}).get("way", "")
    way = way if is_date(way) else how.get("way", "")
    return Column(name, are_texts="categories" in how, way=way)


def read_as_known(
    columns: Mapping[str, Any], encoded: Mapping[str, Encoding], filled: Container[str]
) -> tuple[np.ndarray, dict[int, str], dict[str, Counter[str]]]:
    """Return new rows as a run has them, float64 [N, K], see `table_source.Encoder`.

    Also why rows can't be used, by their place, and how often texts, or gaps, occur in a column
    that the run does not know: such texts are -1. A gap is wrong in a column of numbers without
    one in training, unless it is `filled`.
    """
    found, wrong, unknown = list[np.ndarray](), dict[int, str](), dict[str, Counter[str]]()
    for name, cells in columns.items():
        column = known_column(name, encoded)
        how = encoded.get(column.parts[0], {})
        column.values = column.read(cells).copy()
        codes, texts = column.codes, [*column.texts, ""]
        if "categories" in how:
            known = {text: float(place) for place, text in enumerate(how["categories"])}
            names = (_boolean(x) if x not in known else x for x in column.texts)
            column.texts_as([known.get(name, -1.0) for name in names])
            if (new := codes[column.values == -1]).size:
                unknown[name] = Counter(map(texts.__getitem__, new.tolist()))
            if None not in how["categories"] and column.has_gaps:
                unknown.setdefault(name, Counter())[""] = int((codes < 0).sum())
        else:
            flags = {} if column.way else _FLAGS
            column.texts_as([flags.get(text.casefold(), math.inf) for text in column.texts])
        found.append(column.values)
        is_new = np.isnan(found[-1]) & how.keys().isdisjoint(("median", "categories"))
        has_fill = all(part in filled for part in column.parts)
        if has_fill and (rows := int(is_new.any(1).sum())):
            unknown[name] = Counter({"": rows})
        odd = np.isinf(found[-1]) | (is_new & (not has_fill))
        for row, place in np.argwhere(odd).tolist():
            text = texts[codes[row, place]][:40]
            noun = f"written as {column.way}" if column.way else "a number"
            fault = f"holds {text!r}, which is not {noun}" if text else _NO_VALUE
            wrong.setdefault(row, f"column {name} {fault}")
    return np.concatenate(found, axis=1), wrong, unknown


def filled_gaps(name: str, rows: int) -> str:
    """Return a warning of gaps among numbers in some rows, that no training row has."""
    return f"column {name}: no training row has a gap ({rows} rows): they become its training mean"


def unknown_texts(name: str, unknown: Iterable[str | None], rows: int = 0) -> str:
    """Return a warning of a column's texts, in a number of rows, that no training row has."""
    texts = listed([repr(text) if text else "a gap" for text in unknown], 5)
    where = f" ({rows} rows)" if rows else ""
    return f"column {name}: no training row has {texts}{where}: they are 0 in all its categories"


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
    return len(values) >= FEW and _are_ids(values) and bool(np.ptp(values) == len(values) - 1)


def may_be_ids(values: np.ndarray) -> bool:
    """Return whether integers [N] rise or fall with each row, or all differ, and not by chance."""
    if len(values) < FEW or not _are_ids(values):
        return False
    alike = len(values) ** 2 / (2 * np.ptp(values) + 2)  # pairs of random numbers
    steps = np.diff(values)
    return alike > FEW or bool((steps > 0).all() or (steps < 0).all())


def _are_ids(values: np.ndarray) -> bool:
    """Return whether values [N] are integers, no two equal: the first ones mostly tell."""
    return all(
        bool((some == np.floor(some)).all() and np.diff(np.sort(some)).all())
        for some in (values[:_HEAD], values)
    )


def classes_of(path: Path, column: Column, table: Table) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the class of each row, int64 [N], and the classes' names.

    These are as they are known, or texts in order of the alphabet, or integers by their value.
    Raise DataError for a cell that is not a class.
    """
    if (number := len(column.parts)) > 1:
        fault = f"has {number} numbers in each row; a class is one"
        raise DataError(f"{path}: column {column.name} {fault}")
    codes, texts, at = column.codes[:, 0], [*column.texts], f"{path}: column {column.name}, "
    names = dict(zip(texts, texts, strict=True))
    if column.has_gaps:
        rows = np.flatnonzero(codes < 0)
        lines = table.lines(rows.tolist()) if len(rows) <= FEW else ""
        raise DataError(
            f"{at}{table.row(int(rows[0]))}: is empty, or NA or such; {lines}give it a class,"
            " remove the row, or write another word if it is one"
        )
    key: Callable[[str], Any] | None = None
    wrong, fault = list[str](), ""
    if column.known:
        wrong = texts[len(column.known) :]
        fault = (
            "is none of the classes that the column declares; give it one of them, or remove the"
            " row"
        )
    elif are_numbers(texts) and not any(map(_PADDED.match, texts)):
        wrong = [text for text in texts if not float(text).is_integer()]
        fault = "is not a class, which is an integer or a text; fix it, or use task=regression"
        key = lambda text: (float(text), text)  # noqa: E731
        if all(map(_INTEGER.fullmatch, texts)):
            names, key = {text: str(int(text.partition(".")[0])) for text in texts}, int
    else:
        names = _booleans(texts)
    if wrong:
        first = int((codes == texts.index(wrong[0])).argmax())
        raise DataError(f"{at}{table.row(first)}: {wrong[0]} {fault}")
    found = column.known or sorted({*names.values()}, key=key)
    places = {each: place for place, each in enumerate(found)}
    return np.array([places[names[text]] for text in texts], np.int64)[codes], tuple(found)


def check_learnable(
    path: Path, name: str, classes: np.ndarray, names: Sequence[str], key: str
) -> None:
    """Raise DataError where nothing can be learned of classes: only one, or few rows of each."""
    if 1 < len(names) <= max(20, len(classes) / 2):
        return
    fault = f"all rows are of one class, {names[0]}"
    if len(names) > 1:
        fault = (
            f"has {len(names):,} classes in {len(classes):,} rows, too few of each to learn one"
            " (of numbers: task=regression)"
        )
    raise DataError(f"{path}: column {name}: {fault}; name another by {key}")


def check_labels(path: Path, column: Column, table: Table) -> None:
    """Raise DataError for a number that is neither 0 nor 1."""
    for first, place in np.argwhere((column.values != 0) & (column.values != 1)):
        where = f"{path}: column {column.parts[place]}, {table.row(first)}"
        fault = f"{column.values[first, place]:g} is not a label, which is 0 or 1"
        raise DataError(f"{where}: {fault}; fix it, or use task=regression")
