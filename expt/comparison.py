"""Any runs in a list, or two of them side by side: what `python -m expt.report` prints beside a sweep's leaderboard."""

from __future__ import annotations

import argparse
import csv
import fnmatch
import functools
import io
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from expt import record
from expt.display import WIDE, duration, shown_path
from expt.errors import ConfigError, did_you_mean
from expt.identity import hyperparameters

EXAMPLES = """examples
  python -m expt.report outputs                          every run, newest first
  python -m expt.report outputs/sweeps/2026-11-21_10-00-00     a sweep's leaderboard
  python -m expt.report RUN RUN                          two runs side by side: settings and results that differ
  python -m expt.report --filter model=mlp --filter 'optimizer.lr<0.1' --sort accuracy/test
  python -m expt.report --filter status=completed --csv runs.csv --plot curves.png
"""
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The words of the command."""

    folders: tuple[Path, ...]
    sort: str | None
    reverse: bool
    filters: tuple[str, ...]
    csv: str | None
    plot: Path | None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked but to look at the folder."""
        return not (self.sort or self.reverse or self.filters or self.csv or self.plot)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m expt.report --help")


def parse(words: Sequence[str]) -> Asked:
    """Raises ConfigError for a word that is not understood."""
    parser = _Parser(
        prog="python -m expt.report",
        description="Look at runs: a list, a sweep's leaderboard, or two runs side by side.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="runs, or what holds some (outputs)")
    parser.add_argument("--sort", metavar="KEY", help="a column, a setting or a metric; accuracies: highest first")
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument("--filter", action="append", default=[], metavar="KEY=VALUE", help="also != < > <= >=, and *")
    parser.add_argument("--csv", metavar="FILE", help="all settings and metrics of the chosen runs; - is the terminal")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="their learning curves, as PNG, SVG or PDF")
    found = parser.parse_args(list(words))
    return Asked(
        folders=tuple(found.folders) or (Path("outputs"),),
        sort=found.sort,
        reverse=found.reverse,
        filters=tuple(found.filter),
        csv=found.csv,
        plot=found.plot,
    )


@dataclass(frozen=True)
class Run:
    """A run's folder, and what result.json says of it."""

    folder: Path
    result: Mapping[str, Any]

    @functools.cached_property
    def values(self) -> Mapping[str, Any]:
        """All that a run can be chosen or sorted by: columns, settings and metrics."""
        result, metrics = self.result, self.result.get("metrics") or {}
        best = result.get("best") or {}
        return {
            "run": shown_path(self.folder),
            "started": result.get("started"),
            "status": result.get("status"),
            "workers": result.get("world_size"),
            "best": best.get("value", metrics.get(f"best/{self.objective}", metrics.get(self.objective))),
            "time": sum(result.get("epoch_s") or [0.0]),
            **hyperparameters(result.get("config") or {}),
            **metrics,
        }

    @property
    def objective(self) -> str:
        """What its best value is a value of."""
        config: Mapping[str, Any] = self.result.get("config") or {}
        return str((self.result.get("objective") or {}).get("name") or config.get("objective", ""))


def report(console: Console, asked: Asked) -> None:
    """Do what was asked. Raises ConfigError where a folder holds no run, or a key or a format is not known."""
    runs = [run for folder in asked.folders for run in _runs(folder)]
    if len(asked.folders) == 2 and len(runs) == 2 and asked.is_plain:
        console.print(side_by_side(*runs))
        return
    runs = chosen(runs, asked)
    if asked.csv == "-":
        sys.stdout.write(as_csv(runs))
        return
    console.print(listing(runs, console.width))
    if asked.csv:
        record.write_atomically(Path(asked.csv), as_csv(runs))
        console.print(f"table        {asked.csv}", highlight=False, soft_wrap=True)
    if asked.plot:
        from expt import plot  # late: matplotlib, an extra

        plot.learning_curves([run.folder for run in runs], asked.plot)
        console.print(f"curves       {asked.plot}", highlight=False, soft_wrap=True)


def _runs(folder: Path) -> list[Run]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    found = [Run(paths.folder, result) for paths, result in record.results_below(folder)]
    if not found:
        raise ConfigError(f"{folder}: holds no run; start one with python -m expt")
    return found


def chosen(runs: Sequence[Run], asked: Asked) -> list[Run]:
    """The runs that pass every filter, in the order asked for: else newest first."""
    known = {key for run in runs for key in run.values}
    tests = [_test(text, known) for text in asked.filters]
    left = [run for run in runs if all(test(run.values) for test in tests)]
    if not left:
        raise ConfigError(f"none of {len(runs)} runs has {' and '.join(asked.filters)}")
    key = asked.sort or "started"
    _check_key("--sort", key, known)
    objectives = {run.objective for run in left}
    falls = key == "started" or "accuracy" in (key if key != "best" else " ".join(objectives))
    having = [run for run in left if run.values.get(key) not in (None, "") and run.values[key] == run.values[key]]
    mixed = len({isinstance(run.values[key], str) for run in having}) > 1
    having.sort(key=lambda run: str(run.values[key]) if mixed else run.values[key], reverse=falls != asked.reverse)
    return [*having, *(run for run in left if run not in having)]  # without a value, or with nan: last, either way


def _check_key(option: str, key: str, known: set[str]) -> None:
    if key not in known:
        raise ConfigError(f"{option} {key}: no run has such a column, setting or metric.{did_you_mean(key, known)}")


def _test(text: str, known: set[str]) -> Callable[[Mapping[str, Any]], bool]:
    match = re.fullmatch(r"([^=!<>]+)(=|!=|<=|>=|<|>)(.*)", text)
    if match is None:
        raise ConfigError(f"--filter {text}: write KEY=VALUE, with = != < > <= or >=")
    key, how, wanted = match.groups()
    _check_key("--filter", key, known)
    if how in ("=", "!="):
        return lambda values: _equal(values.get(key), wanted) == (how == "=")
    limit = _number(wanted)
    if limit is None:
        raise ConfigError(f"--filter {text}: {wanted!r} is no number")

    def within(values: Mapping[str, Any]) -> bool:
        value = _number(values.get(key))
        return value is not None and _COMPARE[how](value, limit)

    return within


def _equal(value: Any, wanted: str) -> bool:
    number = _number(wanted)
    if number is not None and not isinstance(value, bool) and _number(value) is not None:
        return _number(value) == number
    return fnmatch.fnmatchcase(str(value).lower() if isinstance(value, bool) else str(value), wanted)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def listing(runs: Sequence[Run], width: int) -> Table:
    """A line for each run; in a narrow terminal without what is the same for all of them."""
    objectives = {run.objective for run in runs if run.objective}
    shared = objectives.pop() if len(objectives) == 1 else ""
    final = next((tag for tag in ("accuracy/test", "accuracy/val") if any(tag in run.values for run in runs)), "final")
    about = ["model", "dataset", "workers"]
    if width < WIDE:
        about = [key for key in about if len({run.values.get(key) for run in runs}) > 1]
    best, last = ("best", final.rpartition("/")[2]) if width < WIDE else (f"best {shared}".strip(), final)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    for column in ("status", *about):
        table.add_column(column, justify="right" if column == "workers" else "left", no_wrap=True)
    for column in (best, last, "time"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        values = run.values
        reached = _shown(values["best"]) + ("" if shared or values["best"] is None else f" {run.objective}")
        cells = [str(values.get(key) or "") for key in ("run", "status", *about)]
        seconds = values["time"]
        took = f"{seconds:.1f} s" if seconds < 60 else duration(seconds)
        table.add_row(*cells, reached, _shown(values.get(final)), took if seconds else "")
    return table


def as_csv(runs: Sequence[Run]) -> str:
    """A line for each run, with every setting and metric that any of them has."""
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, lineterminator="\n")
    writer.writeheader()
    for run in runs:
        values = dict(run.values)
        if values["started"] is not None:
            values["started"] = datetime.fromtimestamp(values["started"]).isoformat(timespec="seconds")
        writer.writerow(values)
    return text.getvalue()


def side_by_side(first: Run, second: Run) -> Table:
    """The settings in which two runs differ, then their results, with the difference of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", shown_path(first.folder), shown_path(second.folder), "difference"):
        name_or_number = column in ("", "difference")
        table.add_column(
            column, overflow="fold", justify="right" if column == "difference" else "left", no_wrap=name_or_number
        )
    pairs = [(run.values, run.result) for run in (first, second)]
    metrics = dict.fromkeys(tag for _, result in pairs for tag in result.get("metrics") or {})
    results = ["status", "workers", "best", *metrics, "time"]
    settings = dict.fromkeys(key for values, _ in pairs for key in values if key not in {*results, "run", "started"})
    for key in settings:
        a, b = (values.get(key, "") for values, _ in pairs)
        if a != b:
            table.add_row(key, str(a), str(b), "")
    for name, about in (("commit", _commit), ("versions", _versions)):
        a, b = (about(result) for _, result in pairs)
        if a != b:
            table.add_row(name, a, b, "")
    table.add_section()
    for key in results:
        a, b = (values.get(key) for values, _ in pairs)
        difference = f"{b - a:+.4g}" if isinstance(a, float) and isinstance(b, float) else ""
        table.add_row(key, _shown(a), _shown(b), difference)
    return table


def _commit(result: Mapping[str, Any]) -> str:
    git = result.get("git") or {}
    return str(git.get("commit", ""))[:12] + (" with changes" if git.get("diff") else "")


def _versions(result: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in (result.get("versions") or {}).items())


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.4g}" if abs(value) >= 10 else f"{value:.4f}"
