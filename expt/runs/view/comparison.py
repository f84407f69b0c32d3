"""Any runs in a list, or two of them side by side."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from expt.errors import printable
from expt.runs.result import Record
from expt.runs.view.cells import cells, in_csv, say, setting
from expt.runs.view.progress import WIDE, shown_path
from expt.runs.view.query import ListedRun, best_first
from expt.runs.view.stale import WORD
from expt.runs.view.units import elapsed


def print_listing(
    console: Console, runs: Sequence[ListedRun], stale: Collection[Path] = ()
) -> None:
    """A line for each run; where folders do not fit into it, those around several runs have lines
    of their own.

    Where that does not do either, each run's has, to be copied whole.
    """
    paths = [printable(str(run.values["run"])) for run in runs]
    whole, narrow = [("", path) for path in paths], min(console.width, WIDE - 1)
    for width, named in ((console.width, whole), (narrow, whole), (narrow, _below_headings(paths))):
        table, longest = (
            _listing(runs, width, stale),
            max(len(name) for _, name in (*named, ("", "run"))),
        )
        if longest + 2 + console.measure(table).maximum <= console.width:
            for line, (heading, name) in zip(
                _lines(console, table), [("", "run"), *named], strict=True
            ):
                if heading:
                    say(console, heading)
                console.print(
                    Text.assemble(
                        (name.ljust(longest), "bold" if name == "run" else ""), "  ", line
                    )
                )
            return
    for line, path in zip(_lines(console, table), ["", *paths], strict=True):
        if path:
            say(console, path)
        console.print(Text.assemble("  ", line), soft_wrap=True)


def _below_headings(paths: Sequence[str]) -> list[tuple[str, str]]:
    """A heading, or none, and a name for each: neighbours in one folder have that as heading of the
    first.
    """
    named = list[tuple[str, str]]()
    for folder, group in itertools.groupby(paths, key=lambda path: path.rpartition("/")[0]):
        names = list(group)
        if len(names) == 1 or not folder:
            named += [("", name) for name in names]
        else:
            headings = [f"{folder}/", *[""] * (len(names) - 1)]
            named += [
                (heading, f"  {name.rpartition('/')[2]}")
                for heading, name in zip(headings, names, strict=True)
            ]
    return named


def _lines(console: Console, table: Table) -> list[Text]:
    with console.capture() as captured:
        console.print(
            table, width=max(console.width, console.measure(table).maximum), soft_wrap=True
        )
    return [Text.from_ansi(line) for line in captured.get().splitlines()]


def _listing(runs: Sequence[ListedRun], width: int, stale: Collection[Path]) -> Table:
    """The columns but the folder; in a narrow terminal without what is the same for all runs."""
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
        reached = _shown(values["best"]) + (
            "" if shared or values["best"] is None else f" {run.objective}"
        )
        status = f"{values['status']}, {WORD}" if run.folder in stale else values["status"]
        described = [str(values.get(key) or "") for key in about]
        took = elapsed(values["time"]) if values["time"] else ""
        values_shown = [reached, _shown(values.get(final))] if final else [reached]
        table.add_row(*cells(status, *described, *values_shown, took))
    return table


def as_csv(runs: Sequence[ListedRun]) -> str:
    """A line for each run, with every setting and metric that any of them has."""
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(in_csv, keys))
    for run in runs:
        values = dict(run.values)
        if values["started"] is not None:
            values["started"] = datetime.fromtimestamp(values["started"]).isoformat(
                timespec="seconds"
            )
        writer.writerow([in_csv(values.get(key)) for key in keys])
    return text.getvalue()


def side_by_side(first: ListedRun, second: ListedRun) -> Table:
    """The settings in which two runs differ, then their results, with the difference of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", shown_path(first.folder), shown_path(second.folder), "difference"):
        name_or_number = column in ("", "difference")
        justify: Literal["left", "right"] = "right" if column == "difference" else "left"
        table.add_column(cells(column)[0], overflow="fold", justify=justify, no_wrap=name_or_number)
    pairs = [(run.values, run.result) for run in (first, second)]
    metrics = dict.fromkeys(tag for _, result in pairs for tag in result.get("metrics") or {})
    results = ["status", "workers", "best", *metrics, "time"]
    settings = dict.fromkeys(
        key for values, _ in pairs for key in values if key not in {*results, "run", "started"}
    )
    for key in settings:
        a, b = (values.get(key, "") for values, _ in pairs)
        if a != b:
            table.add_row(*cells(key, setting(a), setting(b), ""))
    for name, about in (("commit", _commit), ("versions", _versions)):
        a, b = (about(result) for _, result in pairs)
        if a != b:
            table.add_row(*cells(name, a, b, ""))
    table.add_section()
    for key in results:
        a, b = (values.get(key) for values, _ in pairs)
        difference = f"{b - a:+.4g}" if isinstance(a, float) and isinstance(b, float) else ""
        table.add_row(*cells(key, _shown(a), _shown(b), difference))
    return table


def _commit(result: Record) -> str:
    git = result.get("git") or {}
    return str(git.get("commit", ""))[:12] + (" with changes" if git.get("diff") else "")


def _versions(result: Record) -> str:
    return ", ".join(
        f"{name} {version}" for name, version in (result.get("versions") or {}).items()
    )


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.4g}" if abs(value) >= 10 else f"{value:.4f}"
