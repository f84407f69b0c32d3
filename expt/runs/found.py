"""Runs that are found in folders: their values and ranking, and those that do not count."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from expt.config.identity import hyperparameters, without_kwargs
from expt.config.keys import flat
from expt.config.kinds import metrics_of
from expt.config.schema import RunConfig
from expt.errors import listed
from expt.runs import tags
from expt.runs.metrics_file import at_best, of_epochs
from expt.runs.paths import GRID_RECORD, RunPaths, dumps, write_atomically
from expt.runs.result import Record, begun_at_step, objective_value, result_of_any

LEFT_OUT = ("git", "versions", "hardware", "hosts")
"""Fields that no table shows, often the largest part of a record."""
_NAMED = 3
"""The largest number of copies that a line names."""
_SETTINGS = {field.name for field in dataclasses.fields(RunConfig)}


@dataclass(frozen=True, eq=False)
class FoundRun:
    """A run's folder and its record, by which each table, filter and search knows it.

    It is equal to itself only, so that tables of the same runs are made once.
    """

    folder: Path
    record: Record
    is_chosen_repetition: bool = False
    """True if it was chosen by its seed or fold: others of its setting are not missing."""

    @classmethod
    def at(cls, folder: Path) -> FoundRun:
        """Return the run of a folder; its record is empty where there is none."""
        return cls(folder, result_of_any(RunPaths(folder)))

    @property
    def paths(self) -> RunPaths:
        """The files of the run."""
        return RunPaths(self.folder)

    @property
    def status(self) -> str:
        """One of expt.runs.result.STATUSES, lost or damaged."""
        return self.record.get("status", "")

    @property
    def config(self) -> dict[str, Any]:
        """The configuration; empty for a run that was refused."""
        return self.record.get("config") or {}

    @property
    def typed(self) -> dict[str, Any]:
        """The settings that were typed."""
        return self.record.get("overrides") or {}

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each tag."""
        return self.record.get("metrics") or {}

    @property
    def error(self) -> str:
        """The text of the error that ended it; "" where none did."""
        return self.record.get("error", "")

    @property
    def objective(self) -> str:
        """The tag that its best evaluation is chosen by."""
        objective = self.record.get("objective")
        return str(objective["name"] if objective else self.config.get("objective", ""))

    @property
    def number(self) -> int:
        """The number in its search; -1 for any other run."""
        return self.record["search"]["number"] if "search" in self.record else -1

    @property
    def trained_s(self) -> float:
        """Seconds of training, without evaluations."""
        return sum(self.record.get("epoch_s") or (), 0.0)

    @property
    def has_own_name(self) -> bool:
        """True if the folder has the name that the run was given; a copy has another."""
        return self.record.get("name", self.folder.name) == self.folder.name

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """All settings, flat, as they are typed; choices of groups that are none of them first.

        A custom class has the name by which it was chosen, or else the class's.
        """
        choices = {
            key: value
            for key, value in self.typed.items()
            if isinstance(value, str) and ("@" in key or not ("." in key or key in _SETTINGS))
        }
        return {**choices, **_with_classes(_as_typed(flat(self.config)), self.typed)}

    @functools.cached_property
    def values(self) -> Mapping[str, Any]:
        """All that a run can be chosen or sorted by: columns, settings and metrics."""
        from expt.runs.view.text import shown_path  # late: it imports Rich

        best, metrics = self.record.get("best"), self.metrics
        of_objective = metrics.get(tags.BEST + self.objective, metrics.get(self.objective))
        texts = {key: str(each) for key, each in self.settings.items() if isinstance(each, list)}
        return {
            "run": shown_path(self.folder),
            "started": self.record.get("started"),
            "status": self.record.get("status"),
            "workers": self.record.get("world_size"),
            "best": best["value"] if best else of_objective,
            "time": self.trained_s,
            **self.settings,
            **texts,
            **metrics,
        }

    def value_of(self, tag: str) -> float | None:
        """Return a tag's value at the evaluation whose checkpoint the run keeps as its best.

        A tag of the whole run, such as its memory, or one that is measured at the end, has one
        value.
        """
        objective, best = self.record.get("objective"), self.record.get("best")
        if objective and objective["name"] == tag:
            return objective["value"]
        last = self.metrics.get(tag)
        if last is None or tag in (tags.SKIPPED_STEPS, tags.RUNNING_LOSS):
            return last
        if tag in tags.COMPARABLE:
            return self._of_all_epochs(tag, last)
        value = at_best(self.paths, tag, best) if best else None
        return last if value is None else value

    def _of_all_epochs(self, tag: str, last: float) -> float:
        """Return the highest memory, or the mean of a speed or a time over its own epochs."""
        since = begun_at_step(self.record)
        values = of_epochs(self.paths, tag, since_step=since)
        if tag.startswith("memory/"):
            return max(values.values(), default=last)
        weights = dict.fromkeys(values, 1.0)
        if tag == tags.SAMPLES_PER_S:  # weighted by time: all samples by all seconds
            seconds = of_epochs(self.paths, tags.EPOCH_S, since_step=since)
            weights = {epoch: seconds.get(epoch, 0.0) for epoch in values}
        total = sum(weights.values())
        return sum(values[epoch] * weights[epoch] for epoch in values) / total if total else last

    def is_higher_better(self, tag: str) -> bool:
        """Return whether the highest value of a tag is the best."""
        return tags.is_higher_better(tag, metrics_of(self.config.get("task")))


def _as_typed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by the keys that are typed; null and lists stay as they are."""
    texts = hyperparameters(config)
    plain = {
        key: value
        for key, value in config.items()
        if value is None or (isinstance(value, list) and key in texts)
    }
    found = {**texts, **plain}
    short = {key: without_kwargs(key) for key in found}
    return {key if short[key] in found else short[key]: found[key] for key in found}


def _with_classes(settings: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the names of custom classes in place of `_target_`."""
    found = dict(settings)
    for group, value in settings.items():
        if value == "_target_" and (target := settings.get(f"{group}.target")) is not None:
            name = typed.get(group)
            found[group] = name if isinstance(name, str) else target.rpartition(".")[2]
    return found


def results(folder: Path) -> Iterator[FoundRun]:
    """Yield the runs of a sweep's folder by name, their records without LEFT_OUT."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if (run := FoundRun.at(path)).record:
            for key in LEFT_OUT:
                run.record.pop(key, None)  # type: ignore[misc]  # not a literal
            yield run


def results_below(folder: Path) -> Iterator[FoundRun]:
    """Yield the runs anywhere below `folder`, itself included."""
    own = set[Path]()
    if (run := FoundRun.at(folder)).record:
        yield run
        own = {*run.paths.found(), *folder.glob(".*")}
    with contextlib.suppress(PermissionError):
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink() and path not in own:
                yield from results_below(path)


def by_objective(runs: Iterable[FoundRun]) -> list[FoundRun]:
    """Return the runs that have measured their objective, best first."""
    measured = [run for run in runs if math.isfinite(objective_value(run.record))]
    measured.sort(key=lambda run: run.number)  # of equal ones the first of a search
    highest = any(run.is_higher_better(run.objective) for run in measured[:1])
    return sorted(measured, key=lambda run: objective_value(run.record), reverse=highest)


def without_copies(runs: Iterable[FoundRun]) -> tuple[list[FoundRun], dict[Path, Path]]:
    """Return the runs that count, and the folder of each copy with that of its original.

    Equal runs that began at one moment are copies; so is one under another name than its own next
    to an equal one, for each resume has its own beginning. The one under its own name counts, else
    the first: a folder that was only renamed is not a copy.
    """
    runs = list(runs)
    equal = dict[tuple[object, object], list[FoundRun]]()
    for run in runs:
        identity = run.record.get("identity")
        for shared in filter(None, (run.record.get("started"), identity and run.folder.parent)):
            equal.setdefault((shared, identity), []).append(run)
    copies = dict[Path, Path]()
    for (shared, _), group in equal.items():
        kept = next((run for run in group if run.has_own_name), group[0]).folder
        others = [run for run in group if not run.has_own_name or shared != kept.parent]
        copies |= {run.folder: kept for run in others if run.folder != kept}
    return [run for run in runs if run.folder not in copies], copies


def describe_copies(copies: Mapping[Path, Path]) -> str:
    """Return a line that names the first of the copies, which do not count."""
    names = [f"{folder.name} (of {kept.name})" for folder, kept in sorted(copies.items())]
    are = "copies of runs, which do" if len(names) > 1 else "a copy of a run, which does"
    return f"{are} not count: {listed(names, _NAMED)}"


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
    shown = [run for run in runs if run.folder.absolute() not in hidden]
    return shown, [run for run in runs if run.folder.absolute() in hidden]
