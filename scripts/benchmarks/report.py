"""What the bench tells: a table in the terminal, a file of JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.comparison import OURS, Comparison


def describe_machine(gpus: int) -> dict[str, Any]:
    """What the numbers depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def write_json(path: Path, machine: dict[str, Any], comparisons: Sequence[Comparison]) -> None:
    """Everything that was measured, each round."""
    content = {"machine": machine, "results": [comparison.as_dict() for comparison in comparisons]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def print_table(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Medians; the others' with the ratio of ours to theirs."""
    others = list(
        dict.fromkeys(name for found in comparisons for name in found.values if name != OURS)
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("measure")
    table.add_column("case")
    for name in (OURS, *others):
        table.add_column(name, justify="right")
    table.add_column("bar", justify="right")
    for found in comparisons:
        cells = [_cell(found, name) for name in (OURS, *others)]
        table.add_row(found.measure, found.case, *cells, _bar(found))
    console.print(table)
    console.print(
        "Medians; in brackets, expt's value divided by the other's (the median of the rounds'"
        " ratios)."
    )


def _cell(found: Comparison, name: str) -> str:
    if name not in found.values:
        return ""
    median = found.median(name)
    shown = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
    if name == OURS:
        return f"{shown} {found.unit if len(found.unit) < 8 else ''}".rstrip()
    return f"{shown} ({found.ratios[name]:.3g})"


def _bar(found: Comparison) -> str:
    bars = [f"≤{bar:g} {name}" for name, bar in found.at_most.items()]
    if found.at_least is not None:
        bars.append(f"≥{found.at_least:g}")
    mark = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[found.met]
    return f"{', '.join(bars)} {mark}".strip()
