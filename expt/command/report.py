"""`expt report`: a sweep's leaderboard, a list of runs, or two of them side by side."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from expt.errors import ConfigError
from expt.runs.paths import is_sweep
from expt.runs.result import write_atomically
from expt.runs.view.comparison import as_csv, listing, side_by_side
from expt.runs.view.leaderboard import conclude, read_runs, wide_console
from expt.runs.view.query import Query, chosen, runs_below


def main() -> None:
    """What sys.argv asks for: a sweep's leaderboard, a list of runs, or two runs side by side; see expt.runs.view."""
    try:
        asked = parse(sys.argv[1:])
        (folder, *others) = asked.folders
        if not others and is_sweep(folder) and asked.is_plain:
            if not read_runs(folder):
                raise ConfigError(f"{folder}: this sweep holds no run yet")
            conclude(wide_console(), folder)
        else:
            report(wide_console(), asked)
        sys.stdout.flush()
    except ConfigError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        sys.exit(1)


EXAMPLES = """examples
  python -m expt.report outputs                          every run, newest first
  python -m expt.report outputs/sweeps/2026-11-21_10-00-00     a sweep's leaderboard
  python -m expt.report RUN RUN                          two runs side by side: settings and results that differ
  python -m expt.report --filter model=mlp --filter 'optimizer.lr<0.1' --sort accuracy/test
  python -m expt.report --filter status=completed --csv runs.csv --plot curves.png
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m expt.report --help")


def parse(words: Sequence[str]) -> Query:
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
    return Query(
        folders=tuple(found.folders) or (Path("outputs"),),
        sort=found.sort,
        reverse=found.reverse,
        filters=tuple(found.filter),
        csv=found.csv,
        plot=found.plot,
    )


def report(console: Console, asked: Query) -> None:
    """Do what was asked. Raises ConfigError where a folder holds no run, or a key or a format is not known."""
    runs = [run for folder in asked.folders for run in runs_below(folder)]
    if len(asked.folders) == 2 and len(runs) == 2 and asked.is_plain:
        console.print(side_by_side(*runs))
        return
    runs = chosen(runs, asked)
    if asked.csv == "-":
        sys.stdout.write(as_csv(runs))
        return
    console.print(listing(runs, console.width))
    if asked.csv:
        write_atomically(Path(asked.csv), as_csv(runs))
        console.print(f"table        {asked.csv}", highlight=False, soft_wrap=True)
    if asked.plot:
        from expt.runs.view import plot  # late: matplotlib, an extra

        plot.learning_curves([run.folder for run in runs], asked.plot)
        console.print(f"curves       {asked.plot}", highlight=False, soft_wrap=True)
