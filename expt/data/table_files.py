"""Tables as they lie in files: a .csv, .tsv, .npz or .parquet, in batches of rows; no torch."""

from __future__ import annotations

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
_BYTES = 1 << 23
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

    def __len__(self) -> int:
        return len(self.rows)

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
            found = {x: _of_arrow(batch.column(name), x in texts) for x, name in there.items()}
            yield Batch(found, batch.num_rows)


def _of_arrow(array: Any, is_text: bool = False) -> Column:
    """Return an array of Arrow's, with nan or an empty text where there is no value."""
    from pyarrow import DictionaryType, string, types

    if isinstance(array.type, DictionaryType):
        array = array.dictionary_decode()
    if is_text and array.null_count and types.is_integer(array.type):  # floats merge large ones
        array = array.cast(string())
    if types.is_string(array.type) or types.is_large_string(array.type):
        found = array.fill_null("").dictionary_encode()
        return Texts(found.dictionary.to_pylist(), found.indices.to_numpy())
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values


class _Csv(TableFile):
    """Texts with one of SIGNS between them; the first line names the columns."""

    def __init__(self, path: Path) -> None:
        with opened(path):  # it refuses an archive, and UTF-16
            self.path, self.sign = path, _sign(path)
        self._start, self._gaps = 0, list[str]()
        names = next(_rows(path, self._header(), self.sign), None)
        if not names:
            raise DataError(f"{path}: is empty; its first line names the columns")
        super().__init__(path, names)

    def _header(self) -> Iterator[str]:
        for line in _lines(block for _, block in _blocks(self.path, self.sign)):
            self._start += len(line.encode())
            yield line.removeprefix("\ufeff")

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
        # It reads 0x10 as 16; to look for one byte first takes no time.
        if len(block) < SMALL or any(x in block and b"0" + x in block for x in (b"x", b"X")):
            return None
        from pyarrow import ArrowInvalid, py_buffer, string, types
        from pyarrow import csv as arrow

        with contextlib.suppress(ArrowInvalid):
            while True:
                found = arrow.read_csv(
                    py_buffer(block),
                    arrow.ReadOptions(column_names=self.names),
                    arrow.ParseOptions(delimiter=self.sign, newlines_in_values=b'"' in block),
                    arrow.ConvertOptions(
                        column_types=dict.fromkeys(texts, string()),
                        include_columns=names,
                        null_values=self._gaps,
                    ),
                )
                are_numbers = types.is_integer, types.is_floating, types.is_null
                others = {x.name for x in found.schema if not any(f(x.type) for f in are_numbers)}
                if others <= texts:
                    columns = {name: _of_arrow(found[name].combine_chunks()) for name in names}
                    return Batch(columns, found.num_rows)
                if self._gaps:
                    texts |= others
                self._gaps = [*MISSING]  # looking for them takes time, so only where it is needed
        return None

    def _by_csv(self, lines: Iterable[str], start: int, names: Sequence[str]) -> Iterator[Batch]:
        rows = _rows(self.path, lines, self.sign, start)
        while several := list(itertools.islice(rows, _ROWS)):
            damaged = {}
            for place, row in enumerate(several):
                if len(row) != len(self.names):
                    damaged[place] = f"has {len(row)} cells for {len(self.names)} columns"
                    several[place] = [""] * len(self.names)
            cells = dict(zip(self.names, zip(*several, strict=True), strict=True))
            yield Batch({name: texts_of(cells[name]) for name in names}, len(several), damaged)


def _sign(path: Path) -> str:
    """Return the sign that divides the first two rows into as many cells, the most; or a comma."""
    _, block = next(_blocks(path, SIGNS), (0, b""))
    found = dict.fromkeys(SIGNS, (False, 1))
    for sign in SIGNS:
        with contextlib.suppress(csv.Error):  # what is in quotes may end with another sign
            rows = [*itertools.islice(filter(None, _reader(_lines([block]), sign)), 2)]
            number = len(rows[0]) if rows else 0
            fits = sign == "," or all(len(row) == number for row in rows)
            found[sign] = fits and number > 1, number
    return max(found, key=lambda sign: found[sign])


def _reader(lines: Iterable[str], sign: str) -> Any:
    return csv.reader(lines, delimiter=sign, skipinitialspace=True, strict=True)


def _is_plain(block: bytes, sign: str) -> bool:
    """Return whether Python's csv and pyarrow read rows alike.

    Quotes are around whole cells, and no line ends are a Mac's of before 2001.
    """
    import numpy as np

    if b"\r" in block and block.count(b"\r") != block.count(b"\r\n"):
        return False
    if b'"' not in block:
        return True
    content = np.frombuffer(b"".join((b"\n", block, b"\n")), np.uint8)
    quotes = np.flatnonzero(content == ord('"'))
    beside = np.concatenate([content[quotes[::2] - 1], content[quotes[1::2] + 1]])
    return len(quotes) % 2 == 0 and bool(np.isin(beside, [*sign.encode(), *b'"\r\n']).all())


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
    reader = _reader(lines, sign)
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


_KINDS: dict[str, Callable[[Path], TableFile]] = {
    ".csv": _Csv,
    ".npz": _npz,
    ".parquet": _Parquet,
    ".tsv": _Csv,
}
