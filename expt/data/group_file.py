"""The groups of pictures in a folder, by a table that names each picture and its group."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from expt.data.columns import texts_of
from expt.data.image_files import parts_there
from expt.data.plain_text import composed
from expt.data.table_files import open_table
from expt.errors import ConfigError, DataError

_COLUMNS = ("file_name", "group")


def groups_of(
    file: str, root: str, parts: Mapping[str, Sequence[str]], *, learns: bool
) -> dict[str, list[int]]:
    """Return the number of the group of each picture in the parts; -1 where `file` has no line.

    It names a picture by its path below `root`, below the part's folder, or by its name if no other
    has it. Raise ConfigError for another kind of file, DataError where it does not name all
    pictures to learn from.
    """
    known = _read(file)
    numbers = {group: place for place, group in enumerate(dict.fromkeys(known.values()))}
    folders = parts_there(root)
    names = Counter(os.path.basename(path) for paths in parts.values() for path in paths)
    found = dict[str, list[int]]()
    for part, paths in parts.items():
        found[part] = []
        for path in paths:
            name = os.path.basename(path)
            ways = [os.path.relpath(path, root), os.path.relpath(path, folders[part])]
            if names[name] == 1:
                ways.append(name)
            known_as = (known[way] for way in map(composed, ways) if way in known)
            found[part].append(numbers.get(next(known_as, ""), -1))
        if part == "train" and learns and -1 in found[part]:
            problem = without_line("training", found[part], paths, root)
            fix = f"give each one, by its path below {root}"
            raise DataError(f"dataset.group={file}: {problem}; {fix}")
    return found


def without_line(kind: str, groups: Sequence[int], paths: Sequence[str], root: str) -> str:
    """Return how many pictures have no group, and the first."""
    first = os.path.relpath(paths[groups.index(-1)], root)
    return f"has no line for {groups.count(-1)} of {len(paths)} {kind} pictures, such as {first}"


def _read(file: str) -> dict[str, str]:
    """Return the group of each path."""
    if not os.path.isfile(file):
        raise ConfigError(f"dataset.group={file}: there is no such file; give a table of groups")
    table = open_table(Path(file))
    is_named = {*_COLUMNS} <= {*table.names} or len(table.names) != 2
    columns = [*_COLUMNS] if is_named else table.names
    if missing := [name for name in columns if name not in table.names]:
        raise ConfigError(
            f"dataset.group={file}: has no column {missing[0]}; call that of the pictures' paths"
            f" {_COLUMNS[0]} and that of their groups {_COLUMNS[1]}"
        )
    found = dict[str, str]()
    for batch in table.batches(columns):
        pairs = zip(*(texts_of(batch.column(name)) for name in columns), strict=True)
        for path, group in pairs:
            path, group = os.path.normpath(path.strip()), group.strip()
            if not group or found.setdefault(composed(path), group) != group:
                groups = "two groups" if group else "no group"
                raise DataError(f"dataset.group={file}: gives {path} {groups}; give it one")
    return found
