"""The end of a sweep: its leaderboard, summary and costs, and commands that resume its runs."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from expt.command import terminal
from expt.command.words import options_of
from expt.config.identity import REPEATED
from expt.config.keys import flat
from expt.config.own_code import is_of_main, targets
from expt.errors import ConfigError, counted, warn
from expt.runs import provenance
from expt.runs.failure import alike, faults_in, in_one_line
from expt.runs.found import FoundRun, by_objective, describe_copies, in_newest, without_copies
from expt.runs.overrides import is_resume_auto, joined, words_after_expt
from expt.runs.paths import SUMMARY_CSV, SUMMARY_TABLE
from expt.runs.result import DAMAGED, FAILED, LOST, PRUNED, device_s
from expt.runs.view.leaderboard import leaderboard, write_summary
from expt.runs.view.listing import in_order
from expt.runs.view.settings import read_runs
from expt.runs.view.summary import print_stale, stale
from expt.runs.view.text import (
    Console,
    amount,
    kilowatt_hours,
    resume_command,
    say,
    shown_path,
    sweep_command,
)
from expt.search.conclusion import SearchRecord, bad_trials, conclude_search, ranked_in, search_in


def conclude(
    console: Console,
    folder: Path,
    runs: Sequence[FoundRun] | None = None,
    sort: str | None = None,
    *,
    notes: Sequence[str] = (),
    all_runs: bool = False,
) -> None:
    """Write summary.csv and summary.md of a sweep; print the leaderboard and the failures.

    `runs` are those of the folder, where they have just been read; of those that its newest grid
    corrects only the number is printed, unless `all_runs`. `notes` are lines of the command that
    ends.
    """
    every, copies = without_copies(read_runs(folder) if runs is None else runs)
    runs, hidden = (every, []) if all_runs else in_newest(folder, every)
    search = search_in(folder, runs)
    _put_document(folder, search, runs, sort, hidden)
    if not runs:
        if hidden:
            say(console, describe_hidden(folder, hidden))
        for note in notes:  # of a budget that no run could begin within, maybe
            say(console, note)
        return
    old = stale(runs)
    try:
        console.print(leaderboard(runs, sort, stale=old))
    finally:  # after the table, for which somebody may wait
        written = _write_summary(folder, runs)
    _print_failures(console, folder, runs, notes)
    conclude_search(console, search, runs, lambda row: again(row.first, row.runs))
    print_stale(console, old)
    print_lost(console, runs)
    for line in _pruned(runs):
        say(console, line)
    for run in (run for run in runs if run.status == DAMAGED):
        file = shown_path(run.paths.result)
        say(console, f"damaged      {file} cannot be read, and is not counted")
    if copies:
        say(console, f"left out     {describe_copies(copies)}")
    if hidden:
        say(console, describe_hidden(folder, hidden))
    for line in (*_costs(every), *notes):
        say(console, line)
    if written:
        say(console, f"summary      {shown_path(folder / SUMMARY_CSV)}, {SUMMARY_TABLE}")
    logdir = shlex.quote(shown_path(folder))
    say(console, f"look at it   tensorboard --logdir {logdir}")


def describe_hidden(folder: Path, hidden: Sequence[FoundRun]) -> str:
    """Return a line with the number of runs that the newest grid corrects, and how to see them."""
    number = counted(len(hidden), "run")
    see = f"to see them: {provenance.program()} report {shlex.quote(shown_path(folder))} --all"
    return f"hidden       {number} that the newest grid no longer names; {see}"


def _put_document(
    folder: Path,
    search: SearchRecord | None,
    runs: Sequence[FoundRun],
    sort: str | None,
    hidden: Sequence[FoundRun],
) -> None:
    best = next(iter(ranked_in(search, runs)), None)
    front = search.front(runs) if search and len(search.goals) > 1 else []
    every = [*runs, *hidden]
    ranked = in_order(every, sort) if sort else every
    terminal.put_runs((run.folder, run.record) for run in ranked)
    terminal.put(
        sweep=str(folder.absolute()),
        best_run=best and str(best.first.folder.absolute()),
        best=best and best.as_record,
        hidden=[str(run.folder.absolute()) for run in hidden],
        pareto=[str(row.first.folder.absolute()) for row in front],
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
        time = amount(sum(map(device_s, found)))
        line = f"{kind + ' time':<13}{time} of {counted(len(found), 'run')}"
        if joules := [record["energy_j"] for record in found if "energy_j" in record]:
            known = "" if len(joules) == len(found) else f" of {len(joules)} of them"
            line += f", {kilowatt_hours(sum(joules))}{known}"
        yield line


def _write_summary(folder: Path, runs: Sequence[FoundRun]) -> bool:
    try:
        write_summary(folder, runs)
    except OSError as error:  # a full disk, maybe: the table is still worth seeing
        where = f"{error.filename or folder}: {error.strerror}"
        warn(f"{where}; {SUMMARY_CSV} and {SUMMARY_TABLE} are not written")
        return False
    return True


def print_lost(console: Console, runs: Sequence[FoundRun]) -> None:
    """Name the runs that were killed, and how to resume them."""
    lost = "says that it is running, but has no process; it was killed"
    for run in runs:
        if run.status == LOST:
            say(console, f"lost         {shown_path(run.folder)} {lost}")
            say(console, f"      to continue: {resume_command(run.paths)}")


def _print_failures(
    console: Console, folder: Path, runs: Sequence[FoundRun], notes: Sequence[str]
) -> None:
    bad = bad_trials(runs)
    if bad:
        worst = "diverged or had not enough memory, and count as the worst"
        say(console, f"bad trials   {len(bad)} {worst}")
    failed = [run for run in runs if run.status == FAILED and run not in bad]
    if failed:
        say(console, f"\n{len(failed)} failed", "bold red")
        _print_causes(console, failed)
    if begun := [run.record for run in failed if "identity" in run.record]:
        say(console, f"  again: {sweep_command(folder, begun[-1].get('command', ''))}")
    texts = [run.error for run in runs if run.status == FAILED]
    for fault in dict.fromkeys(fault for text in texts for fault in faults_in(text)):
        if not any(fault in note for note in notes):  # of runs that were moved
            say(console, f"GPU fault    {fault}")


def _print_causes(console: Console, failed: Sequence[FoundRun]) -> None:
    """Print the first run that has failed of each cause, and how many more have."""
    causes: dict[str, list[FoundRun]] = {}
    for run in failed:
        causes.setdefault(alike(run.error), []).append(run)
    for run, *others in causes.values():
        more = f" and {len(others)} more" if others else ""
        say(console, f"  {run.folder.name}{more}: {in_one_line(run.error)}")
        if "identity" in run.record:  # else it was refused, and would be again
            say(console, f"      that run alone: {again(run)}")


def _repeating(words: Sequence[str], runs: Sequence[FoundRun]) -> list[str]:
    """Return a run's words with the seeds and folds of all runs that repeat it."""
    known = [flat(run.config) for run in runs]
    found = {
        key: sorted({each[key] for each in known if each.get(key) is not None}) for key in REPEATED
    }
    several = {key: f"{key}={','.join(map(str, x))}" for key, x in found.items() if len(x) > 1}
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in several]
    return [*kept, *several.values()]


def again(run: FoundRun, repeated: Sequence[FoundRun] = ()) -> str:
    """Return the command that trains one run of a sweep by itself.

    Of several `repeated` ones it has all their seeds and folds.
    """
    if any(map(is_of_main, targets(run.config))):  # its folder has it, no command
        return shlex.join(["python", "-m", "expt", "rerun", shown_path(run.folder)])
    # The words of a script are its own.
    words = words_after_expt(run.record.get("command", "")) or []
    kept = list[str]()
    with contextlib.suppress(ConfigError):  # of another command
        if folder := options_of([word for word in words if word != "--json"]).config_dir:
            kept = ["--config-dir", folder]
    # It begins in a folder of its own, where there is nothing to resume.
    own = [word for word in run.record.get("arguments", ()) if not is_resume_auto(word)]
    if len(repeated) > 1:
        return joined(["python", "-m", "expt", "-m", *kept, *_repeating(own, repeated)])
    if any(word.startswith("sweep=") for word in own):
        own.append("hydra.mode=RUN")
    return joined(["python", "-m", "expt", *kept, *own])
