"""A sweep in a table, best first: the leaderboard, and its files."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from expt.config.identity import REPEATED
from expt.errors import printable
from expt.runs.failure import in_one_line
from expt.runs.paths import RunPaths, write_atomically
from expt.runs.result import COMPLETED, PRUNED, FoundRecord, device_s
from expt.runs.sweep import place, results_of_sweep, value_of
from expt.runs.view.query import ListedRun, best_first, falls, ordered, settings_of
from expt.runs.view.summary import STALE, epochs_done
from expt.runs.view.text import Console, as_csv, cells, elapsed, plain_table, setting

SUMMARY_TABLE = "summary.md"
SHOWN = 200
"""Rows that are printed."""
_LAST_RESORT = "experiment without seed"
"""The column that tells any two rows apart."""


@dataclass(frozen=True)
class Row:
    """Runs that differ by their seed and fold only; most often just one."""

    settings: dict[str, Any]
    runs: tuple[FoundRecord, ...]
    objective: str
    """That of the table; a run may have been chosen by another."""

    @functools.cached_property
    def counted(self) -> list[FoundRecord]:
        """The completed runs; without one the pruned runs that have come furthest."""
        if done := [run for run in self.runs if run["status"] == COMPLETED]:
            return done
        pruned = [run for run in self.runs if run["status"] == PRUNED]
        most = max((len(run.get("epoch_s") or ()) for run in pruned), default=0)
        return [run for run in pruned if len(run.get("epoch_s") or ()) == most]

    @property
    def values(self) -> list[float]:
        """The objective of each counted run that has measured it."""
        measured = [run for run in self.counted if run.get("objective")]
        found = [value_of(self.objective, run, RunPaths(run["folder"])) for run in measured]
        return [value for value in found if value is not None]

    def values_of(self, tag: str) -> list[float]:
        """Return the final value of `tag` in each counted run."""
        return [run["metrics"][tag] for run in self.counted if tag in run.get("metrics", {})]

    @property
    def mean(self) -> float:
        """Mean of the objective; nan if no run has measured it, or one has nan."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def status(self) -> str:
        """`completed`, or how many are; of a pruned run, after how much."""
        done = sum(run["status"] == COMPLETED for run in self.runs)
        if len(self.runs) == 1:
            status = str(self.runs[0]["status"])
            return f"{PRUNED} after {epochs_done(self.runs[0])}" if status == PRUNED else status
        return COMPLETED if done == len(self.runs) else f"{done} of {len(self.runs)} completed"

    @property
    def seconds(self) -> float:
        """Mean training time of a counted run, or else of any."""
        runs = self.counted or self.runs
        return statistics.fmean(sum(run.get("epoch_s") or [0.0]) for run in runs)


def read_runs(folder: Path) -> list[FoundRecord]:
    """Return the record of every run of a sweep, in the order of its search."""
    found = results_of_sweep(folder)
    return sorted(({**result, "folder": paths.folder} for paths, result in found), key=place)


def rows(runs: Sequence[FoundRecord], sort: str | None = None) -> list[Row]:
    """Return the leaderboard, best first, or by the column, setting or metric `sort`."""
    groups = _experiments(runs)
    settings = [_Settings(group[0]) for group in groups]
    keys = _columns(settings, [list(_overrides(group[0])) for group in groups])
    objective = objective_of(runs)
    found = list[Row]()
    for known, group in zip(settings, groups, strict=True):
        own = {key: known.get(key) for key in keys}
        found.append(Row(own, tuple(group), objective))
    by = objective if sort in (None, "best", objective) else str(sort)

    def value(row: Row) -> Any:
        return (row.mean if row.values else None) if by == objective else _mean(row, by)

    return ordered(found, value, falling=falls(by, runs))


def _experiments(runs: Sequence[FoundRecord]) -> list[list[FoundRecord]]:
    """Group the runs that differ by their seed and fold only, or are forks of such."""
    found: dict[str, list[FoundRecord]] = {}
    for run in runs:
        found.setdefault(without_seed(run), []).append(run)
    return [*found.values()]


def seed_and_fold(run: FoundRecord) -> tuple[Any, ...]:
    """Return the key that distinguishes the runs of an experiment, and pairs those of two."""
    if config := run.get("config"):
        return config.get("seed"), (config.get("dataset") or {}).get("fold")
    overrides = run.get("overrides") or {}
    return tuple(overrides.get(key) for key in REPEATED)


def without_seed(run: FoundRecord) -> str:
    """Return a key that is equal for runs that differ by their seed and fold only."""
    if "seedless_identity" in run:
        ran = sorted(module["hash"] for module in run.get("imported", {}).values())
        return " ".join([run["seedless_identity"], *ran])
    # Refused before it had a configuration.
    typed = {key: value for key, value in _overrides(run).items() if key not in REPEATED}
    return hashlib.sha256(json.dumps(typed, sort_keys=True, default=str).encode()).hexdigest()[:12]


def wide_console() -> Console:
    """Return the terminal; without one, lines are as long as their text."""
    return Console() if sys.stdout.isatty() else Console(width=1000)


def leaderboard(
    runs: Sequence[FoundRecord], sort: str | None = None, *, stale: Collection[Path] = ()
) -> Table:
    """Return the first of `rows` as a table; `stale` are folders of runs of other code."""
    found = rows(runs, sort)
    head, *below = lines(found[:SHOWN], objective_of(runs), stale)
    table = plain_table(head, left={*head[: len(_keys(found[:SHOWN]))], "status"})
    if len(found) > SHOWN:
        table.caption = f"{len(found) - SHOWN:,} more in {SUMMARY_TABLE}"
        table.caption_justify = "left"
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
        old = sum(run["folder"] in stale for run in row.runs)
        mark = f", {STALE if old == len(row.runs) else f'{old} {STALE}'}" if old else ""
        yield [
            *(setting(row.settings.get(key, "")) for key in keys),
            _spread(row.values),
            *(_spread(row.values_of(tag)) for tag in test),
            row.status + mark,
            elapsed(row.seconds),
        ]


def _headings(keys: Sequence[str], others: Collection[str]) -> list[str]:
    """Return the names of the settings' columns, apart from those of results."""
    return [f"{key}_setting" if key in others else key for key in keys]


def _keys(found: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in found for key in row.settings))


def write_summary(folder: Path, runs: Sequence[FoundRecord]) -> None:
    """Write summary.csv, a line for each run, and summary.md, the leaderboard."""
    found, objective = rows(runs), objective_of(runs)
    keys = list(dict.fromkeys([*(key for run in runs for key in _overrides(run)), *_keys(found)]))
    tags = list(dict.fromkeys(tag for run in runs for tag in run.get("metrics") or {}))
    energy = ["energy_j"] if any("energy_j" in run for run in runs) else []
    before = ["run", "status", "identity"]
    after = ["objective", *tags, "train_s", "device_s", *energy, "error"]
    table = [[*before, *_headings(keys, {*before, *after}), *after]]
    for run in runs:
        metrics, known = run.get("metrics") or {}, _Settings(run)
        numbers = [
            value_of(objective, run, RunPaths(run["folder"])),
            *map(metrics.get, tags),
            sum(run.get("epoch_s") or [0.0]),
            device_s(run),
            *(run.get("energy_j") for _ in energy),
        ]
        settings = ["" if (value := known.get(key)) is None else setting(value) for key in keys]
        about = [run["folder"].name, run["status"], run.get("identity", "")]
        error = in_one_line(str(run.get("error") or ""))
        table.append([*about, *settings, *map(_cell, numbers), error])
    write_atomically(folder / "summary.csv", as_csv(table))
    write_atomically(folder / SUMMARY_TABLE, "\n".join(_markdown(found, objective)) + "\n")


def _markdown(found: Sequence[Row], objective: str) -> Iterator[str]:
    head, *below = lines(found, objective)
    yield "| " + " | ".join([*head[:-1], "train_s"]) + " |"
    yield "|" + "---|" * len(head)
    for row, line in zip(found, below, strict=True):
        values = map(printable, [*line[:-1], f"{row.seconds:.1f}"])
        plain = (value.replace("\n", " ").replace("|", "\\|") for value in values)
        yield "| " + " | ".join(plain) + " |"


def _spread(values: Sequence[float]) -> str:
    bad = [value for value in values if not math.isfinite(value)]
    if bad:
        return str(bad[0]) + (f" ({len(bad)} of {len(values)})" if len(values) > 1 else "")
    if len(values) < 2:
        return f"{values[0]:.4f}" if values else ""
    return f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f} ({len(values)})"


def _overrides(run: FoundRecord) -> dict[str, Any]:
    return run.get("overrides") or {}


class _Settings:
    """Every setting of a run, typed or resolved, and whatever else identifies it."""

    def __init__(self, run: FoundRecord) -> None:
        self._run = run
        content: Any = run.get("content") or {}
        # A custom class is shown by its name and arguments, an interpolation by its value.
        typed = {
            key: value
            for key, value in _overrides(run).items()
            if "${" not in str(value) and not (isinstance(value, dict) and "_target_" in value)
        }
        self._typed = {**typed, **{k: content[k] for k in ("data", "code") if content.get(k)}}

    @functools.cached_property
    def all(self) -> dict[str, Any]:
        """All settings, those that nobody has typed too, which takes 20 times as long."""
        return {**settings_of(self._run), **self._typed, _LAST_RESORT: without_seed(self._run)}

    def get(self, key: str) -> Any:
        """Return the value of a setting; "" where the run has none."""
        return self._typed[key] if key in self._typed else self.all.get(key, "")


def _columns(settings: Sequence[_Settings], typed: Sequence[Sequence[str]]) -> list[str]:
    """Return the typed settings that differ, then others until no two rows are equal."""

    def distinguished(*keys: str) -> int:
        return len({tuple(str(known.get(key)) for key in keys) for known in settings})

    of_all = dict.fromkeys(key for words in typed for key in words)
    given = [key for key in of_all if key not in (*REPEATED, "sweep")]
    keys = [key for key in given if distinguished(key) > 1] or given
    if (apart := distinguished(*keys)) == len(settings):
        return keys
    of_some = dict.fromkeys(key for known in settings for key in known.all)
    for key in sorted(of_some, key=_LAST_RESORT.__eq__):
        if key not in REPEATED and (more := distinguished(*keys, key)) > apart:
            keys.append(key)
            apart = more
        if apart == len(settings):
            break
    return keys


def _mean(row: Row, key: str) -> Any:
    found: list[Any] = [ListedRun(run["folder"], run).values.get(key) for run in row.runs]
    numbers = [each for each in found if type(each) in (int, float)]
    return statistics.fmean(numbers) if numbers else row.settings.get(key, found[0])


def objective_of(runs: Sequence[FoundRecord]) -> str:
    """Return the name of the objective of the runs."""
    return next((run["objective"]["name"] for run in runs if run.get("objective")), "objective")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
