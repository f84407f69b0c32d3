"""Which points a sweep has come to, and which of the others are complete."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from expt.command import sweep_runs
from expt.command.composed_run import ComposedRun
from expt.command.sweep_display import SweepDisplay
from expt.command.sweep_runs import Runs, see_completed
from expt.launch.job import QUEUED, Job
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, Objective


def composed(statuses: str) -> Iterator[ComposedRun]:
    """A run for each letter, `c` a complete one, each of them in a folder called by its place."""
    for number, letter in enumerate(statuses):
        done = letter == "c"
        objective = Objective(name="loss/val", value=0.5) if done else None
        job = Job(
            RunPaths(Path(str(number))), None, COMPLETED if done else QUEUED, objective=objective
        )
        yield ComposedRun(number, [], job, OmegaConf.create, {})


@pytest.mark.parametrize(
    ("to_come", "in_folder", "seconds", "seen", "may_be_more"),
    [
        ("ccqqc", "014", 0.1, "014", False),
        ("ccqqc", "01", 0.1, "01", False),
        ("ccqqc", "", 0.1, "", False),
        ("qqqq", "78", 0.1, "", False),
        ("qqcqq", "24", sweep_runs.LOOK_S, "", True),
        ("", "1", 0.1, "", False),
    ],
)
def test_the_points_to_come_that_are_complete_are_looked_for_while_there_is_time(
    to_come: str, in_folder: str, seconds: float, seen: str, may_be_more: bool
) -> None:
    runs: Runs = {}
    display = SweepDisplay(Console(file=io.StringIO()), total=len(to_come), folder=Path())
    ticks = itertools.count(0.0, seconds)
    found = see_completed(
        composed(to_come), runs, display, [*map(Path, in_folder)], lambda: next(ticks)
    )
    assert ([job.name for job in runs], found) == ([*seen], may_be_more)
