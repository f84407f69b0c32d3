"""What result.json says of each run of a large sweep, in one file: to open 10,000 of them takes half a minute."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expt.runs import plain_json
from expt.runs.atomic import write_atomically
from expt.runs.paths import SWEEP_INDEX, RunPaths
from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, Record, result_of_any, with_nan

FORMAT = 1
LARGE = 200
"""A sweep of fewer runs is read as quickly without an index."""
LEFT_OUT = ("git", "versions", "hardware", "hosts")
"""What no table shows, and most of a record may be."""


def results_of_sweep(folder: Path) -> Iterator[tuple[RunPaths, Record]]:
    """As `results`, without LEFT_OUT; what has not changed since the index was written comes from there."""
    known = _read(folder / SWEEP_INDEX)
    now: dict[str, tuple[list[int], Record]] = {}
    ended = 0
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        paths = RunPaths(path)
        try:
            stat = paths.result.stat()
        except OSError:  # no folder, or no run
            continue
        # Another record has another inode, see `write_atomically`; its times are those of the system's clock.
        state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        kept = known.pop(path.name, None)
        record = with_nan(kept[1]) if kept and kept[0] == state else _slim(result_of_any(paths))
        if record.get("status") in (COMPLETED, FAILED, INTERRUPTED):  # others may change without a word
            now[path.name] = state, record
            ended += not (kept and kept[0] == state)
        if record:
            yield paths, record
    if len(now) >= LARGE and (ended or known):
        with contextlib.suppress(OSError):  # a disk that is full, or read-only
            write_atomically(folder / SWEEP_INDEX, plain_json.dumps({"format": FORMAT, "runs": now}))


def _read(index: Path) -> dict[str, Any]:
    try:
        content = json.loads(index.read_bytes())
        runs = content["runs"] if content["format"] == FORMAT else {}
        return {str(name): (state, dict(record)) for name, (state, record) in runs.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # none, or no index
        return {}


def _slim(record: Record) -> Record:
    for key in LEFT_OUT:
        record.pop(key, None)  # type: ignore[misc]  # not a literal
    return record
