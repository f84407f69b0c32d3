"""The terminal's view of a sweep: a live table of running runs, a line for each that ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from expt import progress
from expt.command import terminal
from expt.command.sweep_folder import SweepRun
from expt.config.kinds import chosen_metric
from expt.errors import Diverged, ExptError, OutOfMemory, counted, decimals, printable
from expt.launch.job import Job, Observer
from expt.runs import tags
from expt.runs.failure import alike, in_one_line
from expt.runs.result import COMPLETED, FAILED, INTERRUPTED, PRUNED, read_result
from expt.runs.view.progress import REFRESH_S, Printed, RunState, show_printed, waiting_for
from expt.runs.view.summary import epochs_done
from expt.runs.view.text import Console, cells, duration, plain_table, say

PRINTED_S = 1.0
"""How often the logs of all running workers are looked at."""
LINES_S = 0.1
"""How often lines that can wait are printed: each print takes 0.1 ms, on a terminal more."""


class SweepDisplay(Observer):
    """A sweep that is under way, and the lines of its workers; plain without a terminal."""

    def __init__(
        self,
        console: Console,
        *,
        total: int,
        folder: Path,
        what: str = "sweep",
        on_end: Callable[[Job], str] = lambda _: "",
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """Call `on_end` once for each run that ends; its line has the text that this returns.

        Call `look` often.
        """
        self._console, self.total, self._folder, self._what = console, total, folder, what
        self._on_end, self._look = on_end, look
        is_live = console.is_terminal and not console.is_dumb_terminal
        live = Live(console=console, refresh_per_second=4, transient=True)
        self._live = live if is_live else None
        self.runs: dict[Job, list[SweepRun]] = {}
        """The requested runs of each job: a grid may name one twice."""
        self._states: dict[Job, RunState] = {}
        self._printed: dict[Job, Printed] = {}
        self._warned = set[str]()  # once for the sweep
        self._failed: dict[str, str] = {}
        """The first run that has failed of each cause."""
        self._ended: dict[Path, str] = {}
        """The status of each run that has ended, also in an earlier command, by its folder."""
        self._took_s: dict[Path, float] = {}
        """The seconds that each run has taken in this command."""
        self._num_repeated = 0
        self._found: set[str] = set()
        self.moved = Counter[str]()
        """The number of runs that were moved to other GPUs, by the faults of theirs."""
        self._due: dict[str, float] = {}
        self._lines: list[Text] = []
        self._best = ""

    def __enter__(self) -> SweepDisplay:
        say(self._console, f"{self._what} of {counted(self.total, 'run')} in {self._folder}")
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._print_lines()
        if self._live:
            self._live.stop()

    def take(self, run: SweepRun) -> Job | None:
        """Take a run in; return its job, unless it is that of another one too."""
        is_new = run.job not in self.runs
        self.runs.setdefault(run.job, []).append(run)
        if not is_new:
            self.repeated(run.job)
        elif run.job.status == COMPLETED:
            self.skipped(run.job)
        return run.job if is_new else None

    def skipped(self, job: Job) -> None:
        """Show a run that an earlier command has completed."""
        self.ended_before(job.paths.folder, COMPLETED)
        self._line("done before", job, _reached(job), may_wait=True)

    def ended_before(self, folder: Path, status: str) -> None:
        """Count a run that has ended in an earlier command."""
        self._ended[folder] = status

    def repeated(self, job: Job) -> None:
        """Show a run that the grid names a second time."""
        self._num_repeated += 1
        self._line("named twice", job, "", may_wait=True)

    def data_found(self, about: str) -> None:
        """Print once which parts of their files runs take."""
        if about not in self._found:
            self._found.add(about)
            say(self._console, about)

    def job_starting(self, job: Job) -> None:
        """Note that a run's workers are about to start: lines in its logs were printed before."""
        self._printed[job] = Printed(job.paths, self._warned)
        self._ended.pop(job.paths.folder, None)

    def job_ended(self, job: Job) -> None:
        """Show that a run has completed, was pruned, has failed, or was interrupted."""
        self._forget(job)
        folder, took_s = job.paths.folder, job.ended_at - job.started_at if job.started_at else 0.0
        self._ended[folder] = job.status
        self._took_s[folder] = self._took_s.get(folder, 0.0) + took_s
        note = self._on_end(job)
        if note and not job.error:
            self._best = f"; best so far {_reached(job)}, {job.name}"
        if job.status == PRUNED:
            return self._line(PRUNED, job, f"{_at_rung(job)}{note}", style="blue")
        if job.error is None:
            text = f"{_reached(job)}  {took_s:.1f} s in all{note}"
            return self._line("done", job, text, style="green")
        what, style = job.status, "red"
        if self._what == "search" and isinstance(job.error, Diverged | OutOfMemory):
            what = "diverged" if isinstance(job.error, Diverged) else "no memory"
            style = "yellow"
        text = in_one_line(str(job.error), with_log=False)
        first = self._failed.setdefault(alike(str(job.error)), job.name)
        self._line(what, job, text if first == job.name else f"as {first} did", style=style)

    def job_waiting(self, job: Job, devices: Sequence[str]) -> None:
        """Show that a run can't start yet, since another command holds `devices`."""
        self._line("waiting", job, waiting_for(devices))

    def job_locked_out(self, job: Job) -> None:
        """Show that a run can't start yet, since another command is at work in its folder."""
        self._line("waiting", job, "another command is at work in its folder")

    def job_retrying(self, job: Job, error: ExptError) -> None:
        """Show that a run has failed, and will be started again."""
        self._forget(job)
        self._line("retrying", job, in_one_line(str(error), with_log=False), style="yellow")

    def job_moved(self, job: Job, why: str) -> None:
        """Show that GPUs have failed a run before its first step, and that it waits for others."""
        self._forget(job)
        self._line("moved", job, why, style="yellow")
        self.moved[why] += 1

    def tick(self, active: Sequence[Job]) -> None:
        """Read new lines of the running ones, and show them."""
        self._look()
        if self._is_due("lines", LINES_S):
            self._print_lines()
        if self._is_due("printed", PRINTED_S):
            for job in active:
                self._show_printed(job)
        if self._live is None:
            if active and progress.is_quiet():
                say(self._console, self._totals(len(active)))
            return
        if not self._is_due("table", REFRESH_S):
            return
        for job in active:
            if job not in self._states:
                self._states[job] = RunState(job.paths, epochs=job.asked.config.epochs)
            self._states[job].read()
        self._live.update(self._table(active))

    def _is_due(self, part: str, every_s: float) -> bool:
        """Return whether it is time for a part; the next time is counted from now."""
        if (now := time.monotonic()) < self._due.get(part, 0.0):
            return False
        self._due[part] = now + every_s
        return True

    def _forget(self, job: Job) -> None:
        self._show_printed(job, last=True)
        self._printed.pop(job, None)
        self._states.pop(job, None)

    def _show_printed(self, job: Job, *, last: bool = False) -> None:
        new = self._printed[job].new(last=last) if job in self._printed else ()
        if lines := [(f"{job.name}, rank {rank}", line) for rank, line in new]:
            self._print_lines()
            show_printed(self._console, lines)

    def _line(
        self, what: str, job: Job, text: str, style: str = "dim", *, may_wait: bool = False
    ) -> None:
        place, run = f"[{self._num_ended}/{self.total}] ", printable(f" {job.name}  {text}")
        self._lines.append(Text.assemble(place, (f"{what:<11}", style), run))
        if not may_wait:
            self._print_lines()

    def _print_lines(self) -> None:
        if self._lines:
            # A terminal wraps anywhere, a notebook between words; in a file a line stays a line.
            lines = Text("\n").join(self._lines)
            self._console.print(lines, soft_wrap=not self._console.is_terminal)
            self._lines.clear()
            progress.said()

    def _table(self, active: Sequence[Job]) -> RenderableType:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("running", ratio=1, no_wrap=True)
        for column in ("on", "epoch", "loss", "val", "left"):
            table.add_column(column, justify="right", no_wrap=True)
        for job in active:
            state, config = self._states[job], job.asked.config
            where = ",".join(job.devices) or f"{config.world_size} cpu"
            metric = chosen_metric(config.task)
            loss = _first(state, tags.RUNNING_LOSS, tags.metric("loss", "train"))
            val = _first(state, tags.metric(metric, "val"), tags.metric(metric, "test"))
            left = "" if state.left_s is None else duration(state.left_s)
            table.add_row(*cells(job.name, where, f"{state.epoch}/{state.epochs}", loss, val, left))
        return Group(table, Text(self._totals(len(active)), style="bold"))

    @property
    def num_unfinished(self) -> int:
        """How many runs were interrupted, or never started."""
        return max(0, self.total - self._num_ended) + self._num_of(INTERRUPTED)

    @property
    def _num_ended(self) -> int:
        return len(self._ended) + self._num_repeated

    def _num_of(self, status: str) -> int:
        return list(self._ended.values()).count(status)

    def _totals(self, running: int) -> str:
        done, failed = self._num_of(COMPLETED) + self._num_repeated, self._num_of(FAILED)
        queued = max(0, self.total - self._num_ended - running)
        pruned = f"{n} pruned, " if (n := self._num_of(PRUNED)) else ""
        text = f"{done} done, {pruned}{failed} failed, {running} running, {queued} queued"
        ended_here = self._ended.keys() & self._took_s.keys()
        if ended_here and running:  # each that is left takes as long as those before
            left_s = sum(self._took_s.values()) / len(ended_here) * (queued + running / 2) / running
            text += f"; about {duration(left_s)} left"
        return text + self._best


def _first(state: RunState, *several: str) -> str:
    return next((decimals(state.values[tag]) for tag in several if tag in state.values), "")


def _reached(job: Job) -> str:
    objective = job.objective or read_result(job.paths)["objective"]
    value = objective["value"]
    return "" if value is None else f"{objective['name']} {decimals(value)}"


def _at_rung(job: Job) -> str:
    """Return the objective after the epoch of its rung, and its best where that is another."""
    record = read_result(job.paths)
    objective, after = record["objective"], f"after {epochs_done(record)}"
    value = record.get("metrics", {}).get(objective["name"], objective["value"])
    if value is None:
        return f"  {after}"
    best, other = record.get("best"), ""
    if best is not None and best["value"] != value:
        other = f", best {decimals(best['value'])} after {best['epoch']}"
    return f"{objective['name']} {decimals(value)}  {after}{other}"


def show_dry_run(runs: Iterable[SweepRun]) -> None:
    """Print which runs would be started, and their needs."""
    columns, listed = ("#", "run", "identity", "needs", "would"), list[dict[str, str]]()
    table = plain_table(columns, left=columns)
    for place, run in enumerate(runs, start=1):
        job = run.job
        if job.request is None:
            row = (job.name, "", "", f"be refused: {in_one_line(str(job.error))}")
        else:
            config = job.request.config
            needs = f"{config.num_gpus} GPU" if config.num_gpus else f"{config.world_size} cores"
            would = "be skipped, it is complete" if job.status == COMPLETED else _begin(job)
            row = (job.name, job.request.identity.digest, needs, would)
        table.add_row(*cells(place, *row))
        listed.append(dict(zip(columns[1:], row, strict=True)))
    terminal.put(dry_run=listed)
    Console().print(table)


def _begin(job: Job) -> str:
    if job.paths.last.exists():
        return "resume from its last checkpoint"
    shorter = job.request.shorter if job.request else None
    return f"continue from {shorter.name}, which is shorter" if shorter else "start"
