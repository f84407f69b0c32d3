"""`expt report`: runs in a list, or two side by side; a sweep's leaderboard; a verdict on it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from expt import progress
from expt.command import terminal
from expt.command.conclude import conclude, describe_hidden, print_lost
from expt.command.words import Parser
from expt.errors import ConfigError
from expt.inference.writing import new_file
from expt.runs.failure import in_one_line
from expt.runs.found import FoundRun, in_newest, without_copies
from expt.runs.paths import is_sweep
from expt.runs.result import COMPLETED, FAILED
from expt.runs.view import verdict
from expt.runs.view.leaderboard import leaderboard
from expt.runs.view.listing import (
    check_key,
    chosen,
    in_order,
    listing_csv,
    print_listing,
    runs_below,
    side_by_side,
)
from expt.runs.view.settings import filtered, read_runs
from expt.runs.view.summary import print_ancestry, print_forks, print_stale, stale
from expt.runs.view.text import Console, say
from expt.search.conclusion import best_of, importance, importance_tables, search_in, study_of

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


class Asked(argparse.Namespace):
    """The options of a report, by their names."""

    folders: list[Path]
    sort: str | None
    filter: list[str]
    all: bool
    csv: Path | None
    verdict: bool
    metric: str | None
    importance: bool
    optuna: Path | None
    html: Path | None
    plot: Path | None
    force: bool

    @functools.cached_property
    def of_sweep(self) -> bool:
        """True for one folder, which is a sweep's."""
        return len(self.folders) == 1 and is_sweep(self.folders[0])

    @property
    def form(self) -> str:
        """The option that asks for another form than a list or a table; empty without one."""
        return next((form for form in FORMS if getattr(self, form, None)), "")

    @property
    def is_plain(self) -> bool:
        """True if no option chooses a form, runs or files."""
        return not (self.form or self.filter or self.csv or self.plot)

    @functools.cached_property
    def found(self) -> Found:
        """The runs, which are read when a form needs them."""
        return Found.below(self)


@progress.phase("reading the runs")
def main(words: Sequence[str]) -> int:
    """Print the report that `words` name.

    Raises ConfigError for an option that there is not, and where there is no run.
    """
    asked = parse(words)
    if asked.html and not asked.of_sweep:
        raise ConfigError("--html: is about one sweep; name its folder")
    console = Console(stderr=asked.csv == Path("-"))  # stdout is the table's
    if asked.optuna:
        _write_study(console, asked, asked.optuna, asked.found)
    if asked.of_sweep and asked.is_plain:
        _print_leaderboard(console, asked)
    else:
        FORMS[asked.form](console, asked, asked.found)
        asked.found.print_hidden(console)
    return 0


class Found(NamedTuple):
    """The runs of a report: all forms of it are of the same."""

    runs: list[FoundRun]
    hidden: dict[Path, list[FoundRun]]
    """Those that the newest grid of each sweep corrects; no form of the report has them."""

    @classmethod
    def below(cls, asked: Asked) -> Found:
        """Return the runs below the folders; with `--all`, or named one by one, none is hidden."""
        runs = list[FoundRun]()
        for folder in asked.folders:
            own = runs_below(folder)
            if not own:
                raise ConfigError(f"{folder}: holds no run; start one with python -m expt")
            runs += own
        may_hide = [] if asked.all else [run for run in runs if run.folder not in asked.folders]
        hidden = {sweep: in_newest(sweep, own)[1] for sweep, own in _by_sweep(may_hide).items()}
        left_out = {run.folder for each in hidden.values() for run in each}
        shown = [run for run in runs if run.folder not in left_out]
        return cls(shown, {sweep: each for sweep, each in hidden.items() if each})

    def print_hidden(self, console: Console) -> None:
        """Print how many runs each sweep hides."""
        terminal.put(hidden=[str(run.folder.absolute()) for run in self._left_out])
        for sweep, runs in self.hidden.items():
            say(console, describe_hidden(sweep, runs))

    @contextlib.contextmanager
    def naming(self, option: str = "") -> Iterator[None]:
        """Add the option to an error of the body, and that runs are hidden, which may have it."""
        try:
            yield
        except ConfigError as error:
            text = f"{option} {error}".strip()
            if number := len(self._left_out):
                why = "as the newest grid no longer names them: add --all"
                text += f"; {number} more are hidden, {why}"
            raise ConfigError(text) from None

    def check(self, option: str, key: str | None, runs: Sequence[FoundRun] | None = None) -> None:
        """Raise ConfigError where an option gives a key that none of the runs has."""
        if key is not None:
            with self.naming(option):
                check_key(key, self.runs if runs is None else runs)

    def passing(
        self, filters: Sequence[str], *, by_run: bool = False
    ) -> tuple[list[FoundRun], list[FoundRun]]:
        """Return the runs that pass, by row of a leaderboard or each by itself, and all in rows.

        Raises ConfigError where none passes.
        """
        with self.naming("--filter"):
            if by_run:
                kept, among = chosen(self.runs, filters), self.runs
            else:
                kept, among = filtered(self.runs, filters)
        if not kept:
            wanted = " and ".join(filters) or "a place in a newest grid"
            with self.naming():
                raise ConfigError(f"none of {len(self.runs)} runs has {wanted}")
        return kept, among

    @property
    def _left_out(self) -> list[FoundRun]:
        return [run for runs in self.hidden.values() for run in runs]


def _by_sweep(runs: Sequence[FoundRun]) -> dict[Path, list[FoundRun]]:
    found: dict[Path, list[FoundRun]] = {}
    for run in runs:
        found.setdefault(run.folder.parent, []).append(run)
    return found


def _print_leaderboard(console: Console, asked: Asked) -> None:
    (folder,) = asked.folders
    runs = read_runs(folder)
    if not runs:
        raise ConfigError(f"{folder}: this sweep holds no run yet")
    Found(runs, {}).check("--sort", asked.sort)
    conclude(console, folder, runs, asked.sort, all_runs=asked.all)
    print_forks(console, without_copies(runs)[0])


def _write_page(console: Console, asked: Asked, found: Found) -> None:
    from expt.command.report_page import page_about  # late: it draws

    assert asked.html is not None
    runs, _ = found.passing(asked.filter)
    found.check("--sort", asked.sort, runs)
    text = page_about(asked.folders[0], runs, asked.sort)
    with new_file(asked.html, force=asked.force, option="--html") as file:
        file.write(text.encode())
    terminal.put(html=str(asked.html.absolute()))
    say(console, f"written      {asked.html}")


def _print_verdict(console: Console, asked: Asked, found: Found) -> None:
    records, _ = found.passing(asked.filter)
    found.check("--metric", asked.metric, records)
    kept = _within_limits(records)
    notes = list[str]()
    if left_out := len(records) - len(kept):
        notes.append(f"left out: {left_out} completed, for search.constraints")
    try:
        judged = verdict.verdicts(kept, asked.metric)
    except ConfigError as error:
        raise ConfigError("; ".join([str(error), *notes])) from None
    others = [{**one._asdict(), "other": one.other.settings} for one in judged.others]
    terminal.put(verdict={"best": judged.best.settings, "others": others})
    console.print(verdict.verdict_table(judged))
    for line in (*judged.notes, *notes):
        say(console, line)


def _print_importance(console: Console, asked: Asked, found: Found) -> None:
    weights = importance(asked.folders[0], found.passing(asked.filter)[0])
    terminal.put(importance=weights)
    for table in importance_tables(weights):
        console.print(table)
    say(console, "ped_anova: by what the best runs have in common; fanova: by the variance of all")


def _write_study(console: Console, asked: Asked, file: Path, found: Found) -> None:
    """Write the runs as a journal of Optuna's, which optuna-dashboard opens."""
    with new_file(file, force=asked.force, option="--optuna") as opened:  # Optuna adds to a file
        study_of(asked.folders[0], found.passing(asked.filter)[0], Path(opened.name))
    say(console, f"study        {file}; look at it: optuna-dashboard {file}")


def _within_limits(runs: Sequence[FoundRun]) -> list[FoundRun]:
    """Return the runs without the completed ones that break their search's limits."""
    broken = set[Path]()
    for folder, own in _by_sweep(runs).items():
        if (search := search_in(folder, own)) and search.limits:
            completed = [run for run in own if run.status == COMPLETED]
            broken.update(run.folder for run in completed if search.breaks_limits(run))
    return [run for run in runs if run.folder not in broken]


def parse(words: Sequence[str]) -> Asked:
    """Read the options. Raises ConfigError for those that do not go together."""
    about = "List runs, print a sweep's leaderboard, or compare two runs side by side."
    parser = Parser("report", about, EXAMPLES)
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="FOLDER", help="runs, or folders of runs")
    add("--sort", metavar="KEY", help="a column, a setting or a metric; accuracies: highest first")
    add("--filter", action="append", default=[], metavar="KEY=VALUE", help="also != < > <= >=, *")
    add("--all", action="store_true", help="also runs that a sweep's newest grid does not name")
    parser.add_output("--csv", "all settings and metrics of the runs; - is the terminal")
    add("--verdict", action="store_true", help="test whether settings differ, by seeds")
    add("--metric", metavar="TAG", help="what --verdict compares [objective]")
    add("--importance", action="store_true", help="which settings mattered, by Optuna")
    parser.add_output("--optuna", "write a study for optuna-dashboard")
    parser.add_output("--html", "write one page about a sweep, to hand on")
    parser.add_output("--plot", "draw learning curves: PNG, SVG or PDF")
    asked: Asked = parser.parse_args(words, Asked())
    asked.folders = asked.folders or [Path("outputs")]
    if asked.metric and not asked.verdict:
        raise ConfigError("--metric: says what --verdict compares; add it")
    named = ["verdict", "importance", "html", "csv", "plot", *(["sort"] if not asked.html else [])]
    others = [name for name in named if name != asked.form and getattr(asked, name)]
    if asked.form and others:
        raise ConfigError(f"--{min(others)}: does not go with --{asked.form}; leave one out")
    return asked


def report(console: Console, asked: Asked, found: Found) -> None:
    """Print runs in a list, two side by side, or in rows; write the table and the curves.

    Raises ConfigError where a folder holds no run, or a key or a format is not known.
    """
    are_two = len(asked.folders) == len(found.runs) == 2 and asked.is_plain and not asked.sort
    kept, among = found.passing(asked.filter, by_run=not asked.of_sweep)
    found.check("--sort", asked.sort)
    runs = kept if are_two else in_order(kept, asked.sort or "started")
    terminal.put_runs((run.folder, run.record) for run in runs)
    written = _write_files(runs, asked)
    if asked.csv == Path("-"):
        sys.stdout.write(listing_csv(runs))
    elif asked.of_sweep and asked.filter:
        best, old = best_of(asked.folders[0], kept), stale(kept)
        terminal.put(best=best and best.as_record)
        console.print(leaderboard(kept, asked.sort, stale=old, among=among))
        print_stale(console, old)
        of_all = f"{len(kept)} of {len(found.runs)} runs"
        say(console, f"shown        {of_all}: {' and '.join(asked.filter)}")
    else:
        old = stale(runs)
        if are_two:
            console.print(side_by_side(*runs))
        else:
            print_listing(console, runs, old)
        print_ancestry(console, runs)
        print_stale(console, old)
        print_lost(console, runs)
        for run in [run for run in runs if run.status == FAILED][-SHOWN_FAILURES:]:
            say(console, f"failed       {run.folder.name}: {in_one_line(run.error)}")
    for line in written:
        say(console, line)


FORMS = {
    "verdict": _print_verdict,
    "importance": _print_importance,
    "html": _write_page,
    "": report,
}
"""The forms of a report, by the option that asks for each; a sweep's leaderboard is another."""


def _write_files(runs: Sequence[FoundRun], asked: Asked) -> list[str]:
    """Write the table and the curves that are asked for; return a line about each."""
    lines = list[str]()
    if asked.csv and asked.csv != Path("-"):
        with new_file(asked.csv, force=asked.force, option="--csv") as file:
            file.write(listing_csv(runs).encode())
        lines.append(f"table        {asked.csv}")
    if asked.plot:
        from expt.runs.view import curves  # late: matplotlib, an extra

        curves.refuse_undrawable("--plot", asked.plot)
        with new_file(asked.plot, force=asked.force, option="--plot") as file:
            curves.learning_curves(runs, Path(file.name))
        lines.append(f"curves       {asked.plot}")
    return lines
