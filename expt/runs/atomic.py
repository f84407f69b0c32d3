"""Files that are whole at every moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def write_atomically(path: Path, text: str, *, may_exist: bool = True) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the new one, never a part.

    Raises FileExistsError where there is an old one, and none `may_exist`.
    """
    with written(path, may_exist=may_exist) as file:
        file.write(text.encode())


@contextlib.contextmanager
def written(path: Path, *, may_exist: bool = True) -> Iterator[IO[bytes]]:
    """A file to write into, which takes the name `path` where the block ends well, and is gone
    where it does not.

    Raises FileExistsError then where there is an old one, and none `may_exist`.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            yield file
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
