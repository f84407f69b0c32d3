"""Act after each step: report to the watchdog, profile, agree to save or to stop."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from expt import progress, signals
from expt.config.schema import UNPROFILED_STEPS, RunConfig
from expt.runs import tags
from expt.runs.paths import RunPaths
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position
from expt.training.parameter_groups import own_numbers, rate_of
from expt.worker.history import History

MEET_EVERY_S = 0.3
WISHES = ("save", "evaluate", "end")
TRACED_STEPS = 5
OPERATORS = 10
"""The rows of a profile's table."""


class Steps:
    """The steps of one worker; a user has waited for the first since `waited_since`.

    That is a time of time.monotonic. A profile is written if it has the `profiled` run's paths.
    """

    def __init__(
        self, learner: Learner, worker: Worker, waited_since: float, profiled: RunPaths | None
    ) -> None:
        self._learner, self._worker, self._waited_since = learner, worker, waited_since
        self._profiler = profiler_of(profiled, worker.device) if profiled else None
        self._step: progress.Phase | None = None
        self.rates: dict[str, float] = {tags.LR: 0.0}
        """The learning rates of the last step, by their tags."""
        own = own_numbers(learner.optimizer)
        self._rated = {tags.LR: None, **{f"{tags.LR}/groups.{number}": number for number in own}}
        self.first_s: float | None = None
        """The seconds until the end of this attempt's first step."""

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Have a step that takes long reported until the end."""
        with progress.phase("the first step" if self.first_s is None else "a step") as self._step:
            yield

    def done(self) -> None:
        """Note that a step is done; call it before the learning rate changes."""
        self._worker.beat()
        assert self._step
        self._step.again()
        optimizer = self._learner.optimizer
        self.rates = {tag: rate_of(optimizer, own) for tag, own in self._rated.items()}
        if self.first_s is None:
            self._step.name = "a step"
            if self._worker.device.type == "cuda":
                torch.cuda.synchronize(self._worker.device)
            self.first_s = time.monotonic() - self._waited_since
        if self._profiler:
            self._profiler.step()

    def close(self) -> None:
        """Write the profile, if there is one."""
        if self._profiler:
            self._profiler.stop()


class Times:
    """When an evaluation ("evaluate"), a checkpoint ("save") and the run's end ("end") are due."""

    def __init__(self, config: RunConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock, self._saved_at = config, clock, clock()

    def saved(self) -> None:
        """Count the minutes between checkpoints from now."""
        self._saved_at = self._clock()

    @property
    def unsaved_s(self) -> float:
        """The seconds since the last checkpoint."""
        return self._clock() - self._saved_at

    def by_steps(self, position: Position) -> set[str]:
        """Return the actions that are due after the last step by its number."""
        config, ends_epoch = self._config, not position.is_within_epoch
        saves = ends_epoch and _is_multiple(position.epoch, config.checkpoint.every_epochs)
        saves |= _is_multiple(position.step, config.checkpoint.every_steps)
        by_step = _is_multiple(position.step, config.eval_every_steps)
        evaluates = ends_epoch if config.evaluates_epochs else by_step
        return {name for name, due in (("evaluate", evaluates), ("save", saves)) if due}

    def by_clock(self, trained: History | None) -> set[str]:
        """Return the actions that are due by this worker's clock, and by the time `trained`."""
        config, due = self._config, set[str]()
        if self.unsaved_s > _seconds(config.checkpoint.every_minutes):
            due.add("save")
        if trained is None or (config.eval_every_minutes is None and config.max_minutes is None):
            return due
        if trained.unevaluated_s >= _seconds(config.eval_every_minutes):
            due.add("evaluate")
        if self.is_over(trained.trained_s):
            due.add("end")
        return due

    def is_over(self, trained_s: float) -> bool:
        """Return whether the run ends after `trained_s` seconds of training."""
        return trained_s >= _seconds(self._config.max_minutes)


def _is_multiple(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0


def _seconds(minutes: float | None) -> float:
    return math.inf if minutes is None else minutes * 60


class Agreement:
    """An agreement of all workers, a few times a second, on actions that one's clock asks for."""

    def __init__(
        self, worker: Worker, *, asked_to_stop: Callable[[], bool] = signals.asked
    ) -> None:
        self._worker, self._asked_to_stop = worker, asked_to_stop
        self._steps, self._due, self._since = 0, 1, time.perf_counter()
        self.stopping = False
        """True if the workers have agreed to stop, because one got a signal."""

    def after_step(self, wishes: set[str]) -> set[str]:
        """Return the wishes of all; none where they don't meet after this step."""
        self._steps += 1
        if self._worker.world_size > 1 and self._steps < self._due:
            return set()
        return self.meet(wishes)

    def meet(self, wishes: set[str]) -> set[str]:
        """Return those of WISHES that a worker has; a collective."""
        stop = self._asked_to_stop()
        if self._worker.world_size > 1:
            now = time.perf_counter()
            step_s = (now - self._since) / max(1, self._steps)
            mine = [float(wish in wishes) for wish in WISHES]
            *all_wishes, stops, slowest_s = collectives.max_across_workers(
                [*mine, float(stop), step_s]
            )
            wishes = {wish for wish, has in zip(WISHES, all_wishes, strict=True) if has}
            stop = stops > 0
            self._steps, self._since = 0, now
            self._due = max(1, min(1000, int(MEET_EVERY_S / max(slowest_s, 1e-6))))
        self.stopping |= stop
        return wishes


def profiler_of(paths: RunPaths, device: torch.device) -> Any:
    """Start torch's profiler, which writes a trace of some steps, and a table of their operators.

    They are TRACED_STEPS steps after UNPROFILED_STEPS, or fewer where it is stopped before.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    on_gpu = device.type == "cuda"

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(str(paths.trace))
        averages = profiler.key_averages()
        averages[:] = [each for each in averages if not each.key.startswith("ProfilerStep")]
        by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        written = averages.table(by, row_limit=OPERATORS, max_name_column_width=40)
        paths.operators.write_text(written, encoding="utf-8")

    profiler = profile(
        activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu],
        schedule=schedule(wait=0, warmup=UNPROFILED_STEPS, active=TRACED_STEPS, repeat=1),
        on_trace_ready=write,
    )
    profiler.start()
    return profiler
