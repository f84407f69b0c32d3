"""A sweep in a table: the leaderboard, best first, and summary.csv and summary.md."""

from __future__ import annotations

import csv
import functools
import io
import math
import statistics
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from expt.config.identity import REPEATED
from expt.errors import printable
from expt.runs.atomic import write_atomically
from expt.runs.metrics_file import of_epochs
from expt.runs.paths import RunPaths
from expt.runs.ranking import place
from expt.runs.result import COMPLETED, PAUSED, FoundRecord
from expt.runs.spending import device_s
from expt.runs.sweep_index import results_of_sweep
from expt.runs.view.cells import cells, in_csv, setting
from expt.runs.view.query import ListedRun, best_first, falls, ordered, settings_of
from expt.runs.view.repetitions import experiments, parent_of, without_seed
from expt.runs.view.stale import WORD
from expt.runs.view.summary import epochs_done
from expt.runs.view.units import elapsed
from expt.runs.worker_error import in_one_line

SUMMARY_TABLE = "summary.md"
SHOWN = 200
"""Rows that are printed: of 10,000 the last were seen after 10 s, and the best not at all."""


@dataclass(frozen=True)
class Row:
    """Runs that differ by their seed and fold alone; most often just one."""

    settings: dict[str, Any]
    runs: tuple[FoundRecord, ...]
    objective: str
    """That of the table; what a run was chosen by may be another."""

    @functools.cached_property
    def counted(self) -> list[FoundRecord]:
        """The completed runs; where none is, those that have paused, and of them those that have
        come furthest.
        """
        if done := [run for run in self.runs if run["status"] == COMPLETED]:
            return done
        paused = [run for run in self.runs if run["status"] == PAUSED]
        most = max((len(run.get("epoch_s") or ()) for run in paused), default=0)
        return [run for run in paused if len(run.get("epoch_s") or ()) == most]

    @property
    def values(self) -> list[float]:
        """The objective of each run that counts and has measured it; nan where it was nan."""
        found = [value_of(run, self.objective) for run in self.counted if run.get("objective")]
        return [value for value in found if value is not None]

    def values_of(self, tag: str) -> list[float]:
        """The final value of `tag` in each run that counts."""
        return [run["metrics"][tag] for run in self.counted if tag in run.get("metrics", {})]

    @property
    def mean(self) -> float:
        """Mean of the objective; nan where no run has measured it, and where one of them has come
        to nan.
        """
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def status(self) -> str:
        """`completed`, or how many are; of a run that has paused, after how much."""
        done = sum(run["status"] == COMPLETED for run in self.runs)
        if len(self.runs) == 1:
            status = str(self.runs[0]["status"])
            return f"{PAUSED} after {epochs_done(self.runs[0])}" if status == PAUSED else status
        return COMPLETED if done == len(self.runs) else f"{done} of {len(self.runs)} completed"

    @property
    def seconds(self) -> float:
        """Mean training time of a run; of those that count, if there are some."""
        return statistics.fmean(
            sum(run.get("epoch_s") or [0.0]) for run in self.counted or self.runs
        )


def read_runs(folder: Path) -> list[FoundRecord]:
    """What result.json says of every run below `folder`, with its path under `folder`; of a search
    in its order.
    """
    return sorted(
        ({**result, "folder": paths.folder} for paths, result in results_of_sweep(folder)),
        key=place,
    )


def rows(
    runs: Sequence[FoundRecord], sort: str | None = None, *, reverse: bool = False
) -> list[Row]:
    """The leaderboard, what has no result last: best first, or by the column, setting or metric
    `sort`.
    """
    groups = experiments(runs)
    settings = [_Settings(group[0]) for group in groups]
    keys = _columns(settings, [_typed(group[0]) for group in groups])
    objective = objective_of(runs)
    found = [
        Row(
            {key: _parents(group) if key == "fork" else known.get(key) for key in keys},
            tuple(group),
            objective,
        )
        for known, group in zip(settings, groups, strict=True)
    ]
    by = {
        id(row): (
            (row.mean if row.values else None)
            if sort in (None, "best", objective)
            else _mean(row, str(sort))
        )
        for row in found
    }
    down = falls(objective if sort in (None, "best") else str(sort), runs)
    return ordered(found, lambda row: by[id(row)], falling=down != reverse)


def wide_console() -> Console:
    """The terminal; where there is none, lines are as long as what they hold."""
    return Console() if sys.stdout.isatty() else Console(width=1000)


def leaderboard(
    runs: Sequence[FoundRecord],
    sort: str | None = None,
    *,
    reverse: bool = False,
    stale: Collection[Path] = (),
) -> Table:
    """The first of `rows` in a table; `stale` are the folders of runs of other code than today's."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    found = rows(runs, sort, reverse=reverse)
    if len(found) > SHOWN:
        table.caption, table.caption_justify = (
            f"{len(found) - SHOWN:,} more in {SUMMARY_TABLE}",
            "left",
        )
    head, *below = lines(found[:SHOWN], objective_of(runs), stale)
    num_settings = len(_keys(found[:SHOWN]))
    for index, column in enumerate(head):
        right = index >= num_settings and column != "status"
        # In a narrow terminal settings are folded, and words of a status; a number stays whole.
        table.add_column(
            cells(column)[0], justify="right" if right else "left", overflow="fold", no_wrap=right
        )
    for line in below:
        table.add_row(*cells(*line))
    return table


def lines(
    found: Sequence[Row], objective: str, stale: Collection[Path] = ()
) -> Iterator[list[str]]:
    """The leaderboard's columns, then its rows."""
    keys = _keys(found)
    tests = (f"{metric}/test" for metric in best_first(run for row in found for run in row.runs))
    test = next(
        (tag for tag in tests if tag != objective and any(row.values_of(tag) for row in found)),
        None,
    )
    shown_test = [test] if test else []
    after = [objective, *shown_test, "status", "train time"]
    yield [*_headings(keys, after), *after]
    for row in found:
        old = sum(run["folder"] in stale for run in row.runs)
        status = row.status + (
            f", {WORD if old == len(row.runs) else f'{old} {WORD}'}" if old else ""
        )
        numbers = [_spread(row.values), *(_spread(row.values_of(tag)) for tag in shown_test)]
        yield [
            *(setting(row.settings.get(key, "")) for key in keys),
            *numbers,
            status,
            elapsed(row.seconds),
        ]


def _headings(keys: Sequence[str], others: Collection[str]) -> list[str]:
    """The names of the settings' columns; one of the name of a result, as `objective`, says that it
    is a setting.
    """
    return [f"{key}_setting" if key in others else key for key in keys]


def _keys(found: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in found for key in row.settings))


def write_summary(folder: Path, runs: Sequence[FoundRecord]) -> None:
    """summary.csv has a line for each run, summary.md the leaderboard."""
    found = rows(runs)
    shown = (key for row in found for key in row.settings)
    keys = list(dict.fromkeys([*(key for run in runs for key in _typed(run)), *shown]))
    tags = list(dict.fromkeys(tag for run in runs for tag in run.get("metrics") or {}))
    objective = objective_of(runs)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    energy = ["energy_j"] if any("energy_j" in run for run in runs) else []
    before, after = (
        ["run", "status", "identity"],
        ["objective", *tags, "train_s", "device_s", *energy, "error"],
    )
    writer.writerow(map(in_csv, [*before, *_headings(keys, {*before, *after}), *after]))
    for run in runs:
        metrics, known = run.get("metrics") or {}, _Settings(run)
        error = in_one_line(str(run.get("error") or ""))
        numbers = [
            _cell(value_of(run, objective)),
            *(_cell(metrics.get(tag)) for tag in tags),
            _cell(sum(run.get("epoch_s") or [0.0])),
            _cell(device_s(run)),
            *(_cell(run.get("energy_j")) for _ in energy),
        ]
        settings = ["" if (value := known.get(key)) is None else setting(value) for key in keys]
        line = [
            run["folder"].name,
            run["status"],
            run.get("identity", ""),
            *settings,
            *numbers,
            error,
        ]
        writer.writerow(map(in_csv, line))
    write_atomically(folder / "summary.csv", text.getvalue())
    write_atomically(folder / SUMMARY_TABLE, "\n".join(_markdown(found, objective)) + "\n")


def _markdown(found: Sequence[Row], objective: str) -> Iterator[str]:
    head, *below = lines(found, objective)
    yield "| " + " | ".join([*head[:-1], "train_s"]) + " |"
    yield "|" + "---|" * len(head)
    for row, line in zip(found, below, strict=True):
        cells = [*line[:-1], f"{row.seconds:.1f}"]
        yield (
            "| "
            + " | ".join(printable(cell).replace("\n", " ").replace("|", "\\|") for cell in cells)
            + " |"
        )


def _spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation over seeds and folds; how many of them have come to
    nothing.
    """
    bad = [value for value in values if not math.isfinite(value)]
    if bad:
        return str(bad[0]) + (f" ({len(bad)} of {len(values)})" if len(values) > 1 else "")
    if len(values) < 2:
        return f"{values[0]:.4f}" if values else ""
    return f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f} ({len(values)})"


def _parents(group: Sequence[FoundRecord]) -> Any:
    """What the runs of a row are forks of, which may be several."""
    first, *others = dict.fromkeys(_Settings(run).get("fork") for run in group)
    return ", ".join(map(str, (first, *others))) if others else first


def _typed(run: FoundRecord) -> list[str]:
    return list(run.get("overrides", {}))


_IN_LAST_RESORT = "experiment without seed"
"""The column that tells any two rows apart."""


class _Settings:
    """Every setting of a run, as it was typed or as it came to be, and what else may tell it from
    others.
    """

    def __init__(self, run: FoundRecord) -> None:
        self._run = run
        content: Any = run.get("content") or {}
        typed = {key: value for key, value in run.get("overrides", {}).items() if _is_told(value)}
        self._typed = {
            **typed,
            **{part: content[part] for part in ("data", "code") if content.get(part)},
        }

    @functools.cached_property
    def all(self) -> dict[str, Any]:
        """With those that nobody has typed, which takes 20 times as long."""
        last_resort = f"{without_seed(self._run)} {parent_of(self._run)}".rstrip()
        return {**settings_of(self._run), **self._typed, _IN_LAST_RESORT: last_resort}

    def get(self, key: str) -> Any:
        """The value of a setting; "" where the run has none."""
        return self._typed[key] if key in self._typed else self.all.get(key, "")


def _is_told(value: Any) -> bool:
    """Whether what was typed says what a setting came to be; of an own class it is the name, and
    its arguments.
    """
    return "${" not in str(value) and not (isinstance(value, dict) and "_target_" in value)


def _columns(settings: Sequence[_Settings], typed: Sequence[Sequence[str]]) -> list[str]:
    """The settings that were typed, and differ; then of all others as many as it takes to tell the
    rows apart.
    """

    def told_apart(*keys: str) -> int:
        return len({tuple(str(known.get(key)) for key in keys) for known in settings})

    given = [
        key
        for key in dict.fromkeys(key for words in typed for key in words)
        if key not in (*REPEATED, "sweep")
    ]
    keys = [key for key in given if told_apart(key) > 1] or given
    if (apart := told_apart(*keys)) == len(settings):
        return keys
    of_some = dict.fromkeys(key for known in settings for key in known.all)
    for key in sorted(of_some, key=_IN_LAST_RESORT.__eq__):
        if key not in REPEATED and (more := told_apart(*keys, key)) > apart:
            keys.append(key)
            apart = more
        if apart == len(settings):
            break
    return keys


def _mean(row: Row, key: str) -> Any:
    """The mean over a row's runs of what `expt report --sort KEY` sorts by; the first's where it is
    no number.
    """
    found = [ListedRun(run["folder"], run).values.get(key) for run in row.runs]
    numbers = [
        value for value in found if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return statistics.fmean(numbers) if numbers else row.settings.get(key, found[0])


def objective_of(runs: Sequence[FoundRecord]) -> str:
    """The name of what the runs are chosen by."""
    return next((run["objective"]["name"] for run in runs if run.get("objective")), "objective")


def value_of(run: FoundRecord, tag: str) -> float | None:
    """The objective; of a run that was chosen by another one, `tag` in the epoch whose checkpoint
    it keeps.
    """
    if (objective := run.get("objective")) and objective["name"] == tag:
        return objective["value"]
    last, best = (run.get("metrics") or {}).get(tag), run.get("best")
    if last is None or not best:
        return last
    return of_epochs(RunPaths(run["folder"]), tag).get(best["epoch"], last)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
