"""Tables as Arrow reads them: a .csv, .tsv, .npz, .parquet or a folder of them; no torch."""

from __future__ import annotations

import codecs
import contextlib
import csv as python_csv
import itertools
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

from expt.data import other_lines
from expt.data.checksums import of_content, of_files
from expt.data.folders import files_below
from expt.data.plain_text import not_utf8, opened
from expt.errors import ConfigError, DataError, ExptError, absent, first_line, listed
from expt.late import compute, csv, np, pa, parquet

Batch: TypeAlias = Any  # of pyarrow
Damaged: TypeAlias = "dict[int, str] | None"
"""The place of reasons why rows are damaged, by their numbers; None to raise them."""
_BYTES, _CELLS = 1 << 24, 1 << 20
"""Bytes of a .csv, and cells of another file, that are read at a time."""
SEPARATORS = ",;\t|"
"""Characters between the cells of a text; the first if several are possible."""
MISSING = frozenset(
    "#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|"
    "NaT|null|".split("|")
)
"""Texts that pandas reads as no value."""
_UNNAMED = re.compile(r"Unnamed: \d+|__index_level_\d+__")
"""Names that pandas gives to a column without a name, such as the index that it writes."""


class Uses(NamedTuple):
    """The uses of columns, on which the reading of some cells depends."""

    targets: Sequence[str] = ()
    """columns in which the class -1 stays, for a message; in others it is a gap"""
    texts: Collection[str] = ()
    """columns whose cells are data, whatever they look like"""
    classes: Mapping[str, Sequence[str]] | None = None
    """columns of numbers that are given by the names of their classes; None: all that have some"""
    kept: Collection[str] = ()
    """columns whose texts stay as they are, one that is no value elsewhere, as NA, too"""


class Table(ABC):
    """A table; at first only the names of its columns are read."""

    size = 0
    """the number of its rows, if it is known before they are read"""
    separator = SEPARATORS[0]
    """the character between cells"""
    classes: Mapping[str, Sequence[str]] = {}
    """the classes of columns of numbers that declare theirs, in order"""
    key_of_targets = "dataset.targets"
    parts: Mapping[str, int] = {}
    """the rows in each file or split, by its name, if there are several; of files once read"""
    notes: Sequence[str] = ()
    """warnings of parts that are not read"""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        """Raise DataError where two columns have one name."""
        self.path, self.names = path, _names(path, names)
        self.index = {*filter(_UNNAMED.fullmatch, self.names)}
        """the columns that pandas wrote as its index, or without a name"""

    def batches(
        self, names: Sequence[str], damaged: Damaged = None, uses: Uses | None = None
    ) -> Iterator[Batch]:
        """Yield batches of the columns `names`.

        A row with too few or too many cells is one of gaps; the reason is put into `damaged` by its
        number, from 0. Raise DataError for it without `damaged`, and for a damaged file.
        """
        uses = uses or Uses()
        if uses.classes is None:
            uses = uses._replace(classes=self.classes)
        with reading(self.path):
            yield from self._batches(names, damaged, uses)

    @abstractmethod
    def _batches(self, names: Sequence[str], damaged: Damaged, uses: Uses) -> Iterator[Batch]: ...

    def row(self, number: int) -> str:
        """Return how a person finds a row, by its number from 0."""
        for part, size in self.parts.items():
            if number < size:
                return f"row {number + 1} of {part}"
            number -= size
        return f"row {number + 1}"

    def header_below(self, name: str) -> str:
        """Return advice where a later line than the first has a column."""
        return ""

    def lines(self, rows: Sequence[int]) -> str:
        """Return the beginning of advice that names the lines of a few wrong rows."""
        return ""


def with_classes(batch: Batch, uses: Uses, own: Mapping[str, Sequence[str]]) -> Batch:
    """Return a batch with classes by their names; a part of a table may have its `own`."""
    for name, names in (uses.classes or {}).items():
        place = batch.schema.get_field_index(name)
        if place < 0 or not pa.types.is_integer((cells := batch.column(place)).type):
            continue
        known: dict[int, str | None] = dict(enumerate(own.get(name, names)))
        known |= {} if name in uses.targets else {-1: None}
        found = [None if x is None else known.get(x, str(x)) for x in cells.to_pylist()]
        batch = batch.set_column(place, name, pa.array(found, pa.string()))
    return batch


def open_table(path: Path) -> Table:
    """Return the table in a file or folder. Raise ConfigError for another kind of file."""
    if path.is_dir():
        return _Folder(path)
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"dataset.path={path}: is no {', '.join(_KINDS)}; convert it to one")
    with reading(path):
        return kind(path)


def files_of(path: Path) -> list[Path]:
    """Return the files of a table, those of a folder in the order of the numbers in their names.

    Raise DataError where there are none, or of several kinds.
    """
    if path.is_file():
        return [path]
    found = [Path(each) for each in files_below(path, (*_KINDS,)) if Path(each).name[0] != "_"]
    if len(kinds := sorted({each.suffix.lower() for each in found})) != 1:
        if not path.is_dir():
            raise DataError(f"dataset.path={path}: {absent(path)}")
        there = " and ".join(kinds) or f"no {', '.join(_KINDS)}"
        raise DataError(f"dataset.path={path}: holds {there}; keep one kind there")

    def order(path: Path) -> list[tuple[int, str]]:
        parts = re.split(r"(\d+)", str(path))
        return [(int(part) if part.isdecimal() else -1, part) for part in parts]

    return sorted(found, key=order)


def fingerprint(path: Path) -> str:
    """Return a digest of the content of a table; of a folder the names in it count, too."""
    files = files_of(path)
    if path.is_file():
        return of_content(files)
    return of_files(path, [str(each.relative_to(path)) for each in files])


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise DataError where a file can't be read as a table."""
    try:
        yield
    except (ExptError, MemoryError):
        raise
    except Exception as e:  # of NumPy, zipfile, zlib, tokenize, Arrow, ...
        if isinstance(e, UnicodeDecodeError) or "invalid UTF8" in str(e):
            raise not_utf8(path) from e
        fault = f"cannot be read as a {path.suffix} ({first_line(e)})"
        raise DataError(f"{path} {fault}; fix or replace it") from e


def _names(path: Path, first: Iterable[str]) -> list[str]:
    names = [name.strip() or f"Unnamed: {place}" for place, name in enumerate(first)]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path}: two columns are called {twice!r}; rename one")
    return names


class Arrays(Table):
    """Arrays by name; one [rows, numbers] is a column of lists."""

    def __init__(self, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise DataError for arrays that are no columns of one length."""
        super().__init__(path, arrays)
        for name, array in arrays.items():
            if array.ndim not in (1, 2) or not array[:1].size:
                fix = "a column is [rows] or [rows, numbers]"
                raise DataError(f"{path}: the array {name} is {list(array.shape)}; {fix}")
        lengths = {name: len(array) for name, array in arrays.items()}
        if len({*lengths.values()}) > 1:
            raise DataError(f"{path}: its arrays differ in their rows: {lengths}")

        columns = [
            pa.FixedSizeListArray.from_arrays(pa.array(each.reshape(-1)), each.shape[1])
            if each.ndim == 2
            else pa.array(each)
            for each in arrays.values()
        ]
        self._table = pa.table(columns, self.names)
        self.size = self._table.num_rows

    def _batches(self, names: Sequence[str], damaged: Damaged, uses: Uses) -> Iterator[Batch]:
        yield from self._table.select([*names]).to_batches(_CELLS // len(names) + 1)


def _npz(path: Path) -> Table:
    with path.open("rb") as content, np.lib.npyio.NpzFile(content) as file:
        arrays = {name: np.asarray(file[name]) for name in file.files}
    if not arrays:
        fix = "write it with numpy.savez(path, x=..., y=...)"
        raise DataError(f"{path}: holds no arrays by name; {fix}")
    return Arrays(path, arrays)


class _Parquet(Table):
    """A file of Arrow's types."""

    def __init__(self, path: Path) -> None:
        self._file = parquet.ParquetFile(path)
        schema = self._file.schema_arrow
        super().__init__(path, schema.names)
        indices = (schema.pandas_metadata or {}).get("index_columns", ())
        self.classes = _declared(schema.metadata or {})
        self.index |= {name for name in indices if isinstance(name, str)}
        self.size = self._file.metadata.num_rows
        self._there = dict(zip(self.names, schema.names, strict=True))

    def _batches(self, names: Sequence[str], damaged: Damaged, uses: Uses) -> Iterator[Batch]:
        there, number = [self._there[name] for name in names], _CELLS // len(names) + 1
        for batch in self._file.iter_batches(number, columns=there):
            named = batch.select(there).rename_columns([*names])
            yield with_classes(named, uses, self.classes)


def _declared(metadata: Mapping[bytes, bytes]) -> dict[str, Sequence[str]]:
    """Return the classes that a Hugging Face dataset has written into a file."""
    features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    every = {name.strip(): each for name, each in features.items() if isinstance(each, dict)}
    return {name: each["names"] for name, each in every.items() if each.get("names")}


class _Folder(Table):
    """Files of one kind one after the other; a folder `key=value`, as Hive has it, is a column."""

    def __init__(self, path: Path) -> None:
        self._files = {str(file.relative_to(path)): file for file in files_of(path)}
        first = next(iter(self._files))
        table = open_table(self._files[first])
        super().__init__(path, [*table.names, *_of_folders(first)])
        self.index, self.separator, self.classes = table.index, table.separator, table.classes

    def lines(self, rows: Sequence[int]) -> str:
        for part, size in self.parts.items():
            if rows and max(rows) < size:
                return open_table(self._files[part]).lines(rows) if min(rows) >= 0 else ""
            rows = [row - size for row in rows]
        return ""

    def header_below(self, name: str) -> str:
        return open_table(next(iter(self._files.values()))).header_below(name)

    def _batches(self, names: Sequence[str], damaged: Damaged, uses: Uses) -> Iterator[Batch]:
        self.parts = parts = dict[str, int]()
        self.notes = notes = list[str]()
        for part, file in self._files.items():
            table, of_folders, done = open_table(file), _of_folders(part), sum(parts.values())
            notes += self._surplus(part, [*table.names, *of_folders])
            if missing := {*names} - {*table.names, *of_folders}:
                raise DataError(f"{file}: has no column {min(missing)}, which other files have")
            there = [x for x in names if x not in of_folders] or table.names[:1]
            wrong: dict[int, str] | None = None if damaged is None else {}
            parts[part] = 0
            for batch in table.batches(there, wrong, uses):
                size = batch.num_rows
                same = {x: pa.array([text] * size, pa.string()) for x, text in of_folders.items()}
                parts[part] += size
                if damaged is not None and wrong:
                    damaged |= {done + row: why for row, why in wrong.items()}
                columns = [same[x] if x in same else batch.column(x) for x in names]
                yield pa.record_batch(columns, [*names])

    def _surplus(self, part: str, names: Sequence[str]) -> Iterator[str]:
        """Yield a note on columns that the first file does not have."""
        if more := listed(x for x in names if x not in self.names):
            first = next(iter(self._files))
            yield f"{part} has the column {more}, which is left out: {first} has it not"


def _of_folders(path: str) -> dict[str, str | None]:
    """Return the columns that the folders of a file stand for."""
    pairs = (folder.split("=", 1) for folder in Path(path).parts[:-1] if "=" in folder)
    return {
        key: None if text == "__HIVE_DEFAULT_PARTITION__" else unquote(text) for key, text in pairs
    }


class _Csv(Table):
    """Texts with one of SEPARATORS between them; the first line names the columns."""

    def __init__(self, path: Path) -> None:
        with opened(path), path.open("rb") as file:  # it refuses an archive, and UTF-16
            head = b"".join(itertools.islice(file, 8))
        head.decode()  # pyarrow prints a traceback for a row of other cells that is not UTF-8
        self._block = max([_BYTES, *(8 * len(line) for line in head.splitlines())])
        found = {each: _header(head, each) for each in SEPARATORS}
        self.separator = max(found, key=lambda each: found[each][:2])
        if not (names := found[self.separator][2]):
            raise DataError(f"{path}: is empty; its first line names the columns")
        super().__init__(path, names)
        self._there = dict(zip(self.names, names, strict=True))
        self._unequal = set[int]()
        """Rows with too few or too many cells."""

    def header_below(self, name: str) -> str:
        return other_lines.header_below(self.path, name, SEPARATORS)

    def lines(self, rows: Sequence[int]) -> str:
        return other_lines.lines_of(self.path, self.separator, rows)

    def _batches(self, names: Sequence[str], damaged: Damaged, uses: Uses) -> Iterator[Batch]:
        """Yield all cells as texts: which of them are numbers is decided in `columns`."""
        found = dict[int, str]() if damaged is None else damaged
        blank, ends = other_lines.tail(self.path, self.separator)
        every = [*names]
        if len(ends) == len(self.names):  # a total may be named in another column, such as an index
            pairs = zip(self.names, ends, strict=True)
            every += [x for x, cell in pairs if other_lines.is_word(cell) and x not in names]
        first, done = None if self.names[0] in uses.texts else self.names[0], 0
        for batch, is_last in _but_blank(self._read(every, found, uses.kept), blank):
            if not {*names} <= {*uses.texts}:
                odd = other_lines.among(batch, first, names, uses.targets, is_last=is_last)
                found.update({done + row: why for row, why in odd.items()})
            if damaged is None and found:
                row, why = min(found.items())
                raise DataError(f"{self.path}: {self.row(row)} {why}{self._fix(row)}")
            done += batch.num_rows
            yield batch.select([*names])

    def _fix(self, row: int) -> str:
        """Return advice for a row that is none, or has too few or too many cells."""
        line, fix = other_lines.line_and_fix(self.path, self.separator, row, self.names)
        if row not in self._unequal:
            return f"; remove {line}"
        named = ", ".join(self.names)[:60]
        return f", which line 1 names ({named}); remove {line} if it is no data; {fix}"

    def _read(
        self, names: Sequence[str], damaged: dict[int, str], kept: Collection[str]
    ) -> Iterator[Batch]:
        """Yield all rows but blank ones; one of too few or too many cells is one of gaps."""
        may_be_open = self._has_odd_quotes()
        there, unequal = [self._there[name] for name in names], list[Any]()
        reader = csv.open_csv(
            self.path,
            csv.ReadOptions(use_threads=False, block_size=self._block),  # several count no rows
            _how(self.separator, unequal),
            csv.ConvertOptions(
                column_types=dict.fromkeys(there, pa.string()),
                include_columns=there,
                null_values=[""] if kept else [*MISSING],
                strings_can_be_null=True,
            ),
        )
        last = pa.RecordBatch.from_pylist([], reader.schema)
        done, above = 0, 2  # lines above the first row, counted from 1, and blank ones
        for batch in itertools.chain(reader, [last]):
            places: list[int | None] = [*range(batch.num_rows)] if unequal else []
            while unequal and (batch is last or unequal[0].number - above <= done + len(places)):
                row = unequal.pop(0)
                if not row.text.strip():
                    above += 1
                    continue
                place = row.number - above
                places.insert(place - done, None)
                damaged[place] = f"has {row.actual_columns} cells for {len(self.names)} columns"
                self._unequal.add(place)
            found = batch.take(pa.array(places, pa.int64())) if None in places else batch
            done += found.num_rows
            found = found.rename_columns([*names])
            yield _with_gaps(found, kept) if kept else found
        if may_be_open and self._ends_in_quotes():
            where = f"{self.path}: {self.row(done - 1)}"
            raise DataError(f"{where}: a quote is not closed up to the end of the file")

    def _has_odd_quotes(self) -> bool:
        """Return whether the number of quotes is odd.

        Raise UnicodeDecodeError for a text that is not UTF-8: pyarrow would print a traceback.
        """
        with self.path.open("rb") as file:
            blocks = iter(lambda: file.read(_BYTES), b"")
            return sum(text.count('"') for text in codecs.iterdecode(blocks, "utf-8")) % 2 == 1

    def _ends_in_quotes(self) -> bool:
        """Return whether a quote at the beginning of a cell is not closed; others are signs."""
        limit, last = python_csv.field_size_limit(sys.maxsize), list[str]()
        with self.path.open(encoding="utf-8", newline="") as file:
            end = itertools.chain(file, ["\n", "end\n"])  # part of a cell that is still open
            for row in python_csv.reader(end, delimiter=self.separator):
                last = row
        python_csv.field_size_limit(limit)
        return last != ["end"]


def _with_gaps(batch: Batch, kept: Collection[str]) -> Batch:
    """Return a batch with gaps in place of texts that are no value, but in columns `kept`."""
    for place, name in enumerate(batch.schema.names):
        if name not in kept:
            is_gap = compute.is_in(batch.column(place), pa.array([*MISSING]))
            cells = compute.if_else(is_gap, None, batch.column(place))
            batch = batch.set_column(place, name, cells)
    return batch


def _but_blank(batches: Iterator[Batch], blank: int) -> Iterator[tuple[Batch, bool]]:
    """Yield batches without the last `blank` rows, and whether each has the last row."""
    held = list[Batch]()
    for batch in batches:
        held.append(batch)
        while sum(each.num_rows for each in held[1:]) > blank:
            yield held.pop(0), False
    rest = pa.Table.from_batches(held)
    for batch in rest.slice(0, rest.num_rows - blank).combine_chunks().to_batches():
        yield batch, True


def _how(separator: str, odd: list[Any]) -> Any:
    """Return how pyarrow finds cells; rows with too few or too many come into `odd`."""

    def left_out(row: Any) -> str:
        odd.append(row)
        return "skip"

    return csv.ParseOptions(
        delimiter=separator, newlines_in_values=True, invalid_row_handler=left_out
    )


def _header(head: bytes, separator: str) -> tuple[bool, int, list[str]]:
    """Return whether the first row has several cells, as many as the header, and the header."""
    odd, names, read = list[Any](), list[str](), csv.ReadOptions(use_threads=False)
    with contextlib.suppress(pa.ArrowInvalid):
        names += csv.read_csv(pa.py_buffer(head + b"\n"), read, _how(separator, odd)).column_names
    fits = separator == SEPARATORS[0] or all(row.number != 2 for row in odd)
    return fits and len(names) > 1, len(names), names


_KINDS: dict[str, Callable[[Path], Table]] = {
    ".csv": _Csv,
    ".npz": _npz,
    ".parquet": _Parquet,
    ".tsv": _Csv,
}
SUFFIXES = (*_KINDS,)
"""The suffixes of files that are tables."""
