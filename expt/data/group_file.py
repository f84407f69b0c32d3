"""The groups of pictures in a folder, by a table that names each picture and its group."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from expt.data.columns import texts_of
from expt.data.label_list import head_of
from expt.data.picture_names import Pictures
from expt.data.table_files import open_table
from expt.errors import ConfigError, DataError, listed


def groups_of(
    file: str, root: str, parts: Mapping[str, Sequence[str]], *, learns: bool
) -> dict[str, list[int]]:
    """Return the number of the group of each picture in the parts; -1 where `file` has no line.

    See Pictures for the names that it may give them. Raise ConfigError for another kind of file,
    DataError where it does not name all pictures to learn from, or two groups for one.
    """
    pictures = Pictures(root, [*itertools.chain(*parts.values())])
    known = _read(file, pictures)
    every = iter(range(len(pictures.files)))
    found = {
        part: [known.get(place, -1) for place in itertools.islice(every, len(paths))]
        for part, paths in parts.items()
    }
    if learns and -1 in (numbers := found.get("train", [])):
        problem = without_line("training", numbers, parts["train"], root)
        fix = f"give each one, by its path below {root}"
        raise DataError(f"dataset.group={file}: {problem}; {fix}")
    return found


def without_line(kind: str, groups: Sequence[int], paths: Sequence[str], root: str) -> str:
    """Return how many pictures have no group, and the first."""
    first = os.path.relpath(paths[groups.index(-1)], root)
    return f"has no line for {groups.count(-1)} of {len(paths)} {kind} pictures, such as {first}"


def _read(file: str, pictures: Pictures) -> dict[int, int]:
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
        pairs = zip(*(texts_of(batch.column(name)) for name in columns), strict=True)
        for name, group in pairs:
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
