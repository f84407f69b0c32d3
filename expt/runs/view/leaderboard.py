"""A sweep in a table: the leaderboard, best first, and summary.csv and summary.md."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from expt.config.identity import hyperparameters
from expt.runs.result import COMPLETED, FoundRecord, results, write_atomically
from expt.runs.view.progress import elapsed
from expt.runs.worker_error import in_one_line


@dataclass(frozen=True)
class Row:
    """Runs that differ by their seed alone; most often just one."""

    settings: dict[str, Any]
    runs: tuple[FoundRecord, ...]

    @property
    def values(self) -> list[float]:
        """The objective of each completed run."""
        found = [run["objective"]["value"] for run in self.runs if run.get("objective")]
        return [value for value in found if value is not None]

    @property
    def mean(self) -> float:
        """Mean of the objective; nan where no run has completed."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation over seeds; 0 for one run."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def status(self) -> str:
        """`completed`, or how many are."""
        done = sum(run["status"] == COMPLETED for run in self.runs)
        if len(self.runs) == 1:
            return str(self.runs[0]["status"])
        return COMPLETED if done == len(self.runs) else f"{done} of {len(self.runs)} completed"

    @property
    def seconds(self) -> float:
        """Mean training time of a run."""
        return statistics.fmean(sum(run.get("epoch_s") or [0.0]) for run in self.runs)


def read_runs(folder: Path) -> list[FoundRecord]:
    """What result.json says of every run below `folder`, with its path under `folder`."""
    return [{**result, "folder": paths.folder} for paths, result in results(folder)]


def rows(runs: Sequence[FoundRecord]) -> list[Row]:
    """The leaderboard: best first, what has no result last."""
    groups: dict[str, list[FoundRecord]] = {}
    keys = _varied(runs)
    for run in runs:
        settings = {key: _setting(run, key) for key in keys}
        groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    found = [Row({key: _setting(group[0], key) for key in keys}, tuple(group)) for group in groups.values()]
    falling = not _objective(runs).startswith("loss")
    return sorted(found, key=lambda row: (math.isnan(row.mean), -row.mean if falling else row.mean))


def wide_console() -> Console:
    """The terminal; where there is none, lines are as long as what they hold."""
    return Console() if sys.stdout.isatty() else Console(width=1000)


def leaderboard(runs: Sequence[FoundRecord]) -> Table:
    """The table of `rows`."""
    found, objective = rows(runs), _objective(runs)
    keys = list(dict.fromkeys(key for row in found for key in row.settings))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (*keys, objective, "status", "time"):
        table.add_column(column, justify="right" if column in (objective, "time") else "left", overflow="fold")
    for row in found:
        settings = [str(row.settings.get(key, "")) for key in keys]
        table.add_row(*settings, _value(row), row.status, elapsed(row.seconds))
    return table


def write_summary(folder: Path, runs: Sequence[FoundRecord]) -> None:
    """summary.csv has a line for each run, summary.md the leaderboard."""
    keys = _given(runs)
    tags = list(dict.fromkeys(tag for run in runs for tag in run.get("metrics") or {}))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "status", "identity", *keys, "objective", *tags, "train_s", "error"])
    for run in runs:
        metrics = run.get("metrics") or {}
        objective = run.get("objective")
        error = in_one_line(str(run.get("error") or ""))
        numbers = [
            _cell(objective["value"] if objective else None),
            *(_cell(metrics.get(tag)) for tag in tags),
            _cell(sum(run.get("epoch_s") or [0.0])),
        ]
        settings = [_cell(_setting(run, key)) for key in keys]
        writer.writerow([run["folder"].name, run["status"], run.get("identity", ""), *settings, *numbers, error])
    write_atomically(folder / "summary.csv", text.getvalue())
    write_atomically(folder / "summary.md", "\n".join(_markdown(runs)) + "\n")


def _markdown(runs: Sequence[FoundRecord]) -> Iterator[str]:
    found, objective = rows(runs), _objective(runs)
    keys = list(dict.fromkeys(key for row in found for key in row.settings))
    yield "| " + " | ".join([*keys, objective, "status", "train_s"]) + " |"
    yield "|" + "---|" * (len(keys) + 3)
    for row in found:
        cells = [*(str(row.settings.get(key, "")) for key in keys), _value(row), row.status, f"{row.seconds:.1f}"]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(row: Row) -> str:
    if not row.values:
        return ""
    spread = f" ± {row.std:.4f} ({len(row.values)})" if len(row.values) > 1 else ""
    return f"{row.mean:.4f}{spread}"


def _varied(runs: Sequence[FoundRecord]) -> list[str]:
    """The settings in which the runs differ, but for the seed; all that were given where they don't."""
    keys = [key for key in _given(runs) if key not in ("seed", "sweep")]
    return [key for key in keys if len({str(_setting(run, key)) for run in runs}) > 1] or keys


def _given(runs: Sequence[FoundRecord]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run.get("overrides", {})))


def _setting(run: FoundRecord, key: str) -> Any:
    """The value of a key, whether it was given for this run or is its default."""
    overrides = run.get("overrides", {})
    return overrides[key] if key in overrides else hyperparameters(run.get("config") or {}).get(key, "")


def _objective(runs: Sequence[FoundRecord]) -> str:
    return next((run["objective"]["name"] for run in runs if run.get("objective")), "objective")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
