"""Settings of a sweep: its runs grouped by all but seed and fold, filtered and ranked."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expt.config.identity import REPEATED
from expt.runs.found import FoundRun, read_grid, results
from expt.runs.paths import is_sweep
from expt.runs.result import COMPLETED, PRUNED
from expt.runs.view.listing import chosen, falls, ordered, parts_of, values_of
from expt.runs.view.summary import epochs_done
from expt.runs.view.text import setting

_LAST_RESORT = "experiment without seed"
"""The column that tells any two rows apart."""


@dataclass(frozen=True)
class Row:
    """A setting: runs that differ by their seed and fold only; most often just one."""

    settings: dict[str, Any]
    runs: tuple[FoundRun, ...]
    objective: str
    """The objective of the table; a run may have been chosen by another."""
    repetitions: int = 1
    """How many seeds and folds the settings of its sweep have."""

    @functools.cached_property
    def counted(self) -> list[FoundRun]:
        """The completed runs; without one the pruned runs that have come furthest."""
        if done := [run for run in self.runs if run.status == COMPLETED]:
            return done
        pruned = [run for run in self.runs if run.status == PRUNED]
        most = max((len(run.record.get("epoch_s", ())) for run in pruned), default=0)
        return [run for run in pruned if len(run.record.get("epoch_s", ())) == most]

    @property
    def total(self) -> int:
        """How many repetitions it should have."""
        return max(len({run.folder for run in self.runs}), self.repetitions)

    @property
    def first(self) -> FoundRun:
        """The counted run of the lowest seed and fold, so that no result decides which is shown."""
        return min(
            self.counted,
            key=lambda run: [x if isinstance(x, int) else -1 for x in seed_and_fold(run)],
        )

    @property
    def is_whole(self) -> bool:
        """True if every repetition counts, and has measured the objective."""
        return len(self.counted) == self.total == len(self.values)

    @property
    def name(self) -> str:
        """Its run; of several repetitions their settings, and how many count."""
        if self.total == 1:
            return self.runs[0].folder.name
        known = ",".join(f"{key}={setting(value)}" for key, value in self.settings.items())
        return f"{known} ({len(self.counted)} of {self.total} repetitions)".strip()

    @property
    def as_record(self) -> dict[str, Any]:
        """The setting as a program reads it: its numbers are of the counted repetitions."""
        values = self.values
        has_spread = len(values) > 1 and all(map(math.isfinite, values))
        return {
            "settings": self.settings,
            "objective": self.objective,
            "mean": self.mean,
            "std": statistics.stdev(values) if has_spread else None,
            "counted": len(self.counted),
            "repetitions": self.total,
            "runs": [str(run.folder.absolute()) for run in self.runs],
        }

    @property
    def values(self) -> list[float]:
        """The objective of each counted run that has measured it."""
        measured = (run for run in self.counted if run.record.get("objective"))
        found = (run.value_of(self.objective) for run in measured)
        return [value for value in found if value is not None]

    def values_of(self, tag: str) -> list[float]:
        """Return the value of `tag` in each counted run at its best evaluation, or of its test."""
        is_final = tag.endswith("/test")
        found = (run.metrics.get(tag) if is_final else run.value_of(tag) for run in self.counted)
        return [value for value in found if value is not None]

    @property
    def mean(self) -> float:
        """Mean of the objective; nan if no run has measured it, or one has nan."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def status(self) -> str:
        """`completed`, or how many are; of a pruned run, after how much."""
        done = sum(run.status == COMPLETED for run in self.runs)
        if self.total == 1:
            (run,) = self.runs
            after = f" after {epochs_done(run.record)}" if run.status == PRUNED else ""
            return f"{run.status}{after}"
        return COMPLETED if done == self.total else f"{done} of {self.total} completed"

    @property
    def seconds(self) -> float:
        """Mean training time of a counted run, or else of any."""
        return statistics.fmean(run.trained_s for run in self.counted or self.runs)


def read_runs(folder: Path) -> list[FoundRun]:
    """Return the runs of a sweep, in the order of its search."""
    return sorted(results(folder), key=lambda run: run.number)


def rows(
    runs: Sequence[FoundRun], sort: str | None = None, among: Sequence[FoundRun] | None = None
) -> list[Row]:
    """Return the settings of runs, best first, or by the column, setting or metric `sort`.

    By a metric, a setting that lacks repetitions comes after all others: they might be its worst.
    If the runs are part of the table of `among`, columns and numbers of repetitions are that one's.
    """
    objective = objective_name(among or runs)
    by = objective if sort in (None, "best", objective) else str(sort)
    is_metric = by == objective or any(by in run.metrics for run in runs)

    def value(row: Row) -> Any:
        if by == objective:
            return row.mean if row.values else None
        values: list[Any] = [run.values.get(by) for run in row.counted or row.runs]
        numbers = [each for each in values if type(each) in (int, float)]
        return statistics.fmean(numbers) if numbers else row.settings.get(by, values[0])

    def place(row: Row) -> int:  # before all order by value
        if not is_metric:
            return 0
        found = value(row)
        if not isinstance(found, int | float) or math.isnan(found):
            return 3
        return 1 if row.is_whole else 2

    return sorted(ordered(rows_in_order(runs, among), value, falling=falls(by, runs)), key=place)


def rows_in_order(runs: Sequence[FoundRun], among: Sequence[FoundRun] | None = None) -> list[Row]:
    """Return the settings in the order of their runs; `among` is as in `rows`."""
    return [*_rows(tuple(runs), tuple(among or runs))]


@functools.lru_cache(maxsize=2)  # a report shows the same rows in several ways
def _rows(runs: Sequence[FoundRun], among: Sequence[FoundRun]) -> list[Row]:
    table = _grouped(among)
    keys = _columns([group[0] for group in table])
    repetitions = _repetitions(table)
    objective = objective_name(among)
    return [
        Row(
            {key: shown_setting(group[0], key) for key in keys},
            tuple(group),
            objective,
            max(1 if "search" in run.record else repetitions[run.folder.parent] for run in group),
        )
        for group in _grouped(runs)
    ]


def filtered(
    runs: Sequence[FoundRun], filters: Sequence[str]
) -> tuple[list[FoundRun], list[FoundRun]]:
    """Return all runs of the settings that pass every filter, and the table that they are of.

    A filter by seed or fold chooses runs, so the table has these only. By any other one a setting
    passes as a whole, if one of its runs does: without the others its mean would be chosen too.
    Raises ConfigError as `chosen`.
    """
    every = [*map(values_of, runs)]
    by_run = [text for text in filters if parts_of(text, every)[0] in REPEATED]
    among = chosen(runs, by_run)
    if by_run:
        among = [dataclasses.replace(run, is_chosen_repetition=True) for run in among]
    passed = {run.folder for run in chosen(runs, filters)}
    kept = [group for group in _grouped(among) if passed & {run.folder for run in group}]
    return [run for group in kept for run in group], among


def _grouped(runs: Sequence[FoundRun]) -> list[list[FoundRun]]:
    """Return the runs of each setting."""
    # A run that was refused has only its typed settings, which another run may have too.
    by_typed = dict[str, str]()
    # One that failed while its model was made has no hash of the source; others of it may have.
    by_identity = dict[str, set[str]]()
    for run in runs:
        if "seedless_identity" in run.record:
            by_typed.setdefault(_seedless_words(run), seedless(run))
            by_identity.setdefault(run.record["seedless_identity"], set()).add(seedless(run))
    groups = dict[str, list[FoundRun]]()
    for run in runs:
        key = seedless(run)
        with_source = by_identity.get(key, set()) - {key}
        if len(with_source) == 1 and not run.record.get("imported"):
            (key,) = with_source
        groups.setdefault(by_typed.get(key, key), []).append(run)
    return [*groups.values()]


def _repetitions(groups: Sequence[Sequence[FoundRun]]) -> dict[Path, int]:
    """Return how many repetitions a setting of the grid of each folder has."""
    runs = [run for group in groups for run in group]
    most = {run.folder.parent: 1 for run in runs}
    planned = {run.folder.parent for run in runs if not run.is_chosen_repetition}
    most |= {folder: read_grid(folder).get("repetitions", 1) for folder in planned}
    for group in groups:
        there: dict[Path, set[tuple[Any, ...]]] = {}
        for run in group:
            if "search" not in run.record and is_sweep(run.folder.parent):
                there.setdefault(run.folder.parent, set()).add(seed_and_fold(run))
        most |= {folder: max(most[folder], len(seeds)) for folder, seeds in there.items()}
    return most


def objective_name(runs: Sequence[FoundRun]) -> str:
    """Return the name of the objective of the runs."""
    return next((run.objective for run in runs if run.record.get("objective")), "objective")


def seed_and_fold(run: FoundRun) -> tuple[Any, ...]:
    """Return the key that distinguishes the runs of an experiment, and pairs those of two."""
    if config := run.config:
        return config.get("seed"), (config.get("dataset") or {}).get("fold")
    return tuple(run.typed.get(key) for key in REPEATED)


def seedless(run: FoundRun) -> str:
    """Return a key that is equal for runs that differ by their seed and fold only."""
    if "seedless_identity" in run.record:
        hashes = sorted(module["hash"] for module in run.record.get("imported", {}).values())
        return " ".join([run.record["seedless_identity"], *hashes])
    return _seedless_words(run)  # it was refused before it had a configuration


def _seedless_words(run: FoundRun) -> str:
    """Return a hash of the typed settings without seed and fold; of the folder where none were."""
    typed = {key: value for key, value in run.typed.items() if key not in REPEATED}
    about = typed if run.typed else {"folder": str(run.folder)}
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:12]


def shown_setting(run: FoundRun, key: str) -> Any:
    """Return a setting as it was typed, or else as the run had it; "" where it has none.

    All settings take 20 times as long to read as those that were typed.
    """
    content: Mapping[str, Any] = run.record.get("content", {})
    if key in ("data", "code") and content.get(key):
        return content[key]
    if key == _LAST_RESORT:
        return seedless(run)
    if key in (following := (run.config or {}).get("following", {})):
        return following[key]
    if key in run.typed:
        typed = run.typed[key]
        # A custom class is shown by its name and arguments, an interpolation by its value.
        if "${" not in str(typed) and not (isinstance(typed, dict) and "_target_" in typed):
            return typed
    return run.settings.get(key, "")


def _columns(runs: Sequence[FoundRun]) -> list[str]:
    """Return the typed settings that differ, then others until no two rows are equal."""

    def distinguished(*keys: str) -> int:
        return len({tuple(str(shown_setting(run, key)) for key in keys) for run in runs})

    typed = dict.fromkeys(key for run in runs for key in run.typed)
    given = [key for key in typed if key not in (*REPEATED, "sweep")]
    keys = [key for key in given if distinguished(key) > 1] or given
    apart = distinguished(*keys)
    if apart == len(runs):  # else all settings are read, which is slow
        return keys
    others = dict.fromkeys(key for run in runs for key in (*run.settings, *run.typed))
    for key in (*others, "data", "code", _LAST_RESORT):
        if key not in REPEATED and (more := distinguished(*keys, key)) > apart:
            keys.append(key)
            apart = more
        if apart == len(runs):
            break
    return keys
