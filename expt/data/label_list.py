"""Labels of pictures in a list: a table that names each picture, its class, labels or numbers."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from expt.data.checksums import state_of
from expt.data.columns import check_learnable, texts_of
from expt.data.folders import files_below, parts_there
from expt.data.picture_names import Pictures
from expt.data.pictures import picture_suffixes
from expt.data.rows import Rows, Wanted, read_rows, rows_of, targets_as_trained
from expt.data.table_files import SUFFIXES, Table, open_table
from expt.errors import ConfigError, DataError, ExptError, absent, did_you_mean, listed
from expt.features import Anything, Classes, Features, Labels
from expt.late import pa

_HEAD = 1000
"""Rows that show which column names pictures."""
_ON = frozenset(("0", "1", "0.0", "1.0", "true", "false", "yes", "no"))
_SEPARATORS = "|;,"
"""Characters between the labels of a cell; blanks where no cell has one of them."""


class Listed(NamedTuple):
    """A list of labels, and the pictures that it names."""

    table: Table
    column: str
    """the column of pictures"""
    files: Mapping[str, list[str]]
    """the pictures of each part that have a label"""
    rows: Mapping[str, list[int]]
    """the row of each of them"""
    notes: Sequence[str]
    """warnings of missing pictures and missing labels"""


class _Chosen(Table):
    """Some rows of a list."""

    key_of_targets = "dataset.target"

    def __init__(self, path: Path, columns: Any, rows: Sequence[int]) -> None:
        super().__init__(path, columns.column_names)
        self._columns, self._rows = columns.take(rows), rows

    def row(self, number: int) -> str:
        return f"row {self._rows[number] + 1}"

    def _batches(self, names: Sequence[str], damaged: dict[int, str]) -> Iterator[Any]:
        yield from self._columns.select([*names]).combine_chunks().to_batches()


def path_of(labels: str, root: str) -> Path:
    """Return the file of a list, which may lie in `root`. Raise ConfigError for another kind."""
    path = Path(labels) if os.path.isfile(labels) else Path(root, labels)
    if not labels.lower().endswith(SUFFIXES):
        kinds = ", ".join(SUFFIXES)
        raise ConfigError(f"dataset.labels={labels}: is no table of labels ({kinds}); give one")
    if not path.is_file():
        above = Path(root).parent / labels
        near = f" Did you mean '{above}'?" if above.is_file() else ""
        raise ConfigError(f"dataset.labels={labels}: {absent(Path(labels), 'file')}{near}")
    return path


def match(labels: str, root: str, splits: tuple[str, ...] | None) -> Listed:
    """Return the pictures below `root` that the list names, by their parts.

    Raise ConfigError for another kind of file, DataError where it names none of the pictures, or
    several by one name, or one twice.
    """
    path, files = path_of(labels, root), tuple(files_below(root, picture_suffixes()))
    return _match(path, tuple(state_of(path)), root, files, splits)


@functools.lru_cache(maxsize=1)  # all questions of a start are about the same files
def _match(
    path: Path, state: Any, root: str, every: Sequence[str], splits: Sequence[str] | None
) -> Listed:
    if not every:
        none = absent(Path(root), "folder")
        raise DataError(
            f"dataset.root={root}: {'holds no pictures' if os.path.isdir(root) else none}"
        )
    at, table, pictures = f"dataset.labels={path}", open_table(path), Pictures(root, every)
    if (column := pictures.column_in(head_of(table), at)) is None:
        few = f"{len(every)} pictures, such as {listed(pictures.paths, 1)}"
        where = f"no column names pictures in dataset.root={root}, which has {few}"
        raise DataError(f"{at}: {where}; name the folder that has them by dataset.root")
    if pictures.find(column):
        raise DataError(f"{at}: its first line names {column}; put the names of columns above it")
    row_of, missing = pictures.rows_of(_texts(_read(table, [column])), at)
    parts = dict[str, list[int]]()
    for part, folder in parts_there(root, splits).items():
        start = "" if folder == Path(root) else f"{os.path.relpath(folder, root)}{os.sep}"
        if inside := [place for place in sorted(row_of) if pictures.paths[place].startswith(start)]:
            parts[part] = inside
    taken = set[int]().union(*parts.values())
    counts = {
        f"rows without a picture in {root}": missing,
        f"pictures in {root} without a label": [
            name for place, name in enumerate(pictures.paths) if place not in row_of
        ],
        f"labelled pictures in no chosen part of {root}": [
            pictures.paths[place]
            for place in row_of
            if place not in taken and not (parts and splits)
        ],
    }
    notes = [f"{path}: {x}: {len(y)}, as {listed(y, 3)}" for x, y in counts.items() if y]
    if not parts:
        raise DataError(f"{at}: {notes[-1]}")
    files = {part: [every[place] for place in places] for part, places in parts.items()}
    rows = {part: [row_of[place] for place in places] for part, places in parts.items()}
    return Listed(table, column, files, rows, notes)


def _read(table: Table, names: Sequence[str]) -> Any:
    if not (batches := [*table.batches(names)]):
        raise DataError(f"{table.path}: has no rows; give it some")
    return pa.Table.from_batches(batches)


def _texts(columns: Any) -> list[str]:
    """Return the only column as texts."""
    return texts_of(columns.combine_chunks().column(0).chunk(0))


def head_of(table: Table, most: int | None = _HEAD) -> dict[str, list[str]]:
    """Return the first cells of the columns, but for the index of pandas, as texts."""
    names = [name for name in table.names if name not in table.index] or table.names
    batch = next(table.batches(names), None)
    return {} if batch is None else {x: texts_of(batch.column(x)[:most]) for x in names}


def answers_of(
    found: Listed,
    target: Sequence[str],
    takes: Any,
    trained_on: Features | None = None,
    *,
    learns: bool = True,
) -> Rows:
    """Return the targets of the pictures, part by part, as a task `takes` them, without features.

    They are the columns `target`, or those of a run, or all but that of pictures; for labels a
    single column may hold several texts. Raise ConfigError or DataError for other columns.
    """
    table, known = found.table, trained_on.targets if trained_on else None
    others = [x for x in table.names if x != found.column and x not in table.index]
    of_run = [*known.columns] if known and {*known.columns} <= {*others} else []
    names = [*target] or of_run or others
    if missing := [name for name in names if name not in others]:
        has = f"{table.path} has {listed(others)} next to {found.column}"
        raise ConfigError(f"dataset.target={missing[0]}: {has}.{did_you_mean(missing[0], others)}")
    if not names or (len(names) > 1 and not target and takes is not Labels):
        has = f"has {listed(names) or 'nothing'} next to {found.column}, which names pictures"
        fix = f"name one to predict, e.g. dataset.target={names[0]}" if names else "add labels"
        raise ConfigError(f"dataset.labels={table.path}: {has}; {fix}")
    columns = _read(table, names)
    if takes is Labels and len(names) == 1:
        columns = _as_labels(table.path, columns, known.names if known else ())
    part = _Chosen(table.path, columns, [row for rows in found.rows.values() for row in rows])
    takes = Classes if takes is Anything else takes
    wanted = Wanted(tuple(columns.column_names), (), takes, limit=1 if learns else None)
    with tempfile.TemporaryFile() as file:
        rows = rows_of(*read_rows(part, wanted, file), file)
    if rows.class_names and learns:
        check_learnable(table.path, names[0], rows.targets[:], rows.class_names, "dataset.target")
    return targets_as_trained(known, rows, "dataset.target") if known else rows


def separator_of(cells: Collection[str]) -> str | None:
    """Return the sign between the labels in cells of several; None for blanks."""
    return next((sign for sign in _SEPARATORS if any(sign in cell for cell in cells)), None)


def _as_labels(path: Path, column: Any, known: Sequence[str]) -> Any:
    """Return a column of 0 and 1 for each label in cells of several, or for those `known`."""
    cells = _texts(column)
    if {text.strip().casefold() for text in cells} <= _ON:
        return column
    if found := next((cell for cell in cells if cell.startswith("[")), None):
        fix = "write its labels as a text with | between them, such as by pandas' .str.join('|')"
        raise DataError(f"{path}: column {column.column_names[0]}: {found} is a list; {fix}")
    sign = separator_of(cells)
    several = [{x.strip() for x in cell.split(sign)} - {""} for cell in cells]
    every = set[str]().union(*several)
    names = [*known] or sorted(every, key=lambda x: (x.isdecimal() and int(x), x))
    if unknown := sorted(every.difference(names)):
        fault = f"the run does not know the label {listed(unknown)}, only {listed(names)}"
        raise DataError(f"{path}: {fault}; correct it, or remove the row")
    return pa.table({name: pa.array([float(name in x) for x in several]) for name in names})


def proposed(root: str, classes: Mapping[str, int], but: str | None) -> tuple[str, bool]:
    """Return words to train on a list next to pictures, if their `classes` by folders differ.

    Also return whether all pictures that it names are of one class. A list that tells the same
    classes apart, or has only names, or names few, is none; nor is the file `but`.
    """
    near = [Path(root)] if classes else [Path(root), Path(root).absolute().parent]
    files = [file for folder in near for file in sorted(folder.glob("*.[ct]sv"))]
    pictures = Pictures(root, files_below(root, picture_suffixes()) if files else ())
    for file in files:
        try:
            cells = head_of(open_table(file), None) if str(file) != but else {}
            first = {name: texts[:_HEAD] for name, texts in cells.items()}
            column = pictures.column_in(first, str(file))
        except ExptError:
            continue
        if column is None:
            continue
        places = [pictures.find(name) if name else [] for name in cells.pop(column)]
        found = [[pictures.files[x] for x in several] for several in places if several]
        kinds = [{classes.get(os.path.normpath(path), 0) for path in paths} for paths in found]
        folders = set.intersection(*({*map(os.path.dirname, paths)} for paths in found))
        there = [x for x in pictures.files if os.path.dirname(x) in folders] or pictures.files
        if 2 * len(found) < len(there):
            continue  # numbers of rows may be names of pictures, too
        number, labels = len(set().union(*kinds)), [min(kind) for kind in kinds]
        named = {x: [y for y, z in zip(cells[x], places, strict=True) if z] for x in cells}
        telling = {x: each for x, each in named.items() if len({*each}) > 1}
        is_one = bool(set.intersection(*kinds))
        agrees = (
            len({*zip(each, labels, strict=True)}) == len({*each}) == number
            for each in telling.values()
        )
        if telling and (is_one or not any(agrees)):
            from expt.config.constraints import typed
            from expt.runs.overrides import joined  # late: it imports all datasets

            words = {"dataset.labels": str(file), "dataset.target": next(iter(telling))}
            if max(map(len, found)) > 1 and len(folders) == 1:  # by one name in several folders
                words = {"dataset.root": folders.pop(), **words}
            if len(cells) == 1:
                del words["dataset.target"]
            return joined([f"{key}={typed(word)}" for key, word in words.items()]), is_one
    return "", False
