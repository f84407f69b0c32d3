"""The terminal's view of a sweep: a line for each run that ends, and a table of those under way."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expt.command.sweep_display import SweepDisplay, show_dry_run
from expt.errors import Interrupted, RunFailed
from expt.launch.job import Job
from expt.runs.metrics_file import MetricsWriter
from expt.runs.result import COMPLETED, FAILED, PRUNED, RUNNING, create_result, update_result
from expt.runs.view.text import Console
from tests.facade import Capture, request

LONG = (
    "rank 0 of 2 raised\n\nTraceback (most recent call last):\nValueError: bad\n\nlog: x/stderr.log"
)


class Screen:
    """A sweep's display, and what it has shown."""

    def __init__(self, folder: Path, *, total: int, terminal: bool = False) -> None:
        self.folder, self._out = folder, io.StringIO()
        console = Console(file=self._out, force_terminal=terminal, width=120, color_system=None)
        self.display = SweepDisplay(console, total=total, folder=Path("sweep"))

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[?\d;]*\w", "", self._out.getvalue())

    def job(self, name: str) -> Job:
        asked = request(self.folder / name, epochs=3)
        create_result(asked.paths, total_steps=30)
        return Job(asked.paths, asked, RUNNING, started_at=100.0)

    def write(self, job: Job, step: int, epoch: int, **values: float) -> None:
        writer = MetricsWriter(job.paths)
        writer.write(step, epoch, {name.replace("_", "/"): value for name, value in values.items()})
        writer.close()

    def complete(
        self, job: Job, value: float | None, seconds: float, status: str = COMPLETED
    ) -> None:
        update_result(job.paths, status=status, objective={"name": "accuracy/val", "value": value})
        job.end(None, job.started_at + seconds)
        self.display.job_ended(job)


def test_every_end_is_a_line(tmp_path: Path) -> None:
    screen = Screen(tmp_path, total=6)
    names = ("good", "unmeasured", "bad", "stopped", "old", "twice")
    good, unmeasured, bad, stopped, old, twice = map(screen.job, names)
    update_result(old.paths, status=COMPLETED, objective={"name": "accuracy/val", "value": 0.25})
    with screen.display as display:
        display.skipped(old)
        display.repeated(twice)
        display.job_waiting(good, ["0", "2"])
        display.job_retrying(bad, RunFailed(LONG))
        screen.complete(good, 0.875, 2.04)
        screen.complete(unmeasured, None, 1.0)
        bad.end(RunFailed(LONG), 103.0)
        display.job_ended(bad)
        stopped.end(Interrupted("interrupted (Ctrl-C)"), 104.0)
        display.job_ended(stopped)
        display.tick([good])  # without a terminal there is no table
    assert [line.rstrip() for line in screen.text.splitlines()] == [
        "sweep of 6 runs in sweep",
        "[1/6] done before old  accuracy/val 0.2500",
        "[2/6] named twice twice",
        "[2/6] waiting     good  GPUs 0, 2 are in use by another expt command",
        "[2/6] retrying    bad  rank 0 of 2 raised: ValueError: bad",
        "[3/6] done        good  accuracy/val 0.8750  2.0 s in all",
        "[4/6] done        unmeasured    1.0 s in all",
        "[5/6] failed      bad  rank 0 of 2 raised: ValueError: bad",
        "[6/6] interrupted stopped  interrupted (Ctrl-C)",
    ]


def test_the_table_shows_how_far_the_running_ones_are(tmp_path: Path) -> None:
    screen = Screen(tmp_path, total=9, terminal=True)
    done, first, second, old = map(screen.job, ("done", "first", "second", "old"))
    first.devices = ("1", "3")
    update_result(old.paths, status=COMPLETED, objective={"name": "accuracy/val", "value": None})
    with screen.display as display:
        display.skipped(old)
        screen.complete(done, 0.5, 60.0)
        screen.write(first, 10, 1, loss_train=0.25, accuracy_val=0.75)
        screen.write(second, 5, 1, accuracy_test=0.625)  # all that it is measured on
        display.tick([first, second])
    lines = [line.split() for line in screen.text.splitlines()]
    assert ["running", "on", "epoch", "loss", "val", "left"] in lines
    (row,) = (line for line in lines if line[:1] == ["first"])
    assert row[1:5] == ["1,3", "1/3", "0.2500", "0.7500"]
    (row,) = (line for line in lines if line[:1] == ["second"])
    assert row[1:5] == ["1", "cpu", "1/3", "0.6250"]
    # 60 s a run, two at a time: five that wait, and half of each of the two.
    assert "2 done, 0 failed, 2 running, 5 queued; about 03:00 left" in screen.text


def test_what_is_left_counts_pruned_runs_too(tmp_path: Path) -> None:
    screen = Screen(tmp_path, total=7, terminal=True)
    done, pruned, running = map(screen.job, ("done", "pruned", "running"))
    with screen.display as display:
        screen.complete(done, 0.5, 60.0)
        screen.complete(pruned, 0.5, 20.0, status=PRUNED)
        display.tick([running])
    # 40 s a run: four that wait, and half of the one
    assert "1 done, 1 pruned, 0 failed, 1 running, 4 queued; about 03:00 left" in screen.text


def test_trials_of_earlier_commands_say_nothing_of_the_time_that_is_left(tmp_path: Path) -> None:
    screen = Screen(tmp_path, total=40, terminal=True)
    done, running = map(screen.job, ("done", "running"))
    with screen.display as display:
        for number in range(30):
            display.ended_before(tmp_path / str(number), PRUNED)
        display.ended_before(tmp_path / "diverged", FAILED)
        screen.complete(done, 0.5, 100.0)
        display.tick([running])
    # 100 s a run: seven that wait, and half of the one
    assert "1 done, 30 pruned, 1 failed, 1 running, 7 queued; about 12:30 left" in screen.text


@pytest.mark.parametrize("terminal", [False, True])
def test_what_workers_print_is_told_with_run_and_rank(tmp_path: Path, *, terminal: bool) -> None:
    screen = Screen(tmp_path, total=1, terminal=terminal)
    job = screen.job("lr=0.1")
    for rank in (0, 1):
        job.paths.stdout(0, rank).parent.mkdir(parents=True)
        job.paths.stdout(0, rank).write_text("of an earlier attempt\n")
    with screen.display as display, job.paths.stdout(0, 1).open("a", buffering=1) as log:
        display.job_starting(job)
        log.write("at once\n")
        display.tick([job])
        log.write("soon\nat the [end]")
        display.tick([job])  # too soon to look again
        screen.complete(job, 0.5, 1.0)
    lines = [
        line.rstrip() for line in screen.text.splitlines() if "rank" in line or "done " in line
    ]
    assert lines[:3] == [f"[lr=0.1, rank 1] {text}" for text in ("at once", "soon", "at the [end]")]
    assert lines[3].startswith("[1/1] done")


def test_a_dry_run_shows_what_each_run_begins_from(tmp_path: Path, capsys: Capture) -> None:
    requests = [request(tmp_path / f"seed={seed}") for seed in range(2)]
    jobs = [Job(each.paths, each) for each in requests]
    jobs[0].paths.checkpoints.mkdir(parents=True)
    jobs[0].paths.last.touch()
    runs: Any = [SimpleNamespace(job=job) for job in jobs]
    show_dry_run(runs)
    first, second = (line.rstrip() for line in capsys.readouterr().out.splitlines()[1:])
    assert first.endswith("resume from its last checkpoint")
    assert second.endswith("start")


def test_a_pause_shows_what_the_run_is_compared_by(tmp_path: Path) -> None:
    screen = Screen(tmp_path, total=2)
    with screen.display as display:
        for name, last in (("risen", 0.75), ("fallen", 0.5)):
            job = screen.job(name)
            best = {"metric": "accuracy/val", "value": 0.75, "epoch": 1}
            objective = {"name": "accuracy/val", "value": 0.75}
            reached: Any = {"best": best, "objective": objective, "metrics": {"accuracy/val": last}}
            update_result(
                job.paths, status=PRUNED, epoch_s=[1.0, 1.0], config={"epochs": 3}, **reached
            )
            job.status = PRUNED
            display.job_ended(job)
    assert screen.text.splitlines()[1:] == [
        "[1/2] pruned      risen  accuracy/val 0.7500  after 2 of 3 epochs",
        "[2/2] pruned      fallen  accuracy/val 0.5000  after 2 of 3 epochs, best 0.7500 after 1",
    ]
