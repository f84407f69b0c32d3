"""Runs in a list, or two of them side by side."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from expt.errors import printable
from expt.runs.result import Record
from expt.runs.view.progress import WIDE
from expt.runs.view.query import ListedRun, best_first
from expt.runs.view.summary import STALE
from expt.runs.view.text import cells, elapsed, in_csv, say, setting, shown_path


def print_listing(
    console: Console, runs: Sequence[ListedRun], stale: Collection[Path] = ()
) -> None:
    """Print a line for each run; where folders do not fit, each has a line of its own.

    Paths are left to the terminal to wrap, to be copied whole.
    """
    paths = [printable(str(run.values["run"])) for run in runs]
    longest = max(map(len, (*paths, "run")))
    for width in dict.fromkeys((console.width, min(console.width, WIDE - 1))):
        table = _listing(runs, width, stale)
        fits = longest + 2 + console.measure(table).maximum <= console.width
        if fits:
            break
    for line, path in zip(_lines(console, table), ["run" if fits else "", *paths], strict=True):
        if fits:
            style = "bold" if path == "run" else ""
            console.print(Text.assemble((path.ljust(longest), style), "  ", line))
            continue
        if path:
            say(console, path)
        console.print(Text.assemble("  ", line), soft_wrap=True)


def _lines(console: Console, table: Table) -> list[Text]:
    with console.capture() as captured:
        width = max(console.width, console.measure(table).maximum)
        console.print(table, width=width, soft_wrap=True)
    return [Text.from_ansi(line) for line in captured.get().splitlines()]


def _listing(runs: Sequence[ListedRun], width: int, stale: Collection[Path]) -> Table:
    """Return the columns but the folder; in a narrow terminal without what all runs have."""
    objectives = {run.objective for run in runs if run.objective}
    shared = objectives.pop() if len(objectives) == 1 else ""
    metric = best_first([run.result for run in runs])[0]
    finals = (f"{metric}/test", f"{metric}/val")
    final = next((tag for tag in finals if any(tag in run.values for run in runs)), None)
    about, narrow = ["model", "dataset", "workers"], width < WIDE
    if narrow:
        about = [key for key in about if len({run.values.get(key) for run in runs}) > 1]
    numbers = ["best" if narrow else f"best {shared}".strip()]
    if final:
        numbers.append(final.rpartition("/")[2] if narrow else final)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("status", *about):
        table.add_column(column, justify="right" if column == "workers" else "left", no_wrap=True)
    for column in (*numbers, "time" if narrow else "train time"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        values = run.values
        best = _shown(values["best"])
        reached = best if shared or not best else f"{best} {run.objective}"
        status = f"{values['status']}, {STALE}" if run.folder in stale else values["status"]
        described = [str(values.get(key) or "") for key in about]
        took = elapsed(values["time"]) if values["time"] else ""
        shown = [reached, _shown(values.get(final))] if final else [reached]
        table.add_row(*cells(status, *described, *shown, took))
    return table


def as_csv(runs: Sequence[ListedRun]) -> str:
    """Return a line for each run, with every setting and metric that any of them has."""
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(in_csv, keys))
    for run in runs:
        values = dict(run.values)
        if values["started"] is not None:
            began = datetime.fromtimestamp(values["started"])
            values["started"] = began.isoformat(timespec="seconds")
        writer.writerow([in_csv(values.get(key)) for key in keys])
    return text.getvalue()


def side_by_side(first: ListedRun, second: ListedRun) -> Table:
    """Return the settings in which two runs differ, then their results and differences."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", shown_path(first.folder), shown_path(second.folder)):
        table.add_column(cells(column)[0], overflow="fold", no_wrap=not column)
    table.add_column("difference", justify="right", no_wrap=True)
    pairs = [(run.values, run.result) for run in (first, second)]
    metrics = dict.fromkeys(tag for _, result in pairs for tag in result.get("metrics") or {})
    results = ["status", "workers", "best", *metrics, "time"]
    others = {*results, "run", "started"}
    settings = dict.fromkeys(key for values, _ in pairs for key in values if key not in others)
    rows = [(key, *(setting(values.get(key, "")) for values, _ in pairs)) for key in settings]
    rows += [
        (name, *(about(result) for _, result in pairs))
        for name, about in (("commit", _commit), ("versions", _versions))
    ]
    for name, a, b in rows:
        if a != b:
            table.add_row(*cells(name, a, b, ""))
    table.add_section()
    for key in results:
        x, y = (values.get(key) for values, _ in pairs)
        difference = f"{y - x:+.4g}" if isinstance(x, float) and isinstance(y, float) else ""
        table.add_row(*cells(key, _shown(x), _shown(y), difference))
    return table


def _commit(result: Record) -> str:
    git = result.get("git") or {}
    return str(git.get("commit", ""))[:12] + (" with changes" if git.get("diff") else "")


def _versions(result: Record) -> str:
    versions = result.get("versions") or {}
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.4g}" if abs(value) >= 10 else f"{value:.4f}"
