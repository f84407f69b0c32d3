"""The terminal's view of a run under way, read from its folder."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from expt.errors import WARNING, decimals, warn
from expt.features import Features, noun_of
from expt.progress import EVERY_S
from expt.runs import tags
from expt.runs.metrics_file import MetricsReader
from expt.runs.paths import RunPaths
from expt.runs.result import evaluated_tag, read_result
from expt.runs.tags import BEST
from expt.runs.view.text import Console, duration, gpus_named, say

REFRESH_S = 0.1
WIDE, BAR = 100, 16
"""The columns of a terminal that has room for a progress bar, and of the bar."""
PLAIN_LINE_S = EVERY_S * 0.8
"""Seconds between lines within a long epoch where there is no terminal."""
MAX_BYTES, MAX_LAST_BYTES = 32 * 1024, 128 * 1024
"""Bytes read of a worker's log at a time, and at the end: output may be endless."""


class Line(NamedTuple):
    """The values logged after one step, in training or an evaluation."""

    epoch: int
    step: int
    values: Mapping[str, float]
    is_awaited: bool
    """True if an epoch or an evaluation has ended with it."""
    is_best: bool
    """True if it was the best by the run's objective until then."""


class RunState:
    """The progress of a run, by its files so far."""

    def __init__(self, paths: RunPaths, *, epochs: int) -> None:
        self._paths, self.epochs = paths, epochs
        self._reader = MetricsReader(paths)
        self._began: tuple[float, int] | None = None
        self._resumed_at = 0
        self.values: dict[str, float] = {}
        """The newest value of each tag."""
        self.of_step: dict[str, float] = {}
        """The values of the last step, until its line has ended."""
        self._ended: list[Line] = []
        self._last_ended, self._best = 0, math.nan
        self._awaited = {tags.EPOCH_S}
        self._max_s = math.inf  # of training
        self._epochs_s, self._epoch_began = 0.0, 0.0
        self.noun, self.data_lines = "image", list[str]()
        self.step = self.epoch = self.total_steps = 0

    def read(self) -> None:
        """Read new points."""
        points, now = self._reader.read(), time.monotonic()
        if points and not self.total_steps:
            self._read_result()
        for point in points:
            if point.step != self.step:
                self._end_line()
            self.step, self.epoch = point.step, point.epoch
            self.values[point.tag] = point.value
            if point.step > self._last_ended:
                self.of_step[point.tag] = point.value
            if point.tag == tags.EPOCH_S:
                self._epochs_s, self._epoch_began = self._epochs_s + point.value, now
            elif point.tag.startswith(BEST):
                self._end_line()
        if self._began is None and self.step > self._resumed_at:
            # The time left is that of the steps, not of the start.
            self._began, self._epoch_began = (now, self.step), now

    def _read_result(self) -> None:
        result = read_result(self._paths)
        data = result.get("data", {})
        self.data_lines = describe_data(data)
        began = result.get("resumed_from") or result.get("forked_from")
        self._resumed_at = began["step"] if began else 0
        self.total_steps = result.get("total_steps", 0)
        self.noun = noun_of(result)
        self._awaited.add(evaluated_tag(result))
        self._max_s = (result.get("config", {}).get("max_minutes") or math.inf) * 60
        if per_epoch := result.get("steps_per_epoch", 0):
            self.epochs = -(-self.total_steps // per_epoch)

    def _end_line(self) -> None:
        """End the line of the last step, whose numbers are all there; it has one only."""
        values, self.of_step = self.of_step, {}
        if not values:
            return
        self._last_ended = self.step
        tag = next((tag for tag in values if tag.startswith(BEST)), "")
        best = values.get(tag, self._best)
        is_best = best != self._best and values.get(tag.removeprefix(BEST)) == best
        self._best = best
        is_awaited = bool(self._awaited & values.keys())
        if self.step > self._resumed_at:
            self._ended.append(Line(self.epoch, self.step, values, is_awaited, is_best))

    def take_ended(self, *, last: bool = False) -> list[Line]:
        """Return the lines that have ended since; at the `last` call that of the last step, too."""
        if last:
            self._end_line()
        ended, self._ended = self._ended, []
        return ended

    def take_newest(self) -> Line | None:
        """Return the line of the last step so far, if of this attempt; more makes a new one.

        The line of an epoch or an evaluation is returned once it has ended, with its best.
        """
        if not self._began or self._awaited & self.of_step.keys():
            return None
        values, self.of_step = self.of_step, {}
        return Line(self.epoch, self.step, values, False, False)

    @property
    def left_s(self) -> float | None:
        """Seconds to the end, by steps or minutes, at the speed until now; None if unknown."""
        if self._began is None or not self._began[1] < self.step < self.total_steps:
            return None
        (since, first), now = self._began, time.monotonic()
        left_s = (now - since) / (self.step - first) * (self.total_steps - self.step)
        return max(0.0, min(left_s, self._max_s - self._epochs_s - (now - self._epoch_began)))


class RunDisplay:
    """The display of a run that is under way; `update` is cheap, and may be called at any rate.

    Prints a line for each epoch that has ended, and the lines of workers; in a terminal the
    progress below, if `live`: a debugger's prompt would be drawn over. Workers' warnings go to
    `errors`, or to stderr.
    """

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
        self._state, self._printed = RunState(paths, epochs=epochs), Printed(paths)
        self._console, self._print_every, self._errors = console, print_every, errors
        self._began = False
        self._next = self._line_at = time.monotonic()
        self._unprinted: dict[str, float] = {}  # the newest value of each tag since the last line
        live = live and console.is_terminal and not console.is_dumb_terminal
        self._bar = _progress_bar(console) if live else None
        self._task = self._bar.add_task("starting", total=None, text="") if self._bar else None

    def __enter__(self) -> RunDisplay:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._began:  # else the run was refused: its files are of before
            self._next = 0.0
            self.update(last=True)
        if self._bar:
            # It stays where a run has stopped on its way; at the end the summary says the same.
            self._bar.live.transient = self._state.step in (0, self._state.total_steps)
            self._bar.stop()

    def waiting(self, devices: Sequence[str]) -> None:
        """Print that the run cannot start yet, since another command holds `devices`."""
        say(self._console, f"waiting: {waiting_for(devices)}")

    def update(self, *, last: bool = False) -> None:
        """Read new lines and show them; `last`: no more will come."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next, self._began = now + REFRESH_S, True
        new = self._printed.new(last=last)
        show_printed(self._console, ((f"rank {rank}", line) for rank, line in new), self._errors)
        state = self._state
        state.read()
        for about in filter(None, state.data_lines):
            say(self._console, about)
        state.data_lines.clear()
        lines = state.take_ended(last=last)
        for line in lines:
            self._unprinted |= line.values
            every, is_logged = self._print_every, tags.RUNNING_LOSS in line.values
            if line.is_awaited or (every and line.step % every == 0 and is_logged):
                self._print(line, left=line is lines[-1])
        is_quiet = not self._bar and now - self._line_at > PLAIN_LINE_S
        if is_quiet and (newest := state.take_newest()):
            self._unprinted |= newest.values
            if self._unprinted:
                self._print(newest, left=True)
        if self._bar and self._task is not None and state.total_steps:
            words = in_words({**self._unprinted, **state.of_step}, state.noun)
            self._bar.update(
                self._task,
                description=f"epoch {state.epoch}/{state.epochs}",
                total=state.total_steps,
                completed=state.step,
                text="  ".join([*words, *self._left()]),
            )

    def _print(self, line: Line, *, left: bool) -> None:
        state, values, self._unprinted = self._state, self._unprinted, {}
        self._line_at = time.monotonic()
        epoch, step = f"{line.epoch}/{state.epochs}", f"step {line.step}/{state.total_steps}"
        words = in_words(values, state.noun)
        if line.is_best:
            words.append("best")
        if self._console.is_terminal:  # lines of epochs are below one another
            epoch = epoch.rjust(2 * len(str(state.epochs)) + 1)
        elif left:  # which the bar has
            words += self._left()
        if not (self._console.is_terminal and tags.EPOCH_S in line.values):
            words.insert(0, step)
        text = "  ".join([f"epoch {epoch}", *words])
        say(self._console, text, "bold" if line.is_best and self._console.is_terminal else "")

    def _left(self) -> list[str]:
        left_s = self._state.left_s
        return [] if left_s is None else [f"{duration(left_s)} left"]


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


def waiting_for(devices: Sequence[str]) -> str:
    """Return why a run does not start."""
    are = "is" if len(devices) == 1 else "are"
    return f"{gpus_named(devices)} {are} in use by another expt command"


def _progress_bar(console: Console) -> Progress:
    label = TextColumn("{task.description}", markup=False)
    text = TextColumn("{task.fields[text]}", markup=False, table_column=Column())  # may be wrapped
    columns = [label, MofNCompleteColumn(), text]
    if console.width >= WIDE:
        columns.insert(1, BarColumn(bar_width=BAR))
    return Progress(*columns, console=console, refresh_per_second=10)


def describe_data(data: Mapping[str, Any]) -> list[str]:
    """Return lines on the samples that a run has found, and their features, by its record."""
    features = Features.read(data) if "inputs" in data else None
    sizes = {part: data.get(f"{part}_size") for part in tags.SPLITS}
    words = {"train": "train in an epoch (a stream)"} if data.get("is_uncounted") else {}
    samples = ", ".join(f"{n:,} {words.get(part, part)}" for part, n in sizes.items() if n)
    if not features or not samples:
        return [samples]
    most, share = data.get("majority") or ("", 0.0)
    uneven = f", {share:.1%} of train are {most}" if most else ""
    targets = (f"; {line}{uneven}" for line in features.targets.in_words())
    return [samples + "".join(targets), *features.inputs.in_words()]


def in_words(values: Mapping[str, float], noun: str = "image") -> list[str]:
    """Return the numbers of a line; the epoch's own, else those since the last log point.

    A sample is called `noun`.
    """
    trained = [tag.removesuffix("/train") for tag in values if tag.endswith("/train")]
    trained += [tag.removeprefix(tags.RUNNING) for tag in values if tag.startswith(tags.RUNNING)]
    own = (tag for tag in values if not tag.startswith(BEST))
    trained += [tag.rpartition("/")[0] for tag in own if tag.endswith(("/val", "/test"))]
    metric = next((name for name in trained if name != "loss"), "loss")
    named = {"loss": "loss", metric: "acc" if metric == "accuracy" else metric}.items()
    speed = "img/s" if noun == "image" else f"{noun}s/s"
    val, test = tags.metric(metric, "val"), tags.metric(metric, "test")
    objective = next((tag.removeprefix(BEST) for tag in values if tag.startswith(BEST)), val)
    is_other = objective not in (val, test)  # then `best` is of neither
    words = list[str]()

    def add(label: str, *of: str, form: Callable[[float], str] = decimals) -> None:
        if known := [values[tag] for tag in of if tag in values]:
            words.append(f"{label} {form(known[0])}")

    for name, short in named:
        add(short, tags.metric(name, "train"), tags.RUNNING + name)
    add(val if is_other else "val", val)
    add(test if is_other else "test", test)
    if is_other:
        add(objective, objective)
    add(speed, tags.SAMPLES_PER_S, tags.RUNNING_SAMPLES_PER_S, form="{:,.0f}".format)
    return words


class Printed:
    """The lines that workers print, from their logs; those that are there at first are not new.

    Warnings in `warned` are left out, and new ones added to it; several runs may share it.
    """

    def __init__(self, paths: RunPaths, warned: set[str] | None = None) -> None:
        self._paths = paths
        self._read = {log: log.stat().st_size for log in self._logs()}
        self._warned = set[str]() if warned is None else warned

    def _logs(self) -> list[Path]:
        folder = self._paths.logs(0).parent
        return sorted(
            log for name in ("stdout", "stderr") for log in folder.glob(f"*/*/{name}.log")
        )

    def new(self, *, last: bool = False) -> Iterator[tuple[int, str]]:
        """Yield the rank and text of each new line, and once each of expt's warnings on stderr.

        A line that is still being written is left for later, unless this is the `last` look.
        """
        for log in self._logs():
            read = self._read.get(log, 0)
            try:
                size = log.stat().st_size
                if size == read:
                    continue
                if size < read:  # it was of an attempt that was taken back
                    read = 0
                with log.open("rb") as file:
                    file.seek(read)
                    text = file.read(MAX_LAST_BYTES if last else MAX_BYTES)
            except OSError:  # removed meanwhile
                continue
            end = text.rfind(b"\n") + 1
            whole = text if last or (not end and len(text) == MAX_BYTES) else text[:end]
            self._read[log] = read + len(whole)
            rank, printed = int(log.parent.name), log.stem == "stdout"
            for line in whole.decode(errors="replace").splitlines():
                if printed:
                    yield rank, line
                elif line.startswith(WARNING) and line not in self._warned:
                    self._warned.add(line)
                    yield rank, line
            if printed and last and read + len(whole) < size:
                yield rank, f"... more in {log}"


def show_printed(
    console: Console, lines: Iterable[tuple[str, str]], errors: TextIO | None = None
) -> None:
    """Print lines, each with who has printed it; warnings go to `errors`, or to stderr."""
    found = list(lines)
    if plain := [f"[{who}] {line}" for who, line in found if not line.startswith(WARNING)]:
        say(console, "\n".join(plain))  # at once: a terminal's live lines are drawn again after it
    for who, line in found:
        if line.startswith(WARNING):
            warn(f"[{who}] {line.removeprefix(WARNING)}", errors)
