"""The terminal of a command, which may be closed or know only ASCII; the document of `--json`."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expt.signals import ASKING

if TYPE_CHECKING:
    from expt.runs.result import Record
    from expt.runs.view.text import Console


def prepare() -> None:
    """Open the standard streams that are closed, and let them take any text.

    To be called before any file is opened.
    """
    _open_closed()
    if isinstance(error := sys.__stderr__, io.TextIOWrapper) and error is sys.stderr:
        file = io.BufferedWriter(_Lossy(error.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(file, error.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class _Lossy(io.FileIO):
    """A stderr whose lines are lost where it is full or closed, and nothing else is."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or len(data)  # None where it is full and does not block
        return len(data)


def console(*, quiet: bool) -> Console:
    """Return the terminal; with `quiet` one that prints nothing."""
    from expt.runs.view.text import Console  # late: takes 20 ms

    return Console(file=io.StringIO(), quiet=True) if quiet else Console()


_document: dict[str, Any] | None = None
"""The document that `--json` prints at the command's end; None without `--json`."""


def put(**fields: Any) -> bool:
    """Set fields in the document of `--json`; return whether there is one."""
    if _document is not None:
        _document.update(fields)
    return _document is not None


def put_runs(runs: Iterable[tuple[Path, Record]], name: str = "runs") -> None:
    """Add the records of runs as the field `name`, each with its folder."""
    if _document is None:
        return
    from expt.runs.found import LEFT_OUT  # late, as below: few commands have a document

    _document[name] = [
        {"folder": str(folder.absolute())}
        | {key: each for key, each in record.items() if key not in ("folder", *LEFT_OUT)}
        for folder, record in runs
        if record
    ]


@contextlib.contextmanager
def document(*, wanted: bool) -> Iterator[None]:
    """Print one JSON document to stdout at the end and all else to stderr, if it is `wanted`.

    So do libraries and the processes that are started meanwhile.
    """
    global _document
    if not wanted:
        yield
        return
    sys.stdout.flush()
    stdout, before = os.dup(1), sys.stdout
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    # a Ctrl-C that comes after the command is over
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)
    _document = {"exit_code": 1, "error": None, "runs": []}
    try:
        yield
    except SystemExit as error:  # of `--help`
        put(exit_code=error.code or 0)
        raise
    except BaseException as error:  # a traceback follows
        put(error={"kind": type(error).__name__, "message": str(error)})
        raise
    finally:
        for number in ASKING:  # the exit code that the document says is to stay
            signal.signal(number, signal.SIG_IGN)
        content, _document = _document, None
        sys.stdout = before
        _write(stdout, content)


def _write(stdout: int, content: dict[str, Any]) -> None:
    from expt import machine
    from expt.runs.paths import dumps

    is_another = machine.is_external_worker() and os.environ["RANK"] != "0"  # of torchrun
    try:
        with open(stdout, "w", encoding="utf-8") as file:
            file.write("" if is_another else dumps(content) + "\n")
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"error: the document could not be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def unwritten() -> str:
    """Return why nothing can be printed any more, after an empty line; from then on all is lost."""
    try:
        print(flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return f"the output could not be written: {error.strerror}"
    return ""


def _open_closed() -> None:
    """Open streams that `>&-` closed: the next file would get their numbers and lines."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest number that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
