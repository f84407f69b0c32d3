"""The terminal's view of one run, read from its folder: a progress line, and a table at the end."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from expt.runs import provenance
from expt.runs.metrics_file import MetricsReader, Point
from expt.runs.paths import RunPaths
from expt.runs.result import Record, read_result

REFRESH_S = 0.1
WIDE, BAR = 100, 16
"""Columns of a terminal that has room for everything, and of the progress bar there."""
EVALUATED = ("accuracy/val", "accuracy/test")
PLAIN_LINE_S = 10.0
"""Without a terminal: a line each epoch, and one after this many seconds within a long epoch."""


class RunState:
    """How far a run has come, from what it has written so far."""

    def __init__(self, paths: RunPaths, *, epochs: int) -> None:
        self._paths, self.epochs = paths, epochs
        self._reader = MetricsReader(paths)
        self._began = time.monotonic()
        self.values: dict[str, float] = {}
        self.step = self.epoch = self.total_steps = 0

    def read(self) -> list[Point]:
        """Take in what is new; returns it."""
        points = self._reader.read()
        for point in points:
            if self.step == 0:
                self._began = time.monotonic()  # the time left is that of the steps, not of the start
            self.values[point.tag], self.step, self.epoch = point.value, point.step, point.epoch
        if points and not self.total_steps:
            self.total_steps = read_result(self._paths).get("total_steps", 0)
        return points

    @property
    def left_s(self) -> float | None:
        """Seconds to the end, if the rest goes as fast as what is done; None where that can't be said."""
        if not 0 < self.step < self.total_steps:
            return None
        return (time.monotonic() - self._began) / self.step * (self.total_steps - self.step)


class RunDisplay:
    """Shows a run that is under way; `update` is cheap and may be called at any rate."""

    def __init__(self, paths: RunPaths, console: Console, *, epochs: int, print_every: int | None = None) -> None:
        self._state, self._console, self._print_every = RunState(paths, epochs=epochs), console, print_every
        self._next = self._line_at = time.monotonic()
        self._bar = _progress_bar(console) if console.is_terminal else None
        self._task = self._bar.add_task("starting", total=None, text="") if self._bar else None

    def __enter__(self) -> RunDisplay:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._next = 0.0
        self.update()
        if self._bar:
            # It stays where a run has stopped on its way; at the end the summary says the same.
            self._bar.live.transient = self._state.step in (0, self._state.total_steps)
            self._bar.stop()

    def waiting(self, devices: Sequence[str]) -> None:
        """Say that the run cannot start yet, since another command holds `devices`."""
        self._console.print(waiting_for(devices), highlight=False, soft_wrap=True)

    def update(self) -> None:
        """Read what is new and show it."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + REFRESH_S
        state = self._state
        points = state.read()
        if not points:
            return
        if self._print_every:
            self._print_steps(points, self._print_every)
        if self._bar and self._task is not None:
            label = f"epoch {state.epoch}/{state.epochs}"
            taken = len(label) + 2 * len(str(state.total_steps)) + 3 + (BAR + 1) * (self._console.width >= WIDE)
            text = self._text(self._console.width - taken)
            self._bar.update(self._task, description=label, total=state.total_steps, completed=state.step, text=text)
        elif any(point.tag in EVALUATED for point in points) or now - self._line_at > PLAIN_LINE_S:
            self._line_at = now
            self._print(state.epoch, state.step, self._text())

    def _print_steps(self, points: list[Point], every: int) -> None:
        """A line for each step that is due, however many were logged since the last look."""
        for (epoch, step), group in itertools.groupby(points, key=lambda point: (point.epoch, point.step)):
            values = {point.tag: point.value for point in group}
            has_line = "speed/epoch_s" in values and not self._bar  # an epoch's end, see `update`
            if step % every == 0 and "loss/train" in values and not has_line:
                self._print(epoch, step, "  ".join(_in_words(values).values()))

    def _print(self, epoch: int, step: int, text: str) -> None:
        line = f"epoch {epoch}/{self._state.epochs}  step {step}/{self._state.total_steps}  {text}"
        self._console.print(line, highlight=False, soft_wrap=True)

    def _text(self, width: int | None = None) -> str:
        """The newest numbers, and the time left; in `width` columns only the most important."""
        shown = _in_words(self._state.values)
        if self._state.left_s is not None:
            shown["left"] = f"{duration(self._state.left_s)} left"
        for label in _LEFT_OUT_FIRST:
            if width is not None and len("  ".join(shown.values())) > width:
                shown.pop(label, None)
        return "  ".join(shown.values())


@contextlib.contextmanager
def watched(display: RunDisplay) -> Iterator[None]:
    """Keep the display up to date from a thread, where this process is busy training."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(REFRESH_S):
            display.update()

    thread = threading.Thread(target=watch, name="display", daemon=True)
    with display:
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


_SHOWN = (
    ("loss/train", "loss", ".4f"),
    ("accuracy/train", "acc", ".4f"),
    ("accuracy/val", "val", ".4f"),
    ("accuracy/test", "test", ".4f"),
    ("speed/samples_per_s", "img/s", ",.0f"),
)
_LEFT_OUT_FIRST = ("img/s", "acc", "test", "val", "loss")


def _in_words(values: Mapping[str, float]) -> dict[str, str]:
    """Each number with its label, by label."""
    return {label: f"{label} {values[tag]:{form}}" for tag, label, form in _SHOWN if tag in values}


def print_summary(console: Console, paths: RunPaths) -> None:
    """The final numbers, and what to do next."""
    result = read_result(paths)
    values: Mapping[str, float] = result.get("metrics") or {}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "loss", "accuracy"):
        table.add_column(column, justify="left" if not column else "right")
    for split in ("train", "val", "test"):
        if f"loss/{split}" in values:
            table.add_row(split, f"{values[f'loss/{split}']:.4f}", f"{values[f'accuracy/{split}']:.4f}")
    console.print(table)
    console.print(_facts(result), highlight=False)
    console.print(f"run folder   {shown_path(paths.folder)}", highlight=False, soft_wrap=True)
    if paths.operators.exists():
        operators, trace = paths.operators.read_text(encoding="utf-8"), shown_path(paths.trace)
        console.print(f"\n{operators}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"trace        {trace}, to open at https://ui.perfetto.dev", highlight=False, soft_wrap=True)
    logdir = shlex.quote(shown_path(paths.folder))
    console.print(f"look at it   tensorboard --logdir {logdir}", highlight=False, soft_wrap=True)
    if shown_path(paths.folder).startswith("outputs/"):  # where the report looks by itself
        console.print(f"compare      {provenance.program()} report", highlight=False, soft_wrap=True)


def _facts(result: Record) -> str:
    workers = result.get("world_size", 1)
    where = f"{workers} worker{'s' if workers > 1 else ''} on {', '.join(result.get('devices') or ['the CPU'])}"
    best = result.get("best")
    speed = f"{result.get('samples_per_s') or 0:,.0f} images/s"
    line = f"{sum(result.get('epoch_s') or [0]):.1f} s of training by {where}, {speed}"
    return line + (f"; best {best['metric']} {best['value']:.4f} in epoch {best['epoch']}" if best else "")


def waiting_for(devices: Sequence[str]) -> str:
    """Why a run does not start."""
    return f"waiting for GPU {', '.join(devices)}: in use by another expt command"


def shown_path(folder: Path) -> str:
    """`folder` relative to the current one where it lies below it."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)


def _progress_bar(console: Console) -> Progress:
    bar = (BarColumn(bar_width=BAR),) if console.width >= WIDE else ()
    columns = (TextColumn("{task.description}"), *bar, MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    return Progress(*columns, console=console, refresh_per_second=10)


def duration(seconds: float) -> str:
    """Seconds as `[hours:]minutes:seconds`."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")


def elapsed(seconds: float) -> str:
    """Seconds with a tenth; from a minute on as `duration`."""
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)
