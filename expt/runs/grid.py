"""The newest grid of a sweep's folder: its repetitions, and runs that it no longer names."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import TypedDict

from expt.runs.found import FoundRun
from expt.runs.paths import GRID_RECORD, dumps, write_atomically


class GridRecord(TypedDict, total=False):
    """The content of grid.json."""

    repetitions: int
    """How many seeds and folds it has for each setting."""
    left_out: list[str]
    """The names of earlier runs that it corrects."""


def read_grid(folder: Path) -> GridRecord:
    """Return the record of a sweep's newest grid; nothing where there is none to be read."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / GRID_RECORD).read_bytes())
        if isinstance(found, dict):
            repetitions, left_out = found.get("repetitions"), found.get("left_out")
            return GridRecord(
                repetitions=repetitions if isinstance(repetitions, int) else 1,
                left_out=left_out if isinstance(left_out, list) else [],
            )
    return GridRecord()


def write_grid(folder: Path, grid: GridRecord) -> None:
    """Keep the record of the newest grid, if the disk has room: without it more is shown."""
    with contextlib.suppress(OSError):
        write_atomically(folder / GRID_RECORD, dumps(grid) + "\n")


def in_newest(folder: Path, runs: Sequence[FoundRun]) -> tuple[list[FoundRun], list[FoundRun]]:
    """Return the runs of a sweep's folder without those that its grid corrects, and these."""
    hidden = {folder.absolute() / name for name in read_grid(folder).get("left_out", ())}
    left_out = [run for run in runs if run.folder.absolute() in hidden]
    return [run for run in runs if run not in left_out], left_out
