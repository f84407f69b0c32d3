"""Where a command prints to: it may be closed, or know only ASCII."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence

PRINTING = {"preflight=true", "hydra.launcher.dry_run=true"}
"""Words of a command that does nothing but print."""
_IN_ASCII = {"≥": ">=", "≤": "<=", "±": "+-", "…": "..."}


def prepare() -> None:
    """Let the three standard streams be there, and take any text.

    To be called before any file is opened.
    """
    _open_closed()
    codecs.register_error("expt", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="expt")


@contextlib.contextmanager
def quietly(arguments: Sequence[str]) -> Iterator[list[str]]:
    """The arguments without `-q`; while entered, that keeps all but errors and warnings from being
    printed.

    What a command prints that does nothing else was asked for, and is printed.
    """
    words = [word for word in arguments if word not in ("-q", "--quiet")]
    with contextlib.ExitStack() as quiet:
        if len(words) < len(arguments) and not PRINTING & {*words}:
            quiet.enter_context(_shown_nowhere())
            quiet.enter_context(
                contextlib.redirect_stdout(quiet.enter_context(open(os.devnull, "w")))
            )
        yield words


def _shown_nowhere() -> contextlib.AbstractContextManager[object]:
    """While entered, a notebook shows nothing of what rich prints: it does not go through stdout
    there.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return contextlib.nullcontext()
    from IPython.utils.capture import capture_output

    captured: contextlib.AbstractContextManager[object] = capture_output(
        stdout=False, stderr=False, display=True
    )
    return captured


def _open_closed() -> None:
    """In a shell `>&-` closes a stream; the next file that is opened would get its number, and what
    is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # the lowest number that is free
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(character, "?") for character in text), error.end
