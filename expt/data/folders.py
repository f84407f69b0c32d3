"""What lies below a folder, through links too. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def walked(folder: str | Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """As os.walk, also into linked folders, but for those that a link lies in itself: all would be
    there again.
    """
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not _leads_back(where, name)]
        yield where, folders, names


def files_below(folder: Path, suffixes: str | tuple[str, ...]) -> list[str]:
    """The files with such names in a folder and in those below it, each folder's sorted."""
    return [
        os.path.join(where, name)
        for where, names in sorted((where, names) for where, _, names in walked(folder))
        for name in sorted(names)
        if name.lower().endswith(suffixes)
    ]


def _leads_back(where: str, name: str) -> bool:
    path = os.path.join(where, name)
    return os.path.islink(path) and Path(os.path.realpath(where)).is_relative_to(
        os.path.realpath(path)
    )
