"""The runs of a sweep: their records, copies, and ranking."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from expt.config.kinds import metrics_of
from expt.runs import tags
from expt.runs.metrics_file import at_best, of_epochs
from expt.runs.paths import RunPaths
from expt.runs.request import unquoted
from expt.runs.result import FoundRecord, Record, objective_of, results

T = TypeVar("T")
LEFT_OUT = ("git", "versions", "hardware", "hosts")
"""Fields that no table shows, often the largest part of a record."""
_NAMED = 3
"""Copies that a line names."""


def results_of_sweep(folder: Path) -> Iterator[tuple[RunPaths, Record]]:
    """Yield as `results`, without LEFT_OUT."""
    for paths, record in results(folder):
        for key in LEFT_OUT:
            record.pop(key, None)  # type: ignore[misc]  # not a literal
        yield paths, record


def latest_sweep(outputs: Path) -> Path | None:
    """Return the sweep below `outputs` whose first run began last; None where there is none."""
    pattern = str(RunPaths(Path("*/*")).result)
    folders = {path.parent.parent for path in (outputs / "sweeps").glob(pattern)}

    def began(sweep: Path) -> float:
        return min((run["started"] for _, run in results(sweep) if "started" in run), default=0.0)

    return max(sorted(folders), key=began, default=None)


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


def value_of(tag: str, record: Record, paths: RunPaths) -> float | None:
    """Return a tag's value at the evaluation whose checkpoint the run keeps as its best.

    A tag of the whole run, such as its memory, or one that is measured at the end, has one value.
    """
    objective, best = record.get("objective"), record.get("best")
    if objective and objective["name"] == tag:
        return objective["value"]
    last = (record.get("metrics") or {}).get(tag)
    if last is None or tag in (tags.SKIPPED_STEPS, tags.RUNNING_LOSS):
        return last
    if tag in tags.COMPARABLE:
        return _of_whole_run(tag, last, record, paths)
    value = at_best(paths, tag, best) if best else None
    return last if value is None else value


def _of_whole_run(tag: str, last: float, record: Record, paths: RunPaths) -> float:
    """Return the highest memory, or the mean of a speed or a time over the run's own epochs."""
    since = record["forked_from"]["step"] if "forked_from" in record else 0
    values = of_epochs(paths, tag, since_step=since)
    if tag.startswith("memory/"):
        return max(values.values(), default=last)
    seconds = of_epochs(paths, tags.EPOCH_S, since_step=since)
    # A speed's mean is weighted by time: all samples by all seconds.
    weights = {
        epoch: seconds.get(epoch, 0.0) if tag == tags.SAMPLES_PER_S else 1.0 for epoch in values
    }
    total = sum(weights.values())
    return sum(values[epoch] * weights[epoch] for epoch in values) / total if total else last


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
    equal: dict[tuple[object, object], list[tuple[bool, Path]]] = {}
    for paths, record in runs:
        own, identity = has_own_name(paths, record), record.get("identity")
        for shared in filter(None, (record.get("started"), identity and paths.folder.parent)):
            equal.setdefault((shared, identity), []).append((own, paths.folder))
    found = dict[Path, Path]()
    for (shared, _), folders in equal.items():
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
