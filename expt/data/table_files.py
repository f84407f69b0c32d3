"""Tables as they lie in files: a .csv, .tsv, .npz or .parquet, in batches of rows; no torch."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from expt.data.plain_text import not_utf8, opened
from expt.errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    import numpy as np

SMALL = 1 << 18
"""Bytes that are read sooner than pyarrow is imported."""
_BYTES = 1 << 24
"""Of a .csv that are read at a time."""
_ROWS = 1 << 16
"""Rows of another file."""
SIGNS = ",;\t|"
"""What stands between the cells of a text, the first if several might."""
_BLANK = b' \t"\r\n\v\f'
"""What the rows are made of by which spreadsheets end a file, besides that sign."""
MISSING = frozenset(
    "#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|"
    "NaT|null|".split("|")
)
"""Texts that pandas reads as no value."""
_UNNAMED = re.compile(r"Unnamed: \d+|__index_level_\d+__")
"""What pandas calls a column without a name, which is where it writes its index."""


@dataclass(frozen=True)
class Texts:
    """A column of texts."""

    different: Sequence[str]
    rows: np.ndarray
    """which of them each row has, int [N]"""

    def __getitem__(self, row: Any) -> str:
        return str(self.different[self.rows[row]])


Column: TypeAlias = "Texts | np.ndarray"
"""A cell for each row: an array [N], of an .npz [N, K] too."""


class Batch(NamedTuple):
    """Some rows of a table."""

    columns: Mapping[str, Column]
    """those that were asked for"""
    size: int
    damaged: Mapping[int, str] = {}
    """why rows have no cells, by their place"""


class TableFile(ABC):
    """A table, of which only the names of the columns are read at first."""

    index: frozenset[str] = frozenset()
    """the columns that pandas wrote as its index, or without a name"""
    size = 0
    """the number of its rows, where it is known before they are read"""
    sign = SIGNS[0]
    """what stands between cells"""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        """Raise DataError where the columns have no names of their own."""
        self.path, self.names = path, _names(path, names)
        self.index = frozenset(filter(_UNNAMED.fullmatch, self.names))

    def batches(self, names: Sequence[str], texts: Collection[str] = ()) -> Iterator[Batch]:
        """Yield the columns `names`, of which `texts` are not taken for numbers.

        Raise DataError for a damaged file.
        """
        with _reading(self.path):
            yield from self._batches(names, texts)

    @abstractmethod
    def _batches(self, names: Sequence[str], texts: Collection[str]) -> Iterator[Batch]: ...


def open_table(path: Path) -> TableFile:
    """Return the table in a file. Raise ConfigError for another kind, DataError for no table."""
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        known = ", ".join(_KINDS)
        raise ConfigError(f"dataset.path={path}: is no {known}; convert it to one of them")
    with _reading(path):
        return kind(path)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as e:
        raise DataError(f"{path} cannot be read as a {path.suffix} ({first_line(e)})") from e


def _names(path: Path, first: Iterable[str]) -> list[str]:
    names = [name.strip() or f"Unnamed: {place}" for place, name in enumerate(first)]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path}: two columns are called {twice!r}; rename one")
    return names


class Arrays(TableFile):
    """Arrays by name."""

    def __init__(self, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise DataError for what are no columns of one length."""
        super().__init__(path, arrays)
        self._arrays = dict(zip(self.names, arrays.values(), strict=True))
        for name, array in arrays.items():
            if array.ndim not in (1, 2) or not array[:1].size:
                raise DataError(
                    f"{path}: the array {name} is {list(array.shape)}; a column is [rows] or [rows,"
                    " numbers]"
                )
        lengths = {name: len(array) for name, array in arrays.items()}
        if len({*lengths.values()}) > 1:
            raise DataError(f"{path}: its arrays differ in their rows: {lengths}")
        self.size = len(next(iter(arrays.values())))

    def _batches(self, names: Sequence[str], texts: Collection[str]) -> Iterator[Batch]:
        for start in range(0, self.size, _ROWS):
            found = {name: self._arrays[name][start : start + _ROWS] for name in names}
            yield Batch(found, len(found[names[0]]))


def _npz(path: Path) -> TableFile:
    import numpy as np

    with path.open("rb") as content, np.lib.npyio.NpzFile(content) as file:
        arrays = {name: file[name] for name in file.files}
    if not arrays:
        raise DataError(
            f"{path}: holds no arrays by name; write it with numpy.savez(path, x=..., y=...)"
        )
    return Arrays(path, arrays)


class _Parquet(TableFile):
    """A file of Arrow's types."""

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        self._file = parquet.ParquetFile(path)
        schema = self._file.schema_arrow
        super().__init__(path, schema.names)
        indices = (schema.pandas_metadata or {}).get("index_columns", ())
        self.index |= {name for name in indices if isinstance(name, str)}
        self.size = self._file.metadata.num_rows
        self._there = dict(zip(self.names, schema.names, strict=True))

    def _batches(self, names: Sequence[str], texts: Collection[str]) -> Iterator[Batch]:
        there = {name: self._there[name] for name in names}
        for batch in self._file.iter_batches(_ROWS, columns=[*there.values()]):
            found = {name: _of_arrow(batch.column(each)) for name, each in there.items()}
            yield Batch(found, batch.num_rows)


def _of_arrow(array: Any) -> Column:
    """Return an array of Arrow's, with nan or an empty text where there is no value."""
    from pyarrow import DictionaryType, types

    if isinstance(array.type, DictionaryType):
        array = array.dictionary_decode()
    if types.is_string(array.type) or types.is_large_string(array.type):
        found = array.fill_null("").dictionary_encode()
        return Texts(found.dictionary.to_pylist(), found.indices.to_numpy())
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values


class _Csv(TableFile):
    """Texts with one of SIGNS between them; the first line names the columns."""

    def __init__(self, path: Path) -> None:
        with opened(path):  # it refuses an archive, and UTF-16
            heads = [_head(path, ",")]
        if any(sign in name for sign in SIGNS[1:] for name in heads[0].names):
            heads += [_head(path, sign) for sign in SIGNS[1:]]
        is_one = len(heads[0].names) == 1
        found = max(heads, key=lambda head: len(head.names) if head.fits or is_one else 0)
        if found.error:
            raise found.error
        if not found.names:
            raise DataError(f"{path}: is empty; its first line names the columns")
        super().__init__(path, found.names)
        self.sign, self._start, self._gaps = found.sign, found.end, list[str]()

    def _batches(self, names: Sequence[str], texts: Collection[str]) -> Iterator[Batch]:
        known, blocks = {*texts}, _blocks(self.path, self.sign, self._start)
        for start, block in blocks:
            is_plain = _is_plain(block, self.sign)
            if is_plain and (found := self._by_pyarrow(block, names, known)):
                yield found
                continue
            # From another block on only Python's csv knows where a row ends.
            rest = () if is_plain else (each for _, each in blocks)
            yield from self._by_csv(_lines(itertools.chain([block], rest)), start, names)

    def _by_pyarrow(self, block: bytes, names: Sequence[str], texts: set[str]) -> Batch | None:
        """Return what pyarrow reads, unless it refuses a row; add to `texts` what is no numbers."""
        if len(block) < SMALL:
            return None
        from pyarrow import ArrowInvalid, float64, py_buffer, string
        from pyarrow import csv as arrow

        gaps = [*MISSING]
        # At a cell that is no number those are taken for gaps that may be, then all are texts.
        for others, empty in ((texts, self._gaps), (texts, gaps), (names, [])):
            types = {name: string() if name in others else float64() for name in names}
            with contextlib.suppress(ArrowInvalid):
                found = arrow.read_csv(
                    py_buffer(block),
                    arrow.ReadOptions(column_names=self.names),
                    arrow.ParseOptions(delimiter=self.sign, newlines_in_values=b'"' in block),
                    arrow.ConvertOptions(
                        column_types=types, include_columns=names, null_values=empty
                    ),
                )
                self._gaps = empty or self._gaps
                columns = {name: found[name].combine_chunks() for name in names}
                for name in {*names} - texts if others is names else ():
                    with contextlib.suppress(ArrowInvalid):
                        columns[name] = _numbers(columns[name], gaps)
                read = {name: _of_arrow(column) for name, column in columns.items()}
                texts |= {name for name, column in read.items() if isinstance(column, Texts)}
                return Batch(read, found.num_rows)
        return None

    def _by_csv(self, lines: Iterable[str], start: int, names: Sequence[str]) -> Iterator[Batch]:
        rows = _filled(_rows(self.path, lines, self.sign, start))
        while several := list(itertools.islice(rows, _ROWS)):
            damaged = {}
            for place, row in enumerate(several):
                if len(row) != len(self.names):
                    damaged[place] = f"has {len(row)} cells for {len(self.names)} columns"
                    several[place] = [""] * len(self.names)
            cells = dict(zip(self.names, zip(*several, strict=True), strict=True))
            yield Batch({name: texts_of(cells[name]) for name in names}, len(several), damaged)


def _numbers(texts: Any, gaps: Sequence[str]) -> Any:
    """Return Arrow's texts as numbers."""
    import pyarrow
    import pyarrow.compute

    arrow: Any = pyarrow.compute
    is_gap = arrow.is_in(texts, pyarrow.array(gaps))
    return arrow.if_else(is_gap, None, texts).cast(pyarrow.float64())


class _Head(NamedTuple):
    """The first row of a text, by a sign between its cells."""

    sign: str
    names: Sequence[str] = ()
    end: int = 0
    """where the next line begins"""
    fits: bool = True
    """whether the next row has as many cells"""
    error: DataError | None = None


def _head(path: Path, sign: str) -> _Head:
    end = 0

    def lines() -> Iterator[str]:
        nonlocal end
        for line in _lines(block for _, block in _blocks(path, sign)):
            end += len(line.encode())
            yield line.removeprefix("\ufeff")

    rows = _rows(path, lines(), sign)
    try:
        names = next(rows, [])
    except DataError as error:
        # What is in quotes may end with another sign.
        return _Head(sign, ["".join(SIGNS)], fits=sign == ",", error=error)
    begins = end
    with contextlib.suppress(DataError):
        row = next(rows, names)
        return _Head(sign, names, begins, sign == "," or len(row) == len(names))
    return _Head(sign, names, begins, fits=sign == ",")


def _is_plain(block: bytes, sign: str) -> bool:
    """Return whether Python's csv and pyarrow read rows alike.

    Quotes are around whole cells, no line ends are a Mac's of before 2001, and no cell begins with
    the mark of an encoding, which pyarrow takes away from the first.
    """
    import numpy as np

    if block.startswith(codecs.BOM_UTF8) or block.count(b"\r") != block.count(b"\r\n"):
        return False
    if b'"' not in block:
        return True
    content = np.frombuffer(b"".join((b"\n", block, b"\n")), np.uint8)
    quotes = np.flatnonzero(content == ord('"'))
    beside = np.concatenate([content[quotes[::2] - 1], content[quotes[1::2] + 1]])
    return len(quotes) % 2 == 0 and bool(np.isin(beside, [*sign.encode(), *b'"\r\n']).all())


def are_numbers(values: np.ndarray) -> np.ndarray:
    """Return which of values are numbers of float32."""
    import numpy as np

    found: np.ndarray = np.abs(values) <= np.finfo(np.float32).max
    return found


def texts_of(cells: Sequence[str]) -> Texts:
    """Return a column of these cells."""
    import numpy as np

    places = dict[str, int]()
    rows = np.array([places.setdefault(cell, len(places)) for cell in cells], np.int64)
    return Texts([*places], rows)


def _blocks(path: Path, sign: str, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a .csv from `start` on in blocks, but blank ones at its end, and where.

    Only a row with a line end in quotes may lie in two of them. Raise DataError for what is not
    UTF-8.
    """
    rest, blank = b"", _BLANK + sign.encode()
    with path.open("rb") as file:
        file.seek(start)
        # More where no row has ended: a line may be long.
        while more := file.read(max(_BYTES, len(rest))):
            rest += more
            if filled := len(rest[: rest.rfind(b"\n") + 1].rstrip(blank)):
                end = rest.find(b"\n", filled) + 1
                yield start, _checked(path, rest[:end])
                start, rest = start + end, rest[end:]
    if rest.strip(blank) or rest.count(b'"') % 2:
        yield start, _checked(path, rest)


def _checked(path: Path, block: bytes) -> bytes:
    with contextlib.suppress(UnicodeDecodeError):
        if block.isascii() or block.decode():
            return block
    raise not_utf8(path)


def _lines(blocks: Iterable[bytes]) -> Iterator[str]:
    for block in blocks:
        yield from io.TextIOWrapper(io.BytesIO(block), "utf-8", newline="")


def _rows(path: Path, lines: Iterable[str], sign: str, start: int = 0) -> Iterator[list[str]]:
    """Yield the rows in lines, which begin at `start`, but empty ones."""
    before = 0
    reader = csv.reader(lines, delimiter=sign, skipinitialspace=True, strict=True)
    limit = csv.field_size_limit(2**31 - 1)
    try:
        for row in reader:
            before = reader.line_num
            if row:
                yield row
    except csv.Error as error:  # a quote that is never closed is noticed at the file's end
        with path.open("rb") as file:
            line = 1 + before + file.read(start).count(b"\n")
        raise DataError(
            f"{path}: a quote is wrong in the row of line {line} ({error}); fix it there"
        ) from error
    finally:
        csv.field_size_limit(limit)


def _filled(rows: Iterable[list[str]]) -> Iterator[list[str]]:
    """Yield the rows but blank ones at the end."""
    blank = list[list[str]]()
    for row in rows:
        blank.append(row)
        if any(map(str.strip, row)):
            yield from blank
            blank.clear()


_KINDS: dict[str, Callable[[Path], TableFile]] = {
    ".csv": _Csv,
    ".npz": _npz,
    ".parquet": _Parquet,
    ".tsv": _Csv,
}
