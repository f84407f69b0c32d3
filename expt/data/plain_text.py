"""Text files: each is UTF-8, or is refused."""

from __future__ import annotations

import codecs
import contextlib
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from expt.errors import DataError

_HEAD = 4096
"""Bytes in which a text without a zero byte is not UTF-16, which has one in each Latin letter."""
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # begins with UTF-16's
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

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
            raise DataError(f"{path}: {fault.format(shlex.quote(str(path)))}")
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
    """Return the error for a file that is not UTF-8: where, and a command that mends it."""
    content = path.read_bytes()
    at, marks = content.find(b"\0", 0, _HEAD), [*filter(content.startswith, _MARKS)]
    if marks:
        encoding, at = _MARKS[marks[0]], max(at, 0)
    elif at < 0:
        encoding = "windows-1252"  # latin1 and, where that has no letters, more of them
        try:
            content.decode()
        except UnicodeDecodeError as error:
            at = error.start
    elif content.count(b"\0") >= len(content) / 4:
        encoding = "utf-16"
    else:
        encoding = ""
    fault, fix, new = "is not UTF-8", f"convert it, such as iconv -f {encoding} -t utf8", "utf8"
    if not encoding:
        fault, fix, new = "holds a zero byte", "remove it, such as tr -d '\\000' <", "clean"
    line = content.count(b"\n", 0, at) + 1
    old, made = (shlex.quote(str(each)) for each in (path, path.with_name(f"{new}_{path.name}")))
    return DataError(f"{path}: {fault} at byte {at}, in line {line}; {fix} {old} > {made}")


def composed(text: str) -> str:
    """Return a text with each accent in its letter: a Mac writes them one after the other."""
    return unicodedata.normalize("NFC", text)
