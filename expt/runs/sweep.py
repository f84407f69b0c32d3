"""The runs of a sweep: their records, by an index where they are many; copies, and ranking."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from expt.config.identity import VERSION
from expt.config.kinds import metrics_of
from expt.runs import tags
from expt.runs.paths import RESULT, SWEEP_INDEX, RunPaths, dumps, write_atomically
from expt.runs.request import unquoted
from expt.runs.result import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    PRUNED,
    FoundRecord,
    Record,
    objective_of,
    result_of_any,
    results,
    with_nan,
)

T = TypeVar("T")
LARGE = 200
"""A sweep of fewer runs is read as quickly without an index."""
LEFT_OUT = ("git", "versions", "hardware", "hosts")
"""Fields that no table shows, often the largest part of a record."""
_NAMED = 3
"""Copies that a line names."""


def results_of_sweep(folder: Path) -> Iterator[tuple[RunPaths, Record]]:
    """Yield as `results`, without LEFT_OUT; unchanged records come from the index.

    Records share what they have in common: change top-level keys only.
    """
    known = _read(folder / SWEEP_INDEX)
    now: dict[str, tuple[list[int], Record]] = {}
    ended = 0
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        paths = RunPaths(folder / name)
        try:
            stat = os.stat(f"{folder}/{name}/{RESULT}")  # a Path takes three times as long
        except OSError:  # no folder, or no run
            continue
        # Another record has another inode, see `write_atomically`.
        state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        kept = known.pop(name, None)
        unchanged = kept is not None and kept[0] == state
        record = kept[1] if kept and unchanged else _slim(result_of_any(paths))
        if record.get("status") in (COMPLETED, FAILED, INTERRUPTED, PRUNED):
            now[name] = state, record
            ended += not unchanged
        if record:
            yield paths, record
    if len(now) >= LARGE and (ended or known):
        with contextlib.suppress(OSError):  # a disk that is full, or read-only
            write_atomically(folder / SWEEP_INDEX, dumps(_packed(now)))


def latest_sweep(outputs: Path) -> Path | None:
    """Return the sweep below `outputs` whose first run began last; None where there is none."""
    pattern = str(RunPaths(Path("*/*")).result)
    folders = {path.parent.parent for path in (outputs / "sweeps").glob(pattern)}

    def began(sweep: Path) -> float:
        return min((run["started"] for _, run in results(sweep) if "started" in run), default=0.0)

    return max(sorted(folders), key=began, default=None)


def _slim(record: Record) -> Record:
    for key in LEFT_OUT:
        record.pop(key, None)  # type: ignore[misc]  # not a literal
    return record


class _Bases:
    """The first content of each kind; of others of its kind the differences are kept."""

    def __init__(self) -> None:
        self.contents: list[Mapping[str, Any]] = []
        self._written: list[Mapping[str, str]] = []
        self._numbers: dict[Hashable, int] = {}

    def against(self, content: Mapping[str, Any], kind: str = "") -> tuple[int, dict[str, Any]]:
        """Return the number of a base with the same keys, and what differs from it at the top."""
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
    """Most runs have nearly the same settings, and the same command, which may be long."""
    bases, packed = _Bases(), {}
    for name, (state, record) in runs.items():
        config = record.get("config")
        rest = record if config is None else {**record, "config": None}
        settings = None if config is None else bases.against(config)
        packed[name] = [state, settings, bases.against(rest, str(record.get("command")))]
    return {"version": VERSION, "bases": bases.contents, "runs": packed}


def _read(index: Path) -> dict[str, tuple[list[int], Record]]:
    try:
        content = json.loads(index.read_bytes())
        return _unpacked(content) if content["version"] == VERSION else {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}  # none, or no index


def _unpacked(content: Mapping[str, Any]) -> dict[str, tuple[list[int], Record]]:
    bases, found = content["bases"], {}
    for name, (state, settings, (number, others)) in content["runs"].items():
        record: dict[str, Any] = {**bases[number], **others}
        if settings is not None:
            record["config"] = {**bases[settings[0]], **settings[1]}
        found[name] = state, with_nan(cast(Record, record))
    return found


def by_objective(runs: Iterable[tuple[T, Record]]) -> list[T]:
    """Return the runs that have measured their objective, best first."""
    measured = [(run, record) for run, record in runs if math.isfinite(objective_of(record))]
    if not measured:
        return []
    record = measured[0][1]
    metrics = metrics_of((record.get("config") or {}).get("task"))
    highest = tags.is_higher_better(record["objective"]["name"], metrics)
    measured.sort(key=lambda pair: place(pair[1]))  # of equal ones the first of a search
    measured.sort(key=lambda pair: objective_of(pair[1]), reverse=highest)
    return [run for run, _ in measured]


def place(record: Record) -> int:
    """Return the number of a run in its search; others come first."""
    return record["search"]["number"] if "search" in record else -1


def has_own_name(paths: RunPaths, record: Record) -> bool:
    """Return whether the folder has the name that its run was given; a copy has another."""
    return record.get("name", paths.folder.name) == paths.folder.name


def copies_among(runs: Iterable[tuple[RunPaths, Record]]) -> dict[Path, Path]:
    """Return the folders of copies of runs, each with that of the run which counts instead.

    Equal runs that began at one moment are copies; so is one under another name than its own next
    to an equal one, for each resume has its own beginning. The one under its own name counts, else
    the first: a folder that was only renamed is not a copy.
    """
    alike: dict[tuple[object, object], list[tuple[bool, Path]]] = {}
    for paths, record in runs:
        own, identity = has_own_name(paths, record), record.get("identity")
        for shared in filter(None, (record.get("started"), identity and paths.folder.parent)):
            alike.setdefault((shared, identity), []).append((own, paths.folder))
    found = dict[Path, Path]()
    for (shared, _), folders in alike.items():
        kept = next((folder for own, folder in folders if own), folders[0][1])
        others = [folder for own, folder in folders if not own or shared != kept.parent]
        found |= {folder: kept for folder in others if folder != kept}
    return found


def without_copies(runs: Sequence[FoundRecord]) -> tuple[list[FoundRecord], dict[Path, Path]]:
    """Return the runs that count, and the copies as `copies_among` does."""
    copies = copies_among((RunPaths(run["folder"]), run) for run in runs)
    return [run for run in runs if run["folder"] not in copies], copies


def describe_copies(copies: Mapping[Path, Path]) -> str:
    """Return a line that names the first of the copies, which do not count."""
    names = [f"{folder.name} (of {kept.name})" for folder, kept in sorted(copies.items())]
    what = "copies of runs, which do" if len(names) > 1 else "a copy of a run, which does"
    return f"{what} not count: {', '.join([*names[:_NAMED], *['...'] * (len(names) > _NAMED)])}"


MAX_NAME_BYTES = 180
"""File systems take 255; this leaves room for a suffix, and for `.tmp`."""


def folder_names(points: Sequence[Sequence[str]], swept: Collection[str] = ()) -> list[str]:
    """Return a name for each run, of the settings that differ: `lr=0.1,model=mlp`.

    `swept` are keys that vary, whether or not they do among these. Equal names are equal runs.
    """
    settings = [dict[str, str]() for _ in points]
    for found, point in zip(settings, points, strict=True):
        for key, value in map(_key_and_value, point):  # a key may have two mappings
            found[key] = f"{found[key]},{value}" if key in found else value
    given = list(dict.fromkeys(key for point in settings for key in point))
    varied = [
        key for key in given if key in swept or len({point.get(key) for point in settings}) > 1
    ]
    keys = varied or given
    short = _short_keys(keys)
    return [
        run_name({short[key]: point[key] for key in keys if key in point}) for point in settings
    ]


def run_name(settings: Mapping[str, str]) -> str:
    """Return a name for a folder; one that a file system would not take is changed, and unique."""
    text = ",".join(f"{key}={value}" for key, value in sorted(settings.items()))
    name = re.sub(r"[^\w.,=+\-\[\]]", "_", text)
    while len(name.encode()) > MAX_NAME_BYTES:
        name = name[:-1]
    if name != text:  # two texts may have become one
        name = f"{name},{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return name or "run"


def _key_and_value(override: str) -> tuple[str, str]:
    key, _, value = override.lstrip("+~").partition("=")
    # Of a custom class the last part of its name, and its arguments.
    own = re.fullmatch(r"\{\s*_target_:\s*([\w.]*?)(\w+)\s*(?:,(.*))?\}", value, re.DOTALL)
    return key, (f"{own[2]}({own[3]})" if own[3] else own[2]) if own else unquoted(value)


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Shorten `optimizer.lr` to `lr`, unless another key would be `lr` too."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)
    }
