"""`expt report`: runs in a list, or two side by side; a sweep's leaderboard, which also ends it."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from expt import machine, progress
from expt.command import terminal
from expt.command.words import Parser
from expt.config.own_code import is_of_main, targets
from expt.errors import ConfigError, warn
from expt.runs.failure import faults_in, in_one_line
from expt.runs.found import FoundRun, by_objective, describe_copies, without_copies
from expt.runs.overrides import joined
from expt.runs.paths import RunPaths, is_sweep, write_atomically
from expt.runs.result import COMPLETED, DAMAGED, FAILED, LOST, PRUNED, device_s
from expt.runs.view import verdict
from expt.runs.view.leaderboard import leaderboard, read_runs, wide_console, write_summary
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
    amount,
    cells,
    kilowatt_hours,
    plain_table,
    resume_command,
    say,
    shown_path,
)
from expt.search.conclusion import (
    bad_trials,
    best_of,
    conclude_search,
    importance,
    search_in,
    study_of,
)

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
    conclude(wide_console(), folder, runs, asked.sort)
    print_forks(wide_console(), without_copies(runs)[0])


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


def _records(asked: argparse.Namespace) -> list[FoundRun]:
    runs = [run for folder in asked.folders for run in _below(folder)]
    with _naming("--filter"):
        return chosen(runs, asked.filter)


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
    are_two = len(asked.folders) == 2 and len(runs) == 2 and is_plain
    runs = runs if are_two else _asked_for(runs, asked)
    terminal.put_runs((run.folder, run.record) for run in runs)
    if are_two:
        console.print(side_by_side(*runs))
        print_ancestry(console, runs)
        print_stale(console, stale(runs))
        return
    if asked.csv == "-":
        sys.stdout.write(listing_csv(runs))
        return
    if asked.csv:
        try:
            write_atomically(Path(asked.csv), listing_csv(runs))
        except OSError as error:
            raise ConfigError(f"--csv {asked.csv}: {error.strerror}") from None
    if asked.plot:
        from expt.runs.view import curves  # late: matplotlib, an extra

        with _naming("--plot"):
            curves.learning_curves(runs, asked.plot)
    old = stale(runs)
    print_listing(console, runs, old)
    print_ancestry(console, runs)
    print_stale(console, old)
    print_lost(console, [run.folder for run in runs if run.status == LOST])
    for run in [run for run in runs if run.status == FAILED][-SHOWN_FAILURES:]:
        say(console, f"failed       {run.folder.name}: {in_one_line(run.error)}")
    if asked.csv:
        say(console, f"table        {asked.csv}")
    if asked.plot:
        say(console, f"curves       {asked.plot}")


def _below(folder: Path) -> list[FoundRun]:
    runs = runs_below(folder)
    if not runs:
        raise ConfigError(f"{folder}: holds no run; start one with python -m expt")
    return runs


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


def conclude(
    console: Console,
    folder: Path,
    runs: Sequence[FoundRun] | None = None,
    sort: str | None = None,
    *,
    notes: Sequence[str] = (),
) -> None:
    """Write summary.csv and summary.md of a sweep; print the leaderboard and the failures.

    `runs` are those of the folder, where they have just been read. `notes` are lines of the command
    that ends.
    """
    runs, copies = without_copies(read_runs(folder) if runs is None else runs)
    _put(folder, runs, sort)
    if not runs:
        for note in notes:  # of a budget that no run could begin within, maybe
            say(console, note)
        return
    old = stale(runs)
    try:
        console.print(leaderboard(runs, sort, stale=old))
    finally:  # after the table, for which somebody may wait
        written = _write_summary(folder, runs)
    _print_failures(console, runs, notes)
    conclude_search(console, folder, runs, again)
    print_stale(console, old)
    print_lost(console, [run.folder for run in runs if run.status == LOST])
    for line in _pruned(runs):
        say(console, line)
    for run in (run for run in runs if run.status == DAMAGED):
        file = shown_path(run.paths.result)
        say(console, f"damaged      {file} cannot be read, and is not counted")
    if copies:
        say(console, f"left out     {describe_copies(copies)}")
    for line in (*_costs(runs), *notes):
        say(console, line)
    if written:
        say(console, f"summary      {shown_path(folder / 'summary.csv')}, summary.md")
    logdir = shlex.quote(shown_path(folder))
    say(console, f"look at it   tensorboard --logdir {logdir}")


def _put(folder: Path, runs: Sequence[FoundRun], sort: str | None) -> None:
    best, front = best_of(folder, runs)
    ranked = in_order(runs, sort) if sort else runs
    terminal.put_runs((run.folder, run.record) for run in ranked)
    terminal.put(
        sweep=str(folder.absolute()),
        best_run=best and str(best.folder.absolute()),
        pareto=[str(run.folder.absolute()) for run in front],
    )


def _pruned(runs: Sequence[FoundRun]) -> Iterator[str]:
    """Yield how many runs are pruned at a rung, and the command that resumes the best."""
    pruned = [run for run in runs if run.status == PRUNED]
    if not pruned:
        return
    total = sum(run.status != DAMAGED for run in runs)  # which count nowhere
    yield f"pruned       {len(pruned)} of {total} runs"
    if kept := by_objective(run for run in pruned if run.record.get("resumable", True)):
        yield f"      to train the best to its end: {resume_command(kept[0].paths)}"


def _costs(runs: Sequence[FoundRun]) -> Iterator[str]:
    """Yield the cost of all runs together: the time of each device is counted."""
    spent = [run.record for run in runs if device_s(run.record) > 0]
    for kind in ("core", "GPU"):
        found = [record for record in spent if bool(record.get("devices")) == (kind == "GPU")]
        if not found:
            continue
        line = f"{kind + ' time':<13}{amount(sum(map(device_s, found)))} of {len(found)} run"
        line += "s" * (len(found) > 1)
        if joules := [record["energy_j"] for record in found if "energy_j" in record]:
            known = "" if len(joules) == len(found) else f" of {len(joules)} of them"
            line += f", {kilowatt_hours(sum(joules))}{known}"
        yield line


def _write_summary(folder: Path, runs: Sequence[FoundRun]) -> bool:
    try:
        write_summary(folder, runs)
    except OSError as error:  # a full disk, maybe: the table is still worth seeing
        warn(f"{folder}: {error.strerror}; summary.csv and summary.md are not written")
        return False
    return True


def print_lost(console: Console, folders: Sequence[Path]) -> None:
    """Name runs that were killed, and how to resume them."""
    for folder in folders:
        lost = "says that it is running, but has no process; it was killed"
        say(console, f"lost         {shown_path(folder)} {lost}")
        say(console, f"      to continue: {resume_command(RunPaths(folder))}")


def _print_failures(console: Console, runs: Sequence[FoundRun], notes: Sequence[str]) -> None:
    bad = bad_trials(runs)
    if bad:
        worst = "diverged or had not enough memory, and count as the worst"
        say(console, f"bad trials   {len(bad)} {worst}")
    if failed := [run for run in runs if run.status == FAILED and run not in bad]:
        say(console, f"\n{len(failed)} failed", "bold red")
    for run in failed:
        say(console, f"  {run.folder.name}: {in_one_line(run.error)}")
        if "identity" in run.record:  # else it was refused, and would be again
            say(console, f"      again: {again(run)}")
    texts = [run.error for run in runs if run.status == FAILED]
    for fault in dict.fromkeys(fault for text in texts for fault in faults_in(text)):
        if not any(fault in note for note in notes):  # of runs that were moved
            say(console, f"GPU fault    {fault}")


def again(run: FoundRun) -> str:
    """Return the command that trains one run of a sweep by itself."""
    if any(map(is_of_main, targets(run.config))):  # its folder has it, no command
        return shlex.join(["python", "-m", "expt", "rerun", shown_path(run.folder)])
    words = shlex.split(run.record.get("command", ""))
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    words = words[1:] if words[:1] == ["expt"] else []  # the words of a script are its own
    kept = [word for word in words if word not in ("-m", "--multirun", "-q", "--quiet", "--json")]
    # Options such as --config-dir DIR stay; all settings are the run's own.
    kept = [word for word in kept if not re.match(r"[^-].*=|~", word)]
    # It begins in a folder of its own, where there is nothing to resume.
    own = [word for word in run.record.get("arguments", ()) if word.lstrip("+") != "resume=auto"]
    mode = ["hydra.mode=RUN"] if any(word.startswith("sweep=") for word in own) else []
    return joined(["python", "-m", "expt", *kept, *own, *mode])
