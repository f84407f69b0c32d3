"""Files that are whole at every moment."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str, *, may_exist: bool = True) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the new one, never a part.

    Raises FileExistsError where there is an old one, and none `may_exist`.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if may_exist:
            beside.replace(path)
        else:
            take_name(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def take_name(beside: Path, path: Path) -> None:
    """Give the file `beside` its name. Raises FileExistsError where there is one of that name."""
    try:
        path.hardlink_to(beside)  # unlike a rename it replaces nothing
    except FileExistsError:
        raise
    except OSError:  # a disk without hard links: the folder's lock has to do
        if path.exists():
            raise FileExistsError(path) from None
        beside.replace(path)
