"""What a run tells the world: metrics.jsonl, a line per value as it comes, and result.json, replaced atomically."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from expt.errors import ConfigError, ExptError
from expt.paths import RunPaths
from expt.redaction import hidden

RUNNING, COMPLETED, FAILED, INTERRUPTED = "running", "completed", "failed", "interrupted"
DAMAGED = "damaged"
"""Said of a run whose result.json cannot be read; no run says it of itself."""

LOG = "log: "


class Point(NamedTuple):
    """One value of one tag; `step` counts optimiser steps done, `epoch` those begun, from 1."""

    step: int
    epoch: int
    tag: str
    value: float


class MetricsWriter:
    """Appends to metrics.jsonl; every log point is flushed, so that a reader or a crash loses none."""

    def __init__(self, paths: RunPaths) -> None:
        self._file: TextIO = paths.metrics.open("a", encoding="utf-8")

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """One line for each of `values`, tag to value."""
        lines = [json.dumps(Point(step, epoch, tag, value)._asdict()) + "\n" for tag, value in values.items()]
        self._file.write("".join(lines))
        self._file.flush()

    @property
    def num_bytes(self) -> int:
        """Size of what was written."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MetricsReader:
    """Reads what has been added to metrics.jsonl since the last call, while a worker writes it."""

    def __init__(self, paths: RunPaths) -> None:
        self._path = paths.metrics
        self._offset = 0

    def read(self) -> list[Point]:
        """The new points; a line that is still being written is left for the next call."""
        try:
            with self._path.open("rb") as file:
                if self._offset > os.fstat(file.fileno()).st_size:  # cut back, by a run that goes on
                    self._offset = 0
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [Point(**json.loads(line)) for line in whole.splitlines()]


def write_error(path: Path, error: BaseException, exit_code: int) -> None:
    """Keep the exception that ends a worker, in the form that torch elastic reads, with the exit code it asks for."""
    content = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(time.time())),
            },
        },
        "text": str(error),
        "expected": isinstance(error, ExptError),
        "kind": type(error).__name__,
        "exit_code": exit_code,
    }
    path.write_text(json.dumps(hidden(content)), encoding="utf-8")


class Raised(NamedTuple):
    """What a worker's error.json says."""

    text: str
    traceback: str
    exit_code: int
    time_ns: int
    expected: bool
    """Whether `text` is meant for a person, without the traceback."""
    kind: str
    """The name of its class."""


def read_error(path: Path) -> Raised | None:
    """The exception that ended a worker; None if it left no word, or only part of one."""
    try:
        content, time_ns = json.loads(path.read_text(encoding="utf-8")), path.stat().st_mtime_ns
        callstack = content["message"]["extraInfo"]["py_callstack"]
        return Raised(
            content.get("text", ""),
            callstack,
            content.get("exit_code", 1),
            time_ns,
            content.get("expected", False),
            content.get("kind", ""),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def umask(new: int | None = None) -> int:
    """The permissions that this process takes from new files; `new` replaces them."""
    before = os.umask(0 if new is None else new)
    os.umask(before if new is None else new)
    return before


@contextlib.contextmanager
def not_world_writable() -> Iterator[None]:
    """Whatever the umask, let nobody but owner and group write to what is made meanwhile."""
    before = umask()
    umask(before | stat.S_IWOTH)
    try:
        yield
    finally:
        umask(before)


@contextlib.contextmanager
def at_work(paths: RunPaths) -> Iterator[None]:
    """Keep other commands out of the run's folder. Raises ConfigError where one is at work there already."""
    from filelock import FileLock, Timeout

    lock = FileLock(paths.lock, timeout=0)
    try:
        paths.folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ConfigError(f"hydra.run.dir={paths.folder}: another command is at work there; wait for it") from None
    except OSError as error:
        raise ConfigError(f"hydra.run.dir={paths.folder}: {error.strerror}; choose another folder") from error
    try:
        yield
    finally:
        lock.release()


def read_result(paths: RunPaths) -> dict[str, Any]:
    """The content of result.json, empty if there is none yet."""
    try:
        text = paths.result.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    content: dict[str, Any] = json.loads(text) if text else {}  # empty for a moment, see create_result
    return content


def results(folder: Path) -> Iterator[tuple[RunPaths, dict[str, Any]]]:
    """The runs of a sweep's folder by name, and what result.json says of each."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        paths = RunPaths(path)
        if found := _result_of_any(paths):
            yield paths, found


def results_below(folder: Path) -> Iterator[tuple[RunPaths, dict[str, Any]]]:
    """The runs anywhere below `folder`, itself included, and what result.json says of each."""
    paths = RunPaths(folder)
    if found := _result_of_any(paths):
        yield paths, found
        return  # what is inside a run is no other
    with contextlib.suppress(PermissionError):
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                yield from results_below(path)


def _result_of_any(paths: RunPaths) -> dict[str, Any]:
    """The content of result.json, or that it is damaged; empty where there is none, or one of another program's."""
    try:
        content = read_result(paths)
    except (OSError, ValueError):
        return {"status": DAMAGED} if paths.result.is_file() else {}
    known = isinstance(content, dict) and content.get("status") in (RUNNING, COMPLETED, FAILED, INTERRUPTED)
    return content if known else {}


def create_result(paths: RunPaths, *, again: bool = False, **fields: Any) -> None:
    """Make the folder this run's, by creating result.json.

    Raises FileExistsError where another run has done so, unless this is the same run `again`.
    """
    paths.folder.mkdir(parents=True, exist_ok=True)
    paths.result.touch(exist_ok=again)
    try:
        write_atomically(paths.result, json.dumps(hidden({"status": RUNNING, **fields}), indent=2) + "\n")
    except OSError:
        if not paths.result.stat().st_size:  # it would make the folder one that holds a run
            paths.result.unlink()
        raise


def update_result(paths: RunPaths, **fields: Any) -> None:
    """Replace the given top-level fields of result.json, and keep the others."""
    content = {**read_result(paths), **hidden(fields)}
    write_atomically(paths.result, json.dumps(content, indent=2) + "\n")


def in_one_line(error: str, *, with_log: bool = True) -> str:
    """The text of a run's error: what went wrong, its cause, and where the log is."""
    first, *rest = error.strip().splitlines() or [""]
    # A traceback's last line is the exception; its log path comes after. A list of problems follows its own head.
    cause = next((line.strip() for line in reversed(rest) if line and not line.startswith(LOG)), "")
    log = next((f"  ({line})" for line in rest if line.startswith(LOG)), "") if with_log else ""
    return f"{first}{': ' + cause if cause else ''}{log}"


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the new one, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
