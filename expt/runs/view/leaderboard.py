"""A sweep in a table, best first: the leaderboard, and its files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from expt.errors import decimals, printable
from expt.runs.failure import in_one_line
from expt.runs.found import FoundRun
from expt.runs.paths import SUMMARY_CSV, SUMMARY_TABLE, write_atomically
from expt.runs.result import device_s
from expt.runs.view.listing import best_first
from expt.runs.view.settings import Row, objective_name, rows, shown_setting
from expt.runs.view.text import STALE, as_csv, elapsed, plain_table, setting

SHOWN = 200
"""The largest number of rows that are printed."""
SPREAD = "a ± b (n): mean and standard deviation of n repetitions"


def leaderboard(
    runs: Sequence[FoundRun],
    sort: str | None = None,
    *,
    stale: Collection[Path] = (),
    among: Sequence[FoundRun] | None = None,
    whole: bool = False,
) -> Table:
    """Return the first of `rows` as a table, or all; `stale` are folders of runs of other code."""
    found = rows(runs, sort, among)
    shown = found if whole else found[:SHOWN]
    left_out = len(found) - len(shown)
    head, below = _columns_and_rows(shown, objective_name(among or runs), stale)
    table = plain_table(head, below, left={*head[: len(_keys(shown))], "status"})
    notes = list[str]()
    if any(len(row.values) > 1 for row in shown):
        notes.append(SPREAD)
    if left_out:
        notes.append(f"{left_out:,} more in {SUMMARY_TABLE}")
    table.caption = "\n".join(notes)
    return table


def _columns_and_rows(
    found: Sequence[Row], objective: str, stale: Collection[Path] = ()
) -> tuple[list[str], list[list[str]]]:
    keys = _keys(found)
    metrics = best_first(run for row in found for run in row.runs)
    others = [*(f"{metric}/test" for metric in metrics), f"{metrics[0]}/val"]  # some have no test
    measured = (tag for tag in others if any(row.values_of(tag) for row in found))
    other = [tag for tag in measured if tag != objective][:1]
    after = [objective, *other, "status", "train time"]
    return [*_headings(keys, after), *after], [
        [
            *(setting(row.settings.get(key, "")) for key in keys),
            spread(row.values),
            *(spread(row.values_of(tag)) for tag in other),
            row.status + _mark_of_stale(row, stale),
            elapsed(row.seconds),
        ]
        for row in found
    ]


def _mark_of_stale(row: Row, stale: Collection[Path]) -> str:
    number = sum(run.folder in stale for run in row.runs)
    if not number:
        return ""
    return f", {STALE}" if number == len(row.runs) else f", {number} {STALE}"


def _headings(keys: Sequence[str], others: Collection[str]) -> list[str]:
    """Return the names of the settings' columns, apart from those of results."""
    return [f"{key}_setting" if key in others else key for key in keys]


def _keys(found: Sequence[Row]) -> list[str]:
    return [*found[0].settings] if found else []  # all rows have the same


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
    columns: dict[str, Iterable[Any]] = {
        "run": (run.folder.name for run in runs),
        "status": (run.status for run in runs),
        "identity": (run.record.get("identity") for run in runs),
    }
    results: dict[str, Iterable[Any]] = {
        "objective": (run.value_of(objective) for run in runs),
        **{tag: [run.metrics.get(tag) for run in runs] for tag in tags},
        "train_s": (run.trained_s for run in runs),
        "device_s": (device_s(run.record) for run in runs),
    }
    if any("energy_j" in run.record for run in runs):
        results["energy_j"] = (run.record.get("energy_j") for run in runs)
    results["error"] = (in_one_line(run.error) for run in runs)
    for key, name in zip(keys, _headings(keys, {*columns, *results}), strict=True):
        shown = (shown_setting(run, key) for run in runs)
        columns[name] = [None if value is None else setting(value) for value in shown]
    columns |= results
    cells = (map(_cell, row) for row in zip(*columns.values(), strict=True))
    write_atomically(folder / SUMMARY_CSV, as_csv([columns, *cells]))
    write_atomically(folder / SUMMARY_TABLE, "\n".join(_markdown(found, objective)) + "\n")


def _markdown(found: Sequence[Row], objective: str) -> Iterator[str]:
    head, below = _columns_and_rows(found, objective)
    yield "| " + " | ".join([*head[:-1], "train_s"]) + " |"
    yield "|" + "---|" * len(head)
    for row, line in zip(found, below, strict=True):
        values = map(printable, [*line[:-1], f"{row.seconds:.1f}"])
        plain = (value.replace("\n", " ").replace("|", "\\|") for value in values)
        yield "| " + " | ".join(plain) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
