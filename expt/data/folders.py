"""Files below a folder, and its folders train, val and test. Free of torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from expt.errors import DataError, listed, warn_once

T = TypeVar("T")
PARTS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""The names that a part's folder may have, in any case."""
_HIDDEN = (".", "__MACOSX", "@eaDir", "$RECYCLE.BIN")
"""How names begin that are not data; archives of a Mac and network drives have the others."""
_UNREADABLE = frozenset((".heic", ".heif", ".dng", ".cr2", ".cr3", ".nef", ".arw"))


def files_below(folder: str | Path, suffixes: tuple[str, ...] = ("",)) -> list[str]:
    """Return the files with such names in a folder and below it, each folder's sorted.

    Hidden files and folders are left out. Linked folders are followed, but not in circles. Warns
    of a folder that can't be read.
    """
    found = []
    for where, folders, names in os.walk(folder, onerror=_warn_of_unreadable, followlinks=True):
        folders[:] = [name for name in _shown(folders) if not _leads_back(where, name)]
        found.append((where, of_suffix(_shown(names), suffixes)))
    return [os.path.join(where, name) for where, names in sorted(found) for name in sorted(names)]


def _warn_of_unreadable(error: OSError) -> None:
    if error.filename and os.path.isdir(error.filename):
        warn_once(f"{error.filename}: {error.strerror}, so its files are left out")


def _shown(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(_HIDDEN)]


def _leads_back(where: str, name: str) -> bool:
    """Return whether it is a link to a folder that holds one of those on the way here."""
    path = os.path.join(where, name)
    if not os.path.islink(path):
        return False
    target, way = os.path.realpath(path), (Path(where), *Path(where).parents)
    return any(each.resolve().is_relative_to(target) for each in way)


def warn_of_others(root: str) -> None:
    """Warn of folders next to train, val and test, which are not read."""
    parts = parts_there(root)
    read = {path.name for path in parts.values()}
    if Path(root) not in parts.values() and (others := {*subfolders(root)} - read):
        warn_once(f"{root}: reads {listed(sorted(read))}, and leaves out {listed(sorted(others))}")


def subfolders(folder: str | Path) -> list[str]:
    """Return the names of the folders in a folder, or linked there, sorted."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in _shown(names) if os.path.isdir(os.path.join(folder, name)))


def parts_there(root: str | Path, splits: Sequence[str] | None = None) -> dict[str, Path]:
    """Return the folders of train, val and test that there are, or of those in `splits` only.

    A folder that has none of them is train itself. Raise DataError for a split that is not there.
    """
    names = {name.lower(): name for name in subfolders(root)}
    found = {
        part: Path(root) / next(names[each] for each in known if each in names)
        for part, known in PARTS.items()
        if any(each in names for each in known)
    }
    if len(found) == 1 < len(names) and not any(map(subfolders, found.values())):
        found = {}  # it is a class of that name, among others
    return chosen_parts(root, found or {"train": Path(root)}, splits)


def chosen_parts(
    root: object, found: Mapping[str, T], splits: Sequence[str] | None
) -> dict[str, T]:
    """Return the parts in `splits`, or all. Raise DataError for a split that is not there."""
    if missing := sorted({*(splits or ())}.difference(found)):
        raise DataError(f"dataset.splits: {root} has no {missing[0]}, only {', '.join(found)}")
    return {part: each for part, each in found.items() if splits is None or part in splits}


def of_suffix(paths: Iterable[str], suffixes: tuple[str, ...]) -> list[str]:
    """Return the paths with such a suffix, in any case."""
    return [path for path in paths if path.lower().endswith(suffixes)]


def left_out(paths: Iterable[str], taken: Iterable[str]) -> str:
    """Return how many of the paths are not `taken`, their suffixes, share, and first; or "".

    Those that are taken may be given as absolute paths.
    """
    every, known = {*paths}, {*taken}
    rest = sorted(path for path in every - known if os.path.abspath(path) not in known)
    if not rest:
        return ""
    suffixes = Counter(os.path.splitext(path)[1].lower() or "no suffix" for path in rest)
    each = ", ".join(f"{suffix} {number}" for suffix, number in suffixes.most_common(8))
    fix = "; save HEIC and raw pictures as JPEG or PNG" if {*suffixes} & _UNREADABLE else ""
    first = os.path.basename(rest[0]) if os.path.isabs(rest[0]) else rest[0]
    share = f"{len(rest) / len(every):.1%} of the files, such as {first}"
    return f"{len(rest)} ({each}{fix}), {share}"


def report_left_out(where: object, files: str, noun: str) -> None:
    """Warn of files that are left out, if there are any; see `left_out`."""
    if files:
        warn_once(f"{where}: left out what is no {noun}: {files}")
