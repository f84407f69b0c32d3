"""Sweeps, and an index of large ones: what result.json says of each run, for to open 10,000 takes
half a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from expt.runs import plain_json
from expt.runs.atomic import write_atomically
from expt.runs.paths import RESULT, SWEEP_INDEX, RunPaths
from expt.runs.result import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    PAUSED,
    Record,
    result_of_any,
    results,
    with_nan,
)

FORMAT = 2
LARGE = 200
"""A sweep of fewer runs is read as quickly without an index."""
LEFT_OUT = ("git", "versions", "hardware", "hosts")
"""What no table shows, and most of a record may be."""


def results_of_sweep(folder: Path) -> Iterator[tuple[RunPaths, Record]]:
    """As `results`, without LEFT_OUT; what has not changed since the index was written comes from
    there.

    Records share what they have in common: who changes one changes its own keys alone.
    """
    known = _read(folder / SWEEP_INDEX)
    now: dict[str, tuple[list[int], Record]] = {}
    ended = 0
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        paths = RunPaths(folder / name)
        try:
            stat = os.stat(
                f"{folder}/{name}/{RESULT}"
            )  # by a path of pathlib's it takes three times as long
        except OSError:  # no folder, or no run
            continue
        # Another record has another inode, see `write_atomically`; its times are those of the
        # system's clock.
        state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        kept = known.pop(name, None)
        record = kept[1] if kept and kept[0] == state else _slim(result_of_any(paths))
        if record.get("status") in (
            COMPLETED,
            FAILED,
            INTERRUPTED,
            PAUSED,
        ):  # others may change without a word
            now[name] = state, record
            ended += not (kept and kept[0] == state)
        if record:
            yield paths, record
    if len(now) >= LARGE and (ended or known):
        with contextlib.suppress(OSError):  # a disk that is full, or read-only
            write_atomically(folder / SWEEP_INDEX, plain_json.dumps(_packed(now)))


def latest_sweep(outputs: Path) -> Path | None:
    """The sweep below `outputs` that was begun last; a folder without any run is none."""
    folders = {
        path.parent.parent for path in (outputs / "sweeps").glob(str(RunPaths(Path("*/*")).result))
    }
    return max(sorted(folders), key=_began, default=None)


def _began(sweep: Path) -> float:
    """When the first of its runs has [seconds since the epoch]; a later look, or an attempt at
    another, counts not.
    """
    return min((found["started"] for _, found in results(sweep) if "started" in found), default=0.0)


def _slim(record: Record) -> Record:
    for key in LEFT_OUT:
        record.pop(key, None)  # type: ignore[misc]  # not a literal
    return record


class _Bases:
    """The first of each kind of content; of the others of its kind what is different is enough."""

    def __init__(self) -> None:
        self.contents: list[Mapping[str, Any]] = []
        self._written: list[Mapping[str, str]] = []
        self._numbers: dict[Hashable, int] = {}

    def against(self, content: Mapping[str, Any], kind: str = "") -> tuple[int, dict[str, Any]]:
        """The number of its base, which has the same keys in the same order, and what is different
        at the top.
        """
        number = self._numbers.setdefault((tuple(content), kind), len(self.contents))
        if number == len(self.contents):
            self.contents.append(content)
            self._written.append({key: repr(value) for key, value in content.items()})
        base, written = self.contents[number], self._written[number]
        # By what is written, since 1 == True == 1.0.
        return number, {
            k: v for k, v in content.items() if v is not base[k] and repr(v) != written[k]
        }


def _packed(runs: Mapping[str, tuple[list[int], Record]]) -> dict[str, Any]:
    """Most runs have nearly the same settings, and all the same command, which may name thousands
    of values.
    """
    bases, packed = _Bases(), {}
    for name, (state, record) in runs.items():
        config = record.get("config")
        rest = record if config is None else {**record, "config": None}
        settings = None if config is None else bases.against(config)
        packed[name] = [state, settings, bases.against(rest, str(record.get("command")))]
    return {"format": FORMAT, "bases": bases.contents, "runs": packed}


def _read(index: Path) -> dict[str, tuple[list[int], Record]]:
    try:
        content = json.loads(index.read_bytes())
        return _unpacked(content) if content["format"] == FORMAT else {}
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ):  # none, or no index
        return {}


def _unpacked(content: Mapping[str, Any]) -> dict[str, tuple[list[int], Record]]:
    bases, found = content["bases"], {}
    for name, (state, settings, (number, others)) in content["runs"].items():
        record: dict[str, Any] = {**bases[number], **others}
        if settings is not None:
            record["config"] = {**bases[settings[0]], **settings[1]}
        found[name] = state, with_nan(cast(Record, record))
    return found
