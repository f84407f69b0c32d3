"""The runs that a sweep's command has come to, and those that earlier commands have completed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeAlias

from expt.command.composed_run import ComposedRun
from expt.command.sweep_display import SweepDisplay
from expt.launch.job import Job
from expt.runs.result import COMPLETED

Runs: TypeAlias = dict[Job, list[ComposedRun]]
"""Of each job the points that it is."""

LOOK_S = 2.0
"""How long it is looked which points to come are complete: each takes 1 ms."""


def is_new(run: ComposedRun, runs: Runs, display: SweepDisplay) -> bool:
    """Take the point in; returns whether it is the first of its job."""
    known = run.job in runs
    runs.setdefault(run.job, []).append(run)
    if known:
        display.repeated(run.job)
    elif run.job.status == COMPLETED:
        display.skipped(run.job)
    return not known


def see_completed(
    to_come: Iterator[ComposedRun],
    runs: Runs,
    display: SweepDisplay,
    completed: Collection[Path],
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Take in those points of a sweep that has stopped which an earlier command has completed, into
    these folders.

    Returns whether there may be others, for want of time.
    """
    left, until = {*completed} - {job.paths.folder for job in runs}, clock() + LOOK_S
    while left and clock() < until and (run := next(to_come, None)):
        if run.job.status == COMPLETED:
            is_new(run, runs, display)
            left.discard(run.job.paths.folder)
    return bool(left) and next(to_come, None) is not None
