"""`expt report`: runs in a list, or two side by side; a sweep's leaderboard; a verdict on it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from expt import machine, progress
from expt.command import terminal
from expt.command.conclude import conclude, describe_hidden, print_lost
from expt.command.words import Parser
from expt.errors import ConfigError
from expt.runs.failure import in_one_line
from expt.runs.found import FoundRun, without_copies
from expt.runs.grid import in_newest
from expt.runs.paths import is_sweep, write_atomically
from expt.runs.result import COMPLETED, FAILED, LOST
from expt.runs.view import verdict
from expt.runs.view.leaderboard import filtered, leaderboard, read_runs, wide_console
from expt.runs.view.listing import (
    check_key,
    chosen,
    in_order,
    listing_csv,
    print_listing,
    runs_below,
    side_by_side,
)
from expt.runs.view.summary import print_ancestry, print_forks, print_stale, stale
from expt.runs.view.text import (
    Console,
    cells,
    plain_table,
    say,
)
from expt.search.conclusion import best_of, search_in
from expt.search.study import importance, study_of

SHOWN_FAILURES = 8
EXAMPLES = """examples
  python -m expt report outputs                        every run, newest first
  python -m expt report SWEEP                          a sweep's leaderboard
  python -m expt report RUN RUN                        settings and results that differ
  python -m expt report --filter model=mlp --filter 'optimizer.lr<0.1' --sort accuracy/test
  python -m expt report SWEEP --verdict --metric accuracy/test     is the best one better?
  python -m expt report SWEEP --importance --optuna study.log      which settings mattered
  python -m expt report --filter status=completed --csv runs.csv --plot curves.png
"""


@progress.phase("reading the runs")
@machine.seldom_collecting()
def main(words: Sequence[str]) -> int:
    """Print the report that `words` name.

    Raises ConfigError for an option that there is not, and where there is no run.
    """
    asked = parse(words)
    folder, *others = asked.folders
    if asked.optuna:
        _write_study(asked)
    if asked.verdict:
        _judge(asked)
    elif asked.importance:
        _weigh(asked)
    elif not others and is_sweep(folder) and asked.csv != "-" and asked.filter:
        _filtered_leaderboard(folder, asked)
    elif not others and is_sweep(folder) and not (asked.filter or asked.csv or asked.plot):
        _leaderboard(folder, asked)
    else:
        report(wide_console(), asked)
    return 0


def _leaderboard(folder: Path, asked: argparse.Namespace) -> None:
    runs = read_runs(folder)
    if not runs:
        raise ConfigError(f"{folder}: this sweep holds no run yet")
    if asked.sort is not None:
        with _naming("--sort"):
            check_key(asked.sort, runs)
    conclude(wide_console(), folder, runs, asked.sort, all_runs=asked.all)
    print_forks(wide_console(), without_copies(runs)[0])


def _filtered_leaderboard(folder: Path, asked: argparse.Namespace) -> None:
    """Print the rows of a sweep's leaderboard that pass the filters, as they are in the whole."""
    every, hidden = _of_newest(folder, asked)
    with _naming("--filter"):
        kept, among = filtered(every, asked.filter)
    if not kept:
        raise ConfigError(f"none of {len(every)} runs has {' and '.join(asked.filter)}")
    if asked.sort is not None:
        with _naming("--sort"):
            check_key(asked.sort, every)
    best, _ = best_of(folder, kept)
    terminal.put_runs((run.folder, run.record) for run in in_order(kept, asked.sort or "started"))
    terminal.put(best=best and best.as_record)
    console, old = wide_console(), stale(kept)
    written = _write_files(kept, asked)
    console.print(leaderboard(kept, asked.sort, stale=old, among=among))
    print_stale(console, old)
    say(console, f"shown        {len(kept)} of {len(every)} runs: {' and '.join(asked.filter)}")
    if hidden:
        say(console, describe_hidden(folder, hidden))
    for what, file in written.items():
        say(console, f"{what:<13}{file}")


def _judge(asked: argparse.Namespace) -> None:
    """Print whether the settings of the runs differ by more than chance."""
    records = _records(asked)
    if asked.metric is not None:
        with _naming("--metric"):
            check_key(asked.metric, records)
    kept = _within_limits(records)
    notes = list[str]()
    if left_out := len(records) - len(kept):
        notes.append(f"left out: {left_out} completed, for search.constraints")
    try:
        found = verdict.verdicts(kept, asked.metric)
    except ConfigError as error:
        raise ConfigError("; ".join([str(error), *notes])) from None
    others = [{**one._asdict(), "other": one.other.settings} for one in found.others]
    terminal.put(verdict={"best": found.best.settings, "others": others})
    console = wide_console()
    console.print(verdict.verdict_table(found))
    for line in (*found.notes, *notes):
        say(console, line)
    for folder in asked.folders:
        if hidden := _of_newest(folder, asked)[1]:
            say(console, describe_hidden(folder, hidden))


def _records(asked: argparse.Namespace) -> list[FoundRun]:
    runs = [run for folder in asked.folders for run in _of_newest(folder, asked)[0]]
    with _naming("--filter"):
        return filtered(runs, asked.filter)[0]


def _weigh(asked: argparse.Namespace) -> None:
    """Print how much each setting mattered for the objective."""
    console, found = wide_console(), importance(asked.folders[0], _records(asked))
    terminal.put(importance=found)
    for tag, by in found.items():
        table = plain_table((f"importance for {tag}", *by), left=[f"importance for {tag}"])
        for key in next(iter(by.values())):
            table.add_row(*cells(key, *(f"{each.get(key, 0.0):.3f}" for each in by.values())))
        console.print(table)
    say(console, "ped_anova: by what the best runs have in common; fanova: by the variance of all")


def _write_study(asked: argparse.Namespace) -> None:
    """Write the runs as a journal of Optuna's, which optuna-dashboard opens."""
    try:
        if asked.optuna.exists():
            raise ConfigError(f"--optuna {asked.optuna}: is there already; choose another name")
        study_of(asked.folders[0], _records(asked), asked.optuna)
    except OSError as error:
        raise ConfigError(f"--optuna {asked.optuna}: {error.strerror}") from None
    say(wide_console(), f"study        {asked.optuna}; look at it: optuna-dashboard {asked.optuna}")


def _within_limits(runs: Sequence[FoundRun]) -> list[FoundRun]:
    """Return the runs without the completed ones that break their search's limits."""
    by_sweep: dict[Path, list[FoundRun]] = {}
    for run in runs:
        by_sweep.setdefault(run.folder.parent, []).append(run)
    broken = set[Path]()
    for folder, own in by_sweep.items():
        if (search := search_in(folder, own)) and search.limits:
            completed = [run for run in own if run.status == COMPLETED]
            broken.update(run.folder for run in completed if search.breaks_limits(run))
    return [run for run in runs if run.folder not in broken]


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return folders, sort, filter, csv, plot, verdict and metric."""
    about = "List runs, print a sweep's leaderboard, or compare two runs side by side."
    parser = Parser("report", about, EXAMPLES)
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="FOLDER", help="runs, or folders of runs")
    add("--sort", metavar="KEY", help="a column, a setting or a metric; accuracies: highest first")
    add("--filter", action="append", default=[], metavar="KEY=VALUE", help="also != < > <= >=, *")
    add("--all", action="store_true", help="also runs that a sweep's newest grid does not name")
    add("--csv", metavar="FILE", help="all settings and metrics of the runs; - is the terminal")
    add("--verdict", action="store_true", help="test whether settings differ, by seeds")
    add("--metric", metavar="TAG", help="what --verdict compares [objective]")
    add("--importance", action="store_true", help="which settings mattered, by Optuna")
    add("--optuna", type=Path, metavar="FILE", help="write a study for optuna-dashboard")
    add("--plot", type=Path, metavar="FILE", help="draw learning curves: PNG, SVG or PDF")
    found = parser.parse_args(list(words))
    found.folders = found.folders or [Path("outputs")]
    if found.metric and not found.verdict:
        raise ConfigError("--metric: says what --verdict compares; add it")
    return found


def report(console: Console, asked: argparse.Namespace) -> None:
    """Print a list of runs, or two side by side, and write the table and the curves.

    Raises ConfigError where a folder holds no run, or a key or a format is not known.
    """
    runs = [run for folder in asked.folders for run in _below(folder)]
    is_plain = not (asked.sort or asked.filter or asked.csv or asked.plot)
    are_two = len(asked.folders) == len(runs) == 2 and is_plain
    runs = runs if are_two else _asked_for(runs, asked)
    terminal.put_runs((run.folder, run.record) for run in runs)
    if asked.csv == "-":
        sys.stdout.write(listing_csv(runs))
        return
    written = _write_files(runs, asked)
    old = stale(runs)
    if are_two:
        console.print(side_by_side(*runs))
    else:
        print_listing(console, runs, old)
    print_ancestry(console, runs)
    print_stale(console, old)
    print_lost(console, [run.folder for run in runs if run.status == LOST])
    for run in [run for run in runs if run.status == FAILED][-SHOWN_FAILURES:]:
        say(console, f"failed       {run.folder.name}: {in_one_line(run.error)}")
    for what, file in written.items():
        say(console, f"{what:<13}{file}")


def _write_files(runs: Sequence[FoundRun], asked: argparse.Namespace) -> dict[str, object]:
    """Write the table and the curves that are asked for; return the file of each."""
    if asked.csv:
        try:
            write_atomically(Path(asked.csv), listing_csv(runs))
        except OSError as error:
            raise ConfigError(f"--csv {asked.csv}: {error.strerror}") from None
    if asked.plot:
        from expt.runs.view import curves  # late: matplotlib, an extra

        with _naming("--plot"):
            curves.learning_curves(runs, asked.plot)
    return {what: file for what, file in (("table", asked.csv), ("curves", asked.plot)) if file}


def _below(folder: Path) -> list[FoundRun]:
    runs = runs_below(folder)
    if not runs:
        raise ConfigError(f"{folder}: holds no run; start one with python -m expt")
    return runs


def _of_newest(folder: Path, asked: argparse.Namespace) -> tuple[list[FoundRun], list[FoundRun]]:
    """Return the runs below a folder, and those that the newest grid of a sweep corrects."""
    runs = _below(folder)
    return (runs, []) if asked.all or not is_sweep(folder) else in_newest(folder, runs)


def _asked_for(runs: Sequence[FoundRun], asked: argparse.Namespace) -> list[FoundRun]:
    with _naming("--filter"):
        left = chosen(runs, asked.filter)
    if not left:
        raise ConfigError(f"none of {len(runs)} runs has {' and '.join(asked.filter)}")
    with _naming("--sort"):
        check_key(asked.sort or "started", runs)
    return in_order(left, asked.sort or "started")


@contextlib.contextmanager
def _naming(option: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{option} {error}") from None
