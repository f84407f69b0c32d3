"""A sweep in a table, best first: the leaderboard, and its files."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from expt.config.identity import REPEATED
from expt.errors import decimals, printable
from expt.runs.failure import in_one_line
from expt.runs.found import FoundRun, results
from expt.runs.grid import read_grid
from expt.runs.paths import is_sweep, write_atomically
from expt.runs.result import COMPLETED, PRUNED, device_s
from expt.runs.view.listing import best_first, chosen, falls, ordered, parts_of, values_of
from expt.runs.view.summary import epochs_done
from expt.runs.view.text import STALE, as_csv, cells, elapsed, plain_table, setting

SUMMARY_CSV = "summary.csv"
SUMMARY_TABLE = "summary.md"
SHOWN = 200
"""The largest number of rows that are printed."""
SPREAD = "a ± b (n): mean and standard deviation of n repetitions"
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
        """How many repetitions it has or lacks."""
        return max(len({run.folder for run in self.runs}), self.repetitions)

    @property
    def first(self) -> FoundRun:
        """The counted run of the lowest seed and fold, which was not chosen by its own numbers."""
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
        return {
            "settings": self.settings,
            "objective": self.objective,
            "mean": self.mean,
            "std": statistics.stdev(self.values) if len(self.values) > 1 else None,
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
        """Return the final value of `tag` in each counted run."""
        return [run.metrics[tag] for run in self.counted if tag in run.metrics]

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
    """Return the leaderboard, best first, or by the column, setting or metric `sort`.

    By a metric, a setting that lacks repetitions comes after all others: they might be its worst.
    Of a table of more runs, `among`, it has the columns and the number of repetitions.
    """
    found, objective = settings_of(runs, among), objective_name(among or runs)
    by = objective if sort in (None, "best", objective) else str(sort)
    is_metric = by == objective or any(by in run.metrics for run in runs)

    def value(row: Row) -> Any:
        if by == objective:
            return row.mean if row.values else None
        values: list[Any] = [run.values.get(by) for run in row.counted or row.runs]
        numbers = [each for each in values if type(each) in (int, float)]
        return statistics.fmean(numbers) if numbers else row.settings.get(by, values[0])

    def place(row: Row) -> int:
        is_measured = isinstance(found := value(row), int | float) and not math.isnan(found)
        return 0 if not is_metric else 1 + (not row.is_whole) if is_measured else 3

    return sorted(ordered(found, value, falling=falls(by, runs)), key=place)


def settings_of(runs: Sequence[FoundRun], among: Sequence[FoundRun] | None = None) -> list[Row]:
    """Return the settings of runs, in their order, with the columns of all runs `among` them."""
    every, objective = _grouped(among or runs), objective_name(among or runs)
    keys, most = _columns([group[0] for group in every]), _repetitions(every)
    return [
        Row(
            {key: shown_setting(group[0], key) for key in keys},
            tuple(group),
            objective,
            max(1 if "search" in run.record else most[run.folder.parent] for run in group),
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
    passed, among = {run.folder for run in chosen(runs, filters)}, chosen(runs, by_run)
    if by_run:
        among = [dataclasses.replace(run, is_chosen_repetition=True) for run in among]
    kept = [group for group in _grouped(among) if passed & {run.folder for run in group}]
    return [run for group in kept for run in group], among


def _grouped(runs: Sequence[FoundRun]) -> list[list[FoundRun]]:
    """Return the runs of each setting; a refused one by its typed settings."""
    groups, typed = dict[str, list[FoundRun]](), dict[str, str]()
    of_source: dict[str, dict[str, None]] = {}
    for run in runs:
        if "seedless_identity" in run.record:
            typed.setdefault(_typed_without_seed(run), without_seed(run))
            of_source.setdefault(run.record["seedless_identity"], {})[without_seed(run)] = None
    for run in runs:
        key = without_seed(run)
        others = [one for one in of_source.get(key, ()) if one != key]
        # One that failed while its model was made has no hash of the source.
        key = others[0] if len(others) == 1 and not run.record.get("imported") else key
        groups.setdefault(typed.get(key, key), []).append(run)
    return [*groups.values()]


def _repetitions(groups: Sequence[Sequence[FoundRun]]) -> dict[Path, int]:
    """Return how many repetitions a setting of the grid of each folder has."""
    runs = [run for group in groups for run in group]
    most = {run.folder.parent: 1 for run in runs}
    planned = {run.folder.parent for run in runs if not run.is_chosen_repetition}
    most |= {folder: read_grid(folder).get("repetitions", 1) for folder in planned}
    for group in groups:
        found: dict[Path, set[tuple[Any, ...]]] = {}
        for run in group:
            if "search" not in run.record and is_sweep(run.folder.parent):
                found.setdefault(run.folder.parent, set()).add(seed_and_fold(run))
        most |= {folder: max(most[folder], len(each)) for folder, each in found.items()}
    return most


def objective_name(runs: Sequence[FoundRun]) -> str:
    """Return the name of the objective of the runs."""
    return next((run.objective for run in runs if run.record.get("objective")), "objective")


def seed_and_fold(run: FoundRun) -> tuple[Any, ...]:
    """Return the key that distinguishes the runs of an experiment, and pairs those of two."""
    if config := run.config:
        return config.get("seed"), (config.get("dataset") or {}).get("fold")
    return tuple(run.typed.get(key) for key in REPEATED)


def without_seed(run: FoundRun) -> str:
    """Return a key that is equal for runs that differ by their seed and fold only."""
    if "seedless_identity" in run.record:
        ran = sorted(module["hash"] for module in run.record.get("imported", {}).values())
        return " ".join([run.record["seedless_identity"], *ran])
    return _typed_without_seed(run)  # it was refused before it had a configuration


def _typed_without_seed(run: FoundRun) -> str:
    typed = {key: value for key, value in run.typed.items() if key not in REPEATED}
    typed = typed if run.typed else {"folder": str(run.folder)}
    return hashlib.sha256(json.dumps(typed, sort_keys=True, default=str).encode()).hexdigest()[:12]


def shown_setting(run: FoundRun, key: str) -> Any:
    """Return a setting as it was typed, or else as the run had it; "" where it has none.

    All settings take 20 times as long to read as those that were typed.
    """
    content: Mapping[str, Any] = run.record.get("content", {})
    if key in ("data", "code") and content.get(key):
        return content[key]
    if key == _LAST_RESORT:
        return without_seed(run)
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
    if (apart := distinguished(*keys)) == len(runs):
        return keys
    others = dict.fromkeys(key for run in runs for key in (*run.settings, *run.typed))
    for key in (*others, "data", "code", _LAST_RESORT):
        if key not in REPEATED and (more := distinguished(*keys, key)) > apart:
            keys.append(key)
            apart = more
        if apart == len(runs):
            break
    return keys


def leaderboard(
    runs: Sequence[FoundRun],
    sort: str | None = None,
    *,
    stale: Collection[Path] = (),
    among: Sequence[FoundRun] | None = None,
) -> Table:
    """Return the first of `rows` as a table; `stale` are folders of runs of other code."""
    found = rows(runs, sort, among)
    head, *below = lines(found[:SHOWN], objective_name(among or runs), stale)
    table = plain_table(head, left={*head[: len(_keys(found[:SHOWN]))], "status"})
    notes = [SPREAD] * any(len(row.values) > 1 for row in found[:SHOWN])
    notes += [f"{len(found) - SHOWN:,} more in {SUMMARY_TABLE}"] * (len(found) > SHOWN)
    table.caption = "\n".join(notes)
    for line in below:
        table.add_row(*cells(*line))
    return table


def lines(
    found: Sequence[Row], objective: str, stale: Collection[Path] = ()
) -> Iterator[list[str]]:
    """Yield the names of the leaderboard's columns, then its rows."""
    keys = _keys(found)
    tests = (f"{metric}/test" for metric in best_first(run for row in found for run in row.runs))
    shown = (tag for tag in tests if tag != objective and any(row.values_of(tag) for row in found))
    test = [tag for tag in (next(shown, None),) if tag]
    after = [objective, *test, "status", "train time"]
    yield [*_headings(keys, after), *after]
    for row in found:
        old = sum(run.folder in stale for run in row.runs)
        mark = f", {STALE if old == len(row.runs) else f'{old} {STALE}'}" if old else ""
        yield [
            *(setting(row.settings.get(key, "")) for key in keys),
            spread(row.values),
            *(spread(row.values_of(tag)) for tag in test),
            row.status + mark,
            elapsed(row.seconds),
        ]


def _headings(keys: Sequence[str], others: Collection[str]) -> list[str]:
    """Return the names of the settings' columns, apart from those of results."""
    return [f"{key}_setting" if key in others else key for key in keys]


def _keys(found: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in found for key in row.settings))


def spread(values: Sequence[float]) -> str:
    """Return the mean of values, with their standard deviation and number."""
    bad = [value for value in values if not math.isfinite(value)]
    if bad:
        return str(bad[0]) + (f" ({len(bad)} of {len(values)})" if len(values) > 1 else "")
    if len(values) < 2:
        return decimals(values[0]) if values else ""
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    return f"{decimals(mean)} ± {decimals(deviation)} ({len(values)})"


def write_summary(folder: Path, runs: Sequence[FoundRun]) -> None:
    """Write summary.csv, a line for each run, and summary.md, the leaderboard."""
    found, objective = rows(runs), objective_name(runs)
    keys = list(dict.fromkeys([*(key for run in runs for key in run.typed), *_keys(found)]))
    tags = list(dict.fromkeys(tag for run in runs for tag in run.metrics))
    energy = ["energy_j"] if any("energy_j" in run.record for run in runs) else []
    before = ["run", "status", "identity"]
    after = ["objective", *tags, "train_s", "device_s", *energy, "error"]
    table = [[*before, *_headings(keys, {*before, *after}), *after]]
    for run in runs:
        numbers = [
            run.value_of(objective),
            *map(run.metrics.get, tags),
            run.trained_s,
            device_s(run.record),
            *(run.record.get("energy_j") for _ in energy),
        ]
        known = (shown_setting(run, key) for key in keys)
        settings = ("" if value is None else setting(value) for value in known)
        about = [run.folder.name, run.status, run.record.get("identity", "")]
        table.append([*about, *settings, *map(_cell, numbers), in_one_line(run.error)])
    write_atomically(folder / SUMMARY_CSV, as_csv(table))
    write_atomically(folder / SUMMARY_TABLE, "\n".join(_markdown(found, objective)) + "\n")


def _markdown(found: Sequence[Row], objective: str) -> Iterator[str]:
    head, *below = lines(found, objective)
    yield "| " + " | ".join([*head[:-1], "train_s"]) + " |"
    yield "|" + "---|" * len(head)
    for row, line in zip(found, below, strict=True):
        values = map(printable, [*line[:-1], f"{row.seconds:.1f}"])
        plain = (value.replace("\n", " ").replace("|", "\\|") for value in values)
        yield "| " + " | ".join(plain) + " |"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
