"""Text files: each is UTF-8, or is refused."""

from __future__ import annotations

import codecs
import contextlib
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from expt.errors import DataError

_HEAD = 4096
"""Bytes in which a text without a zero byte is not UTF-16, which has one in each Latin letter."""

_PACKED = {
    b"\x1f\x8b": "is compressed; unpack it, e.g. gunzip --keep {}",
    b"PK\3\4": "is a zip archive, as an Excel file is; unpack it, or save it as a UTF-8 text",
}


def head_of(path: Path) -> bytes:
    """Return how a file begins. Raise DataError where it is packed."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    for begin, fault in _PACKED.items():
        if head.startswith(begin):
            raise DataError(f"{path}: {fault.format(path.name)}")
    return head


@contextlib.contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Open a text, its line ends as they are. Raise DataError at the first byte that is none."""
    if b"\0" in head_of(path):
        raise not_utf8(path)
    with path.open(encoding="utf-8", newline="") as text:
        try:
            yield text
        except UnicodeDecodeError:
            raise not_utf8(path) from None


@contextlib.contextmanager
def refuse_unreadable(path: object) -> Iterator[None]:
    """Raise DataError where the system does not let a file be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error


def not_utf8(path: Path) -> DataError:
    """Return the error for a file that is not UTF-8: where, and a command that converts it."""
    content, encoding = path.read_bytes(), "utf-16"
    at = content.find(b"\0", 0, _HEAD)
    if at >= 0 and content.count(b"\0") < len(content) / 4:
        line, name = content.count(b"\n", 0, at) + 1, path.name
        fix = f"remove it, such as tr -d '\\000' < {name} > clean_{name}"
        return DataError(f"{path}: holds a zero byte at byte {at}, in line {line}; {fix}")
    if at < 0:
        try:
            content.decode()
        except UnicodeDecodeError as error:
            at = error.start
        if not content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            encoding = "windows-1252"  # latin1 and, where that has no letters, more of them
    if content.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        encoding = "utf-32"
    fix = f"iconv -f {encoding} -t utf8 {path.name} > utf8_{path.name}"
    line = content.count(b"\n", 0, at) + 1
    return DataError(
        f"{path}: is not UTF-8 at byte {at}, in line {line}; convert it, such as {fix}"
    )


def composed(text: str) -> str:
    """Return a text with each accent in its letter: a Mac writes them one after the other."""
    return unicodedata.normalize("NFC", text)
