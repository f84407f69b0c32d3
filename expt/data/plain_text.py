"""Text files: each is UTF-8, or is refused."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from expt.errors import DataError

_HEAD = 4096
"""Bytes in which a text without a zero byte is no UTF-16: that has one beside each Latin letter."""


@contextlib.contextmanager
def opened(path: Path, encoding: str = "utf-8") -> Iterator[TextIO]:
    """Open a text, its line ends as they are. Raise DataError at the first byte that is none."""
    with path.open("rb") as file:
        if (at := file.read(_HEAD).find(b"\0")) >= 0:
            raise _refused(path, at, 1, "utf-16")
    with path.open(encoding=encoding, newline="") as text:
        try:
            yield text
        except UnicodeDecodeError as error:
            raise _not_utf8(path) or error from None


def _not_utf8(path: Path) -> DataError | None:
    """Find the byte: a decoder counts from the begin of what it was given."""
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                is_wide = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                encoding = "utf-16" if number == 1 and is_wide else "latin1"
                return _refused(path, start + error.start, number, encoding)
            start += len(line)
    return None


def _refused(path: Path, at: int, line: int, encoding: str) -> DataError:
    fix = f"iconv -f {encoding} -t utf8 {path.name} > utf8_{path.name}"
    return DataError(
        f"{path}: is not UTF-8 at byte {at}, in line {line}; convert it, such as {fix}"
    )
