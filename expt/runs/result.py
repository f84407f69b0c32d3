"""What a run tells the world: metrics.jsonl, a line per value as it comes, and result.json, replaced atomically."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expt.config.secrets import hidden
from expt.runs.paths import RunPaths

RUNNING, COMPLETED, FAILED, INTERRUPTED = "running", "completed", "failed", "interrupted"
DAMAGED = "damaged"
"""Said of a run whose result.json cannot be read; no run says it of itself."""


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
