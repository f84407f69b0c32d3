"""Where a command prints to: it may be closed, or know only ASCII."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_IN_ASCII = {"≥": ">=", "≤": "<=", "±": "+-", "…": "..."}


def prepare() -> None:
    """Open the standard streams that are closed, and let them take any text.

    To be called before any file is opened.
    """
    _open_closed()
    codecs.register_error("expt", _in_ascii)
    if isinstance(error := sys.__stderr__, io.TextIOWrapper) and error is sys.stderr:
        file = io.BufferedWriter(_Lossy(error.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(file, error.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="expt")


class _Lossy(io.FileIO):
    """A stderr whose lines are lost where it is full or closed, and nothing else is."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def console(*, quiet: bool) -> Console:
    """Return the terminal; with `quiet` one that prints nothing."""
    from rich.console import Console  # late: takes 20 ms

    from expt.runs.view.text import Terminal

    return Console(file=io.StringIO(), quiet=True) if quiet else Terminal()


def unwritten() -> str:
    """Return why nothing can be printed any more, after an empty line; from then on all is lost."""
    try:
        print(flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return f"the output could not be written: {error.strerror}"
    return ""


def _open_closed() -> None:
    """Open what `>&-` closed: the next file would get its number, and what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest number that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(character, "?") for character in text), error.end
