"""Files that are whole at every moment, and JSON as every program reads it."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

# JSON has no words for numbers that are not finite: nan is null, and infinity a number beyond what
# a float holds, which is read as such. The words stand for them while all else is written.
_INFINITE = {"\0inf": "1e999", "\0-inf": "-1e999"}


def write_atomically(path: Path, text: str, *, may_exist: bool = True) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the new one, never a part.

    Raises FileExistsError where there is an old one and none `may_exist`.
    """
    with written(path, may_exist=may_exist) as file:
        file.write(text.encode())


@contextlib.contextmanager
def written(path: Path, *, may_exist: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that takes the name `path` if the block ends well, and is removed if not.

    Raises FileExistsError then where there is an old one and none `may_exist`.
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


def dumps(content: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """Return `content` as JSON."""
    try:
        return json.dumps(content, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:
        plain = _without_infinite(content)
        text = json.dumps(plain, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
        for word, number in _INFINITE.items():
            text = text.replace(json.dumps(word), number)
        return text


def _without_infinite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_infinite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_infinite(value) for value in content]
    if not isinstance(content, float) or math.isfinite(content):
        return content
    return None if math.isnan(content) else f"\0{content}"
