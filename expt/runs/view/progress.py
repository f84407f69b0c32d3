"""The terminal's view of one run under way, read from its folder: a line for each epoch, and the
progress.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from expt.config.datasets import noun_of
from expt.runs import provenance, tags
from expt.runs.metrics_file import MetricsReader, Point
from expt.runs.paths import RunPaths
from expt.runs.result import read_result
from expt.runs.typed import setting
from expt.runs.view.cells import say
from expt.runs.view.numbers import in_words, is_running, speed_label
from expt.runs.view.printed import Printed, show_printed
from expt.runs.view.units import duration

REFRESH_S = 0.1
WIDE, BAR = 100, 16
"""Columns of a terminal that has room for everything, and of the progress bar there."""
BEST = tags.best("")
PLAIN_LINE_S = 10.0
"""Without a terminal: a line after this many seconds within a long epoch, beside one for each
epoch.
"""


class EpochEnd(NamedTuple):
    """The numbers of an epoch that has ended, evaluation included."""

    epoch: int
    step: int
    values: Mapping[str, float]
    is_best: bool
    """Whether it was the best by the run's objective, until then."""


class RunState:
    """How far a run has come, from what it has written so far."""

    def __init__(self, paths: RunPaths, *, epochs: int) -> None:
        self._paths, self.epochs = paths, epochs
        self._reader = MetricsReader(paths)
        self._began: tuple[float, int] | None = None
        self._resumed_at = 0
        self.values: dict[str, float] = {}
        """The newest of each tag."""
        self.of_epoch: dict[str, float] = {}
        """The newest of each tag, of the epoch under way alone."""
        self._ended: list[EpochEnd] = []
        self._told, self._best = 0, math.nan
        self.noun = "image"
        self.step = self.epoch = self.total_steps = self._per_epoch = 0

    def read(self) -> list[Point]:
        """Take in what is new; returns it, but for what was there before the run was resumed."""
        points = self._reader.read()
        if points and not self.total_steps:
            self._read_result()
        for point in points:
            if point.epoch != self.epoch:
                self._end_epoch()
                self.of_epoch = {}
            self.values[point.tag] = self.of_epoch[point.tag] = point.value
            self.step, self.epoch = point.step, point.epoch
            if point.tag.startswith(BEST):
                self._end_epoch()
        if self._began is None and self.step > self._resumed_at:
            self._began = (
                time.monotonic(),
                self.step,
            )  # the time left is that of the steps, not of the start
        return [point for point in points if point.step > self._resumed_at]

    def _read_result(self) -> None:
        result = read_result(self._paths)
        began = result.get("resumed_from") or result.get("forked_from")
        self._resumed_at = began["step"] if began else 0
        self.total_steps = result.get("total_steps", 0)
        self._per_epoch = result.get("steps_per_epoch", 0)
        self.noun = noun_of(result)
        if self._per_epoch:
            self.epochs = -(-self.total_steps // self._per_epoch)

    def ends_epoch(self, step: int) -> bool:
        """Whether it is an epoch's last, whose numbers come with those of the epoch."""
        return bool(self._per_epoch and step % self._per_epoch == 0)

    def _end_epoch(self) -> None:
        """The epoch's numbers are all there; nothing is new of one that was told before, or before
        a resume.
        """
        if tags.EPOCH_S not in self.of_epoch or self._told >= self.epoch:
            return
        self._told = self.epoch
        tag, best = next(
            ((tag, value) for tag, value in self.of_epoch.items() if tag.startswith(BEST)),
            ("", math.nan),
        )
        is_best = (
            best not in (self._best, math.nan) and self.of_epoch.get(tag.removeprefix(BEST)) == best
        )
        self._best = best
        if self.step > self._resumed_at:
            self._ended.append(EpochEnd(self.epoch, self.step, dict(self.of_epoch), is_best))

    def take_ended(self, *, last: bool = False) -> list[EpochEnd]:
        """The epochs that have ended since the last call; with `last` also one whose evaluation
        came to nothing.
        """
        if last:
            self._end_epoch()
        ended, self._ended = self._ended, []
        return ended

    @property
    def left_s(self) -> float | None:
        """Seconds to the end, if the rest goes as fast as what was done since; None where that
        can't be said.
        """
        if self._began is None or not self._began[1] < self.step < self.total_steps:
            return None
        since, first = self._began
        return (time.monotonic() - since) / (self.step - first) * (self.total_steps - self.step)


class RunDisplay:
    """Shows a run that is under way; `update` is cheap and may be called at any rate.

    A line for each epoch that has ended, and for what workers print; in a terminal the progress
    below, if `live`: a debugger's prompt would be drawn over. Workers' warnings go to `errors`, or
    to stderr: never to a log of theirs."""

    def __init__(
        self,
        paths: RunPaths,
        console: Console,
        *,
        epochs: int,
        print_every: int | None = None,
        live: bool = True,
        errors: TextIO | None = None,
    ) -> None:
        self._state, self._console, self._print_every = (
            RunState(paths, epochs=epochs),
            console,
            print_every,
        )
        self._printed, self._began, self._errors = Printed(paths), False, errors
        self._next = self._line_at = time.monotonic()
        self._line_step = 0  # of the newest line: it has its step once
        live = live and console.is_terminal and not console.is_dumb_terminal
        self._bar = _progress_bar(console) if live else None
        self._task = self._bar.add_task("starting", total=None, text="") if self._bar else None

    def __enter__(self) -> RunDisplay:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._began:  # else the run was refused: what is in its folder is of before
            self._next = 0.0
            self.update(last=True)
        if self._bar:
            # It stays where a run has stopped on its way; at the end the summary says the same.
            self._bar.live.transient = self._state.step in (0, self._state.total_steps)
            self._bar.stop()

    def waiting(self, devices: Sequence[str]) -> None:
        """Say that the run cannot start yet, since another command holds `devices`."""
        say(self._console, waiting_for(devices))

    def update(self, *, last: bool = False) -> None:
        """Read what is new and show it; `last`: no more will come."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next, self._began = now + REFRESH_S, True
        new = self._printed.new(last=last)
        show_printed(self._console, ((f"rank {rank}", line) for rank, line in new), self._errors)
        state = self._state
        points = state.read()
        steps = self._due(points, self._print_every) if self._print_every else []
        ended = state.take_ended(last=last)
        for end in ended:
            self._line_at, self._line_step = now, end.step
            while steps and steps[0][1] < end.step:  # both as they came, however late one looks
                self._print(*steps.pop(0))
            self._print_epoch(end, left=end is ended[-1])
        for epoch, step, text in steps:
            self._print(epoch, step, text)
        if not points or not state.total_steps:
            return
        if self._bar and self._task is not None:
            label = f"epoch {state.epoch}/{state.epochs}"
            taken = (
                len(label)
                + 2 * len(str(state.total_steps))
                + 3
                + (BAR + 1) * (self._console.width >= WIDE)
            )
            text = self._fitted(
                {**in_words(state.of_epoch, state.noun), **self._left()},
                self._console.width - taken,
            )
            self._bar.update(
                self._task,
                description=label,
                total=state.total_steps,
                completed=state.step,
                text=text,
            )
        elif (
            not state.ends_epoch(state.step)
            and state.step > self._line_step
            and now - self._line_at > PLAIN_LINE_S
        ):
            self._print(
                state.epoch,
                state.step,
                "  ".join({**in_words(state.of_epoch, state.noun), **self._left()}.values()),
            )

    def _due(self, points: list[Point], every: int) -> list[tuple[int, int, str]]:
        """A line for each step that is due, however many were logged since the last look; epochs'
        ends have theirs.
        """
        due = list[tuple[int, int, str]]()
        for (epoch, step), group in itertools.groupby(
            points, key=lambda point: (point.epoch, point.step)
        ):
            values = {point.tag: point.value for point in group}
            if (
                step % every == 0
                and tags.RUNNING_LOSS in values
                and not self._state.ends_epoch(step)
            ):
                running = {tag: value for tag, value in values.items() if is_running(tag)}
                due.append((epoch, step, "  ".join(in_words(running, self._state.noun).values())))
        return due

    def _print_epoch(self, end: EpochEnd, *, left: bool) -> None:
        """The epoch's own numbers, none of before or since."""
        values = {tag: value for tag, value in end.values.items() if not is_running(tag)}
        words = {**in_words(values, self._state.noun), **({"best": "best"} if end.is_best else {})}
        if not self._console.is_terminal:
            self._print(
                end.epoch, end.step, "  ".join({**words, **(self._left() if left else {})}.values())
            )
            return
        label = f"epoch {end.epoch:>{len(str(self._state.epochs))}}/{self._state.epochs}  "
        say(
            self._console,
            label + self._fitted(words, self._console.width - len(label)),
            "bold" if end.is_best else "",
        )

    def _print(self, epoch: int, step: int, text: str) -> None:
        self._line_at, self._line_step = time.monotonic(), step
        say(
            self._console,
            f"epoch {epoch}/{self._state.epochs}  step {step}/{self._state.total_steps}  {text}",
        )

    def _left(self) -> dict[str, str]:
        left_s = self._state.left_s
        return {} if left_s is None else {"left": f"{duration(left_s)} left"}

    def _fitted(self, words: Mapping[str, str], width: int) -> str:
        """The words that fit into `width` columns, the most important first to stay."""
        shown, speed = dict(words), speed_label(self._state.noun)
        own = [label for label in words if label not in (speed, *_KEPT_LONGEST, *_NEVER_LEFT_OUT)]
        for label in (speed, *own, *_KEPT_LONGEST):
            if len("  ".join(shown.values())) > width:
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
        display.update()  # a run may be over before the thread's first look


_KEPT_LONGEST = ("test", "val", "loss")
_NEVER_LEFT_OUT = ("left", "best")


def waiting_for(devices: Sequence[str]) -> str:
    """Why a run does not start."""
    return f"waiting for GPU {', '.join(devices)}: in use by another expt command"


def shown_path(folder: Path) -> str:
    """`folder` relative to the current one where it lies below it."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)


def resume_command(paths: RunPaths) -> str:
    """What to type to resume the run of that folder."""
    return (
        f"{provenance.program()} {setting('hydra.run.dir', shown_path(paths.folder))} resume=auto"
    )


def _progress_bar(console: Console) -> Progress:
    bar = (BarColumn(bar_width=BAR),) if console.width >= WIDE else ()
    columns = (
        TextColumn("{task.description}"),
        *bar,
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
    )
    return Progress(*columns, console=console, refresh_per_second=10)
