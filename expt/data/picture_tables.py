"""Tables that name pictures: a list of their labels, a file of their groups.

A name is the end of a path, with its suffix or without.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from expt.config.constraints import typed
from expt.data.checksums import state_of
from expt.data.columns import check_learnable, texts_of
from expt.data.folders import files_below, parts_there
from expt.data.pictures import picture_suffixes
from expt.data.plain_text import composed
from expt.data.rows import Rows, Wanted, read_rows, rows_of, targets_as_trained
from expt.data.table_files import SUFFIXES, Damaged, Table, Uses, open_table
from expt.errors import ConfigError, DataError, ExptError, absent, did_you_mean, listed
from expt.features import Anything, Classes, Feature, Features, Labels, Numbers
from expt.late import pa

_HEAD = 1000
"""Rows that show which column names pictures."""
_ON = frozenset(("0", "1", "0.0", "1.0", "true", "false", "yes", "no"))
_SEPARATORS = "|;,"
"""Characters between the labels of a cell; blanks where no cell has one of them."""


class NamedPictures:
    """Pictures below a folder, found by the names that a table may give them.

    A picture is known by its place in `files`; `paths` are those from the root.
    """

    def __init__(self, root: str, files: Sequence[str]) -> None:
        below = functools.cache(functools.partial(os.path.relpath, start=root))
        parts = map(os.path.split, files)
        paths = [os.path.join(below(folder or "."), name) for folder, name in parts]
        self.files, self.paths = files, [composed(path.removeprefix("./")) for path in paths]
        self._names = {*map(os.path.basename, self.paths)}
        self._places = collections.defaultdict[str, list[int]](list)
        for place, name in enumerate(map(os.path.basename, self.paths)):
            for spelled in {name, os.path.splitext(name)[0]}:
                self._places[spelled].append(place)

    def find(self, name: str) -> list[int]:
        """Return the places of the pictures that `name` may mean, with its suffix or without.

        It may be a path from the root, from a folder below it or from one above it.
        """
        wanted = composed(os.path.normpath(name.strip().replace("\\", "/")))
        last, exact, near = os.path.basename(wanted), list[int](), list[int]()
        for place in self._places.get(last, ()):
            path = self.paths[place]
            if os.path.basename(path) != last:
                path = os.path.splitext(path)[0]
            if path == wanted:
                exact.append(place)
            elif path.endswith(f"/{wanted}") or wanted.endswith(f"/{path}"):
                near.append(place)
        return exact or near

    def place(self, name: str, at: str) -> int | None:
        """Return the place of the picture, or None. Raise DataError where it may be several."""
        places = self.find(name)
        if len(places) > 1:
            several = " and ".join(self.paths[place] for place in places[:2])
            fix = "name the folder of one by dataset.root, or write its path into the table"
            raise DataError(f"{at}: {name} may be {several}; {fix}")
        return places[0] if places else None

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

    def column_in(self, head: Mapping[str, Sequence[str]], at: str) -> str | None:
        """Return the column whose first texts name most pictures; with suffixes, if one has them.

        Raise DataError where another column, such as one that counts the rows, may be it.
        """
        find = functools.cache(lambda text: tuple(self.find(text)))
        rows = {column: [*map(find, texts)] for column, texts in head.items()}
        # Each picture counts once, else classes 0 to 9 would count each row for one of ten.
        numbers = {column: len({*places} - {()}) for column, places in rows.items()}
        whole = {x: any(map(self._has_suffix, texts)) for x, texts in head.items()}
        best = max(rows, key=lambda column: (whole[column], numbers[column]), default="")
        if not best or not numbers[best]:
            return None
        for column, places in rows.items():
            differs = any(x and y and x != y for x, y in zip(places, rows[best], strict=True))
            are_ids = sum(map(bool, places)) == numbers[column] > max(1, len(places) / 2)
            if differs and are_ids and whole[column] == whole[best]:
                fault = f"columns {best} and {column} both name pictures, each in other rows"
                raise DataError(f"{at}: {fault}; remove one, or write names with their suffix")
        return best

    def _has_suffix(self, name: str) -> bool:
        """Return whether it names a picture with its suffix."""
        return os.path.basename(name.replace("\\", "/")) in self._names and bool(self.find(name))


def _head_of(table: Table, most: int | None = _HEAD) -> dict[str, list[str]]:
    """Return the first cells of the columns, but for the index of pandas, as texts."""
    names = [name for name in table.names if name not in table.index] or table.names
    batch = next(table.batches(names), None)
    return {} if batch is None else {x: texts_of(batch.column(x)[:most]) for x in names}


def _read(table: Table, names: Sequence[str]) -> Any:
    if not (batches := [*table.batches(names)]):
        raise DataError(f"{table.path}: has no rows; give it some")
    return pa.Table.from_batches(batches).combine_chunks()


def _texts(columns: Any) -> list[str]:
    """Return the only column as texts."""
    return texts_of(columns.column(0).chunk(0))


def path_of(labels: str, root: str) -> Path:
    """Return the file of a list, which may lie in `root`. Raise ConfigError for another kind."""
    path = Path(labels) if os.path.isfile(labels) else Path(root, labels)
    if not labels.lower().endswith(SUFFIXES):
        kinds = ", ".join(SUFFIXES)
        raise ConfigError(f"dataset.labels={labels}: is no table of labels ({kinds}); give one")
    if not path.is_file():
        raise ConfigError(f"dataset.labels={labels}: {absent(Path(labels), 'file')}")
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
    path: Path, state: Any, root: str, files: Sequence[str], splits: Sequence[str] | None
) -> Listed:
    if not files:
        none = "holds no pictures" if os.path.isdir(root) else absent(Path(root), "folder")
        raise DataError(f"dataset.root={root}: {none}")
    at, table, pictures = f"dataset.labels={path}", open_table(path), NamedPictures(root, files)
    column = _column_of_pictures(table, pictures, root, at)
    row_of, missing = pictures.rows_of(_texts(_read(table, [column])), at)
    parts = dict[str, dict[str, int]]()
    for part, folder in parts_there(root, splits).items():
        start = "" if folder == Path(root) else f"{os.path.relpath(folder, root)}{os.sep}"
        inside = (place for place in sorted(row_of) if pictures.paths[place].startswith(start))
        if rows := {files[place]: row_of[place] for place in inside}:
            parts[part] = rows
    taken = {*itertools.chain(*parts.values())}
    outside = [pictures.paths[place] for place in row_of if files[place] not in taken]
    unlabelled = [name for place, name in enumerate(pictures.paths) if place not in row_of]
    faults = {
        f"rows without a picture in {root}": missing,
        f"pictures in {root} without a label": unlabelled,
        f"labelled pictures in no chosen part of {root}": [] if parts and splits else outside,
    }
    notes = [f"{path}: {x}: {len(y)}, as {listed(y, 3)}" for x, y in faults.items() if y]
    if not parts:
        raise DataError(f"{at}: {notes[-1]}")
    return Listed(table, column, parts, notes)


def _column_of_pictures(table: Table, pictures: NamedPictures, root: str, at: str) -> str:
    """Return the column that names pictures. Raise DataError where none does."""
    if (column := pictures.column_in(_head_of(table), at)) is None:
        few = f"{len(pictures.files)} pictures, such as {listed(pictures.paths, 1)}"
        where = f"no column names pictures in dataset.root={root}, which has {few}"
        raise DataError(f"{at}: {where}; name the folder that has them by dataset.root")
    if pictures.find(column):
        raise DataError(f"{at}: its first line names {column}; put the names of columns above it")
    return column


class Listed(NamedTuple):
    """A list of labels, and the pictures that it names."""

    table: Table
    column: str
    """the column of pictures"""
    parts: Mapping[str, Mapping[str, int]]
    """the row of each picture that has a label, by its file, part by part"""
    notes: Sequence[str]
    """warnings of missing pictures and missing labels"""

    def answers(
        self,
        target: Sequence[str],
        takes: type[Feature],
        trained_on: Features | None = None,
        *,
        learns: bool = True,
    ) -> Rows:
        """Return the targets of all pictures as a task `takes` them, part by part, and no features.

        They are the columns `target`, or those of a run, or all but that of pictures; for labels a
        single column may hold several texts. Raise ConfigError or DataError for other columns.
        """
        path, known = self.table.path, trained_on.targets if trained_on else None
        names = self._targets(target, known.columns if known else (), takes)
        columns = _read(self.table, names)
        if takes is Labels and len(names) == 1:
            columns = _as_labels(path, columns, known.names if known else ())
        chosen = _Chosen(path, columns, [row for x in self.parts.values() for row in x.values()])
        takes = Classes if takes is Anything else takes
        wanted = Wanted(tuple(columns.column_names), (), takes, limit=1 if learns else None)
        with tempfile.TemporaryFile() as file:
            rows = rows_of(*read_rows(chosen, wanted, file), file)
        if rows.class_names and learns:
            check_learnable(path, names[0], rows.targets[:], rows.class_names, "dataset.target")
        return targets_as_trained(known, rows, "dataset.target") if known else rows

    def _targets(self, target: Sequence[str], of_run: Sequence[str], takes: Any) -> list[str]:
        """Return the columns to predict. Raise ConfigError where these are not clear, or there."""
        path, column = self.table.path, self.column
        others = [x for x in self.table.names if x != column and x not in self.table.index]
        names = [*target] or ([*of_run] if {*of_run} <= {*others} else []) or others
        if missing := [name for name in names if name not in others]:
            has = f"{path} has {listed(others)} next to {column}"
            near = did_you_mean(missing[0], others)
            raise ConfigError(f"dataset.target={missing[0]}: {has}.{near}")
        if not names or (len(names) > 1 and not target and takes not in (Labels, Numbers)):
            has = f"has {listed(names) or 'nothing'} next to {column}, which names pictures"
            fix = f"name one to predict, e.g. dataset.target={names[0]}" if names else "add labels"
            raise ConfigError(f"dataset.labels={path}: {has}; {fix}")
        return names


class _Chosen(Table):
    """Some rows of a list."""

    key_of_targets = "dataset.target"

    def __init__(self, path: Path, columns: Any, rows: Sequence[int]) -> None:
        super().__init__(path, columns.column_names)
        self._columns, self._rows = columns.take(rows), rows

    def row(self, number: int) -> str:
        return f"row {self._rows[number] + 1}"

    def _batches(self, names: Sequence[str], damaged: Damaged, uses: Uses) -> Iterator[Any]:
        yield from self._columns.select([*names]).combine_chunks().to_batches()


def separator_of(cells: Collection[str]) -> str | None:
    """Return the sign between the labels in cells of several; None for blanks."""
    return next((sign for sign in _SEPARATORS if any(sign in cell for cell in cells)), None)


def _as_labels(path: Path, column: Any, known: Sequence[str]) -> Any:
    """Return a column of 0 and 1 for each label in cells of several, or for those `known`.

    A column of 0 and 1 is a label itself.
    """
    cells = _texts(column)
    if {text.strip().casefold() for text in cells} <= _ON:
        return column
    if found := next((cell for cell in cells if cell.startswith("[")), None):
        fix = "write its labels as a text with | between them, such as by pandas' .str.join('|')"
        raise DataError(f"{path}: column {column.column_names[0]}: {found} is a list; {fix}")
    sign = separator_of(cells)
    parts = (cell.split(sign) if cell.strip() not in known else [cell] for cell in cells)
    labels = [{x.strip() for x in each} - {""} for each in parts]
    every = set[str]().union(*labels)
    names = [*known] or sorted(every, key=lambda x: (x.isdecimal() and int(x), x))
    if unknown := sorted(every.difference(names)):
        fault = f"the run does not know the label {listed(unknown)}, only {listed(names)}"
        raise DataError(f"{path}: {fault}; correct it, or remove the row")
    return pa.table({name: pa.array([float(name in x) for x in labels]) for name in names})


class Proposal(NamedTuple):
    """A list next to pictures that nobody has named."""

    words: str
    """the words that train on it"""
    is_one: bool
    """True if all pictures that it names may lie in the folder of one class"""


def proposed(root: str, classes: Mapping[str, int], but: str | None) -> Proposal | None:
    """Return a list that tells pictures apart otherwise than their `classes` by folders do.

    A list that has only names, or names few, is none; nor is the file `but`.
    """
    near = [Path(root)] if classes else [Path(root), Path(root).absolute().parent]
    files = [file for folder in near for file in sorted(folder.glob("*.[ct]sv"))]
    pictures = NamedPictures(root, files_below(root, picture_suffixes()) if files else ())
    for file in files:
        with contextlib.suppress(ExptError):  # a table of something else
            if str(file) != but and (found := _proposal(file, pictures, classes)):
                return found
    return None


def _proposal(file: Path, pictures: NamedPictures, classes: Mapping[str, int]) -> Proposal | None:
    cells = _head_of(open_table(file), None)
    head = {name: texts[:_HEAD] for name, texts in cells.items()}
    if (column := pictures.column_in(head, str(file))) is None:
        return None
    named = [pictures.find(name) for name in cells.pop(column)]
    paths = [[pictures.files[place] for place in places] for places in named if places]
    folders = set.intersection(*({*map(os.path.dirname, each)} for each in paths))
    near = [x for x in pictures.files if os.path.dirname(x) in folders] or pictures.files
    if 2 * len(paths) < len(near):
        return None  # numbers of rows may be names of pictures, too
    columns = {x: [*itertools.compress(texts, named)] for x, texts in cells.items()}
    columns = {x: texts for x, texts in columns.items() if len({*texts}) > 1}
    of_rows = [{classes.get(os.path.normpath(path), 0) for path in each} for each in paths]
    is_one = bool(set.intersection(*of_rows))
    if not columns or (not is_one and any(_agree(each, of_rows) for each in columns.values())):
        return None
    settings = {"dataset.labels": str(file)}
    if max(map(len, paths)) > 1 and len(folders) == 1:  # by one name in several folders
        settings = {"dataset.root": folders.pop(), **settings}
    if len(cells) > 1:
        settings["dataset.target"] = next(iter(columns))
    from expt.runs.overrides import joined  # late: it imports all datasets

    return Proposal(joined(f"{key}={typed(word)}" for key, word in settings.items()), is_one)


def _agree(texts: Sequence[str], of_rows: Sequence[Collection[int]]) -> bool:
    """Return whether each text stands for one of the classes that rows may have, and it alone."""
    number, pairs = len(set[int]().union(*of_rows)), {*zip(texts, map(min, of_rows), strict=True)}
    return len(pairs) == len({*texts}) == number


def groups_of(
    file: str, root: str, parts: Mapping[str, Sequence[str]], *, learns: bool
) -> tuple[dict[str, list[int]], list[str]]:
    """Return the number of the group of each picture, of parts whose pictures all have one.

    Also return notes on parts where only some have. Raise ConfigError for another kind of file,
    DataError where it does not name all pictures to learn from, or two groups for one.
    """
    group_of = _groups_in(file, NamedPictures(root, [*itertools.chain(*parts.values())]))
    found, notes = dict[str, list[int]](), list[str]()
    for part, paths in parts.items():
        if not (without := [path for path in paths if path not in group_of]):
            found[part] = [group_of[path] for path in paths]
            continue
        must = learns and part == "train"
        first = os.path.relpath(without[0], root)
        where = f"{len(paths)} {'training' if must else part} pictures, such as {first}"
        lacks = f"has no line for {len(without)} of {where}"
        if must:
            fix = f"give each one, by its path below {root}"
            raise DataError(f"dataset.group={file}: {lacks}; {fix}")
        if len(without) < len(paths):
            notes.append(f"{file} {lacks}; the groups of {part} are not looked at")
    return found, notes


def _groups_in(file: str, pictures: NamedPictures) -> dict[str, int]:
    """Return the number of the group of each picture, by its file.

    Lines of other pictures count, too: held out groups stay as they are where files come or go.
    """
    at = f"dataset.group={file}"
    if not os.path.isfile(file):
        raise ConfigError(f"{at}: there is no such file; give a table of groups")
    table, found, numbers = open_table(Path(file)), dict[str, int](), dict[str, int]()
    head = _head_of(table)
    others = {name: texts for name, texts in head.items() if name != "group"}
    if (column := pictures.column_in(others, at)) is None:
        return {}
    columns = [column, _column_of_groups(at, column, [*head])]
    for batch in table.batches(columns):
        for name, group in zip(*(texts_of(batch.column(x)) for x in columns), strict=True):
            group = group.strip()
            number = numbers.setdefault(group, len(numbers))
            if (place := pictures.place(name, at)) is None:
                continue
            if not group or found.setdefault(pictures.files[place], number) != number:
                groups = "two groups" if group else "no group"
                raise DataError(f"{at}: gives {name} {groups}; give it one")
    return found


def _column_of_groups(at: str, column: str, names: Sequence[str]) -> str:
    others = [name for name in names if name != column]
    if "group" in others:
        return "group"
    if len(others) != 1:
        has = listed(others) or "none"
        raise ConfigError(f"{at}: has no column group next to {column}, but {has}; name it group")
    return others[0]
