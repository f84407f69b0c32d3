"""Tables that name pictures: a list of their labels, a file of their groups.

A name is the end of a path, with its suffix or without.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from expt.data.checksums import state_of
from expt.data.columns import check_learnable, texts_of
from expt.data.folders import files_below, parts_there
from expt.data.pictures import picture_suffixes
from expt.data.plain_text import composed
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


class NamedPictures:
    """Pictures below a folder, found by the names that a table may give them."""

    def __init__(self, root: str, files: Sequence[str]) -> None:
        below = functools.cache(functools.partial(os.path.relpath, start=root))
        parts = map(os.path.split, files)
        paths = [os.path.join(below(folder or "."), name) for folder, name in parts]
        self.files, self.paths = files, [composed(path.removeprefix("./")) for path in paths]
        self._places = collections.defaultdict[str, list[int]](list)
        for place, path in enumerate(self.paths):
            for name in {os.path.basename(path), os.path.splitext(os.path.basename(path))[0]}:
                self._places[name].append(place)

    def find(self, name: str) -> list[int]:
        """Return the places of the pictures that `name` may mean, with its suffix or without.

        It may be a path from the root, from a folder below it or from one above it.
        """
        wanted = composed(os.path.normpath(name.strip().replace("\\", "/")))
        found = list[tuple[bool, int]]()
        for place in self._places.get(os.path.basename(wanted), ()):
            path = self.paths[place]
            if os.path.basename(path) != os.path.basename(wanted):
                path = os.path.splitext(path)[0]
            if f"/{path}".endswith(f"/{wanted}") or f"/{wanted}".endswith(f"/{path}"):
                found.append((path == wanted, place))
        exact = any(is_exact for is_exact, _ in found)
        return [place for is_exact, place in found if is_exact or not exact]

    def rows_of(self, names: Sequence[str], at: str) -> tuple[dict[int, int], list[str]]:
        """Return the row of each place whose picture is named, and the names of no picture.

        Raise DataError where a name is that of several pictures, or two rows name one picture.
        """
        row_of, missing = dict[int, int](), list[str]()
        for row, name in enumerate(names):
            if (place := self.place(name, f"{at}: row {row + 1}")) is None:
                missing.append(name or "an empty cell")
            elif row_of.setdefault(place, row) != row:
                twice = f"rows {row_of[place] + 1} and {row + 1}"
                raise DataError(f"{at}: {twice} both name {self.paths[place]}; keep one")
        return row_of, missing

    def place(self, name: str, at: str) -> int | None:
        """Return the place of the picture, or None. Raise DataError where it may be several."""
        places = self.find(name) if name else []
        if len(places) > 1:
            several = " and ".join(self.paths[place] for place in places[:2])
            fix = "name the folder of one by dataset.root, or write its path into the table"
            raise DataError(f"{at}: {name} may be {several}; {fix}")
        return places[0] if places else None

    def column_in(self, head: Mapping[str, Sequence[str]], at: str) -> str | None:
        """Return the column whose first texts name most pictures; with suffixes, if one has them.

        Each picture counts once: else a column of classes 0 to 9 would count each row for one of
        ten. Raise DataError where another column, such as one that counts the rows, may be it.
        """
        names, found = {*map(os.path.basename, self.paths)}, dict[str, tuple[bool, int]]()
        rows = dict[str, list[tuple[int, ...]]]()
        for column, texts in head.items():
            there = {text: tuple(self.find(text)) for text in {*texts} - {""}}
            wholes = (text.replace("\\", "/") for text, places in there.items() if places)
            is_whole = any(os.path.basename(text) in names for text in wholes)
            found[column] = is_whole, len({*there.values()} - {()})
            rows[column] = [there.get(text, ()) for text in texts]
        best = max(found, key=found.__getitem__, default="")
        if not best or not found[best][1]:
            return None
        for column, (is_whole, number) in found.items():
            differs = any(x and y and x != y for x, y in zip(rows[column], rows[best], strict=True))
            are_ids = sum(map(bool, rows[column])) == number > max(1, len(rows[column]) / 2)
            if differs and are_ids and is_whole == found[best][0]:
                fault = f"columns {best} and {column} both name pictures, each in other rows"
                raise DataError(f"{at}: {fault}; remove one, or write names with their suffix")
        return best


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
        none = absent(Path(labels), "file")
        if above.is_file():
            none = f"there is no such file. Did you mean '{above}'?"
        raise ConfigError(f"dataset.labels={labels}: {none}")
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
    at, table, pictures = f"dataset.labels={path}", open_table(path), NamedPictures(root, every)
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
    parts = (cell.split(sign) if cell.strip() not in known else [cell] for cell in cells)
    several = [{x.strip() for x in each} - {""} for each in parts]
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
    pictures = NamedPictures(root, files_below(root, picture_suffixes()) if files else ())
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


def groups_of(
    file: str, root: str, parts: Mapping[str, Sequence[str]], *, learns: bool
) -> tuple[dict[str, list[int]], list[str]]:
    """Return the number of the group of each picture, of parts whose pictures all have one.

    Also return notes on parts where only some have. Raise ConfigError for another kind of file,
    DataError where it does not name all pictures to learn from, or two groups for one.
    """
    pictures = NamedPictures(root, [*itertools.chain(*parts.values())])
    known = _groups_in(file, pictures)
    every = iter(range(len(pictures.files)))
    found, notes = dict[str, list[int]](), list[str]()
    for part, paths in parts.items():
        places = [*itertools.islice(every, len(paths))]
        if not (without := [place for place in places if place not in known]):
            found[part] = [known[place] for place in places]
            continue
        must = learns and part == "train"
        first = os.path.relpath(pictures.files[without[0]], root)
        where = f"{len(paths)} {'training' if must else part} pictures, such as {first}"
        lacks = f"has no line for {len(without)} of {where}"
        if must:
            fix = f"give each one, by its path below {root}"
            raise DataError(f"dataset.group={file}: {lacks}; {fix}")
        if len(without) < len(paths):
            notes.append(f"{file} {lacks}; the groups of {part} are not looked at")
    return found, notes


def _groups_in(file: str, pictures: NamedPictures) -> dict[int, int]:
    """Return the number of the group of each picture, by its place.

    Lines of other pictures count, too: held out groups stay as they are where files come or go.
    """
    at = f"dataset.group={file}"
    if not os.path.isfile(file):
        raise ConfigError(f"{at}: there is no such file; give a table of groups")
    table, found, numbers = open_table(Path(file)), dict[int, int](), dict[str, int]()
    head = head_of(table)
    others = {name: texts for name, texts in head.items() if name != "group"}
    if (column := pictures.column_in(others, at)) is None:
        return {}
    columns = [column, _group_column(at, column, [*head])]
    for batch in table.batches(columns):
        for name, group in zip(*(texts_of(batch.column(x)) for x in columns), strict=True):
            group = group.strip()
            number = numbers.setdefault(group, len(numbers))
            if (place := pictures.place(name, at)) is None:
                continue
            if not group or found.setdefault(place, number) != number:
                groups = "two groups" if group else "no group"
                raise DataError(f"{at}: gives {name} {groups}; give it one")
    return found


def _group_column(at: str, column: str, names: Sequence[str]) -> str:
    others = [name for name in names if name != column]
    if "group" in others:
        return "group"
    if len(others) != 1:
        has = listed(others) or "none"
        raise ConfigError(f"{at}: has no column group next to {column}, but {has}; name it group")
    return others[0]
