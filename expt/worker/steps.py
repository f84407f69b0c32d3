"""What is done after each step of a run: it is timed, traced and reported to the watchdog, and the
workers agree when to save and when to stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from expt import signals
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position
from expt.training.parameter_groups import rate_of


class Steps:
    """Those of one worker; `typed_at` is when the command was typed, or the run's turn came [by
    time.monotonic].
    """

    def __init__(
        self,
        learner: Learner,
        device: torch.device,
        *,
        typed_at: float,
        beat: Callable[[], None],
        profiler: StepProfiler | None,
    ) -> None:
        self._learner, self._device, self._typed_at = learner, device, typed_at
        self._beat, self._profiler = beat, profiler
        self.lr = 0.0
        """The learning rate that the last step has used."""
        self.first_s: float | None = None
        """How long it took to the end of this attempt's first step."""

    def done(self) -> None:
        """A step is done, and its learning rate still stands."""
        self._beat()
        self.lr = rate_of(self._learner.optimizer)
        if self.first_s is None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.first_s = time.monotonic() - self._typed_at
        if self._profiler:
            self._profiler.step()

    def close(self) -> None:
        """There are no more."""
        if self._profiler:
            self._profiler.close()


class SaveTimes:
    """When a checkpoint is due; None is never."""

    def __init__(
        self,
        *,
        every_steps: int | None,
        every_epochs: int | None,
        every_minutes: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_steps, self._every_epochs, self._every_minutes = (
            every_steps,
            every_epochs,
            every_minutes,
        )
        self._clock, self._saved_at = clock, clock()

    def saved(self) -> None:
        """A checkpoint has been made: the minutes count from now."""
        self._saved_at = self._clock()

    def is_due_by_clock(self) -> bool:
        """Whether so many minutes have passed."""
        return (
            self._every_minutes is not None
            and self._clock() - self._saved_at > self._every_minutes * 60
        )

    def is_due_by_steps(self, position: Position) -> bool:
        """Whether the step that was done last is one of every so many."""
        return bool(self._every_steps and position.step % self._every_steps == 0)

    def is_due_after_epoch(self, position: Position) -> bool:
        """Whether one is due, by whatever, now that an epoch has ended, and maybe the run."""
        by_epochs = bool(self._every_epochs and position.epoch % self._every_epochs == 0)
        return (
            by_epochs
            or self.is_due_by_steps(position)
            or position.is_run_done
            or self.is_due_by_clock()
        )


MEET_EVERY_S = 0.3


class Agreement:
    """A meeting of all workers, a few times a second, however long a step takes."""

    def __init__(
        self, worker: Worker, *, asked_to_stop: Callable[[], bool] = signals.asked
    ) -> None:
        self._worker, self._asked_to_stop = worker, asked_to_stop
        self._steps, self._due, self._since = 0, 1, time.perf_counter()
        self.stopping = False
        """Whether they have agreed to stop, because some worker was asked to."""

    def after_step(self, *, save: bool) -> bool:
        """Whether some worker wants to `save`, where the workers meet after this step; else False."""
        self._steps += 1
        if self._worker.world_size > 1 and self._steps < self._due:
            return False
        return self.meet(save=save)

    def meet(self, *, save: bool) -> bool:
        """Whether some worker wants to `save`; a collective."""
        stop = self._asked_to_stop()
        if self._worker.world_size > 1:
            now = time.perf_counter()
            step_s = (now - self._since) / max(1, self._steps)
            found = collectives.max_across_workers(
                [float(save), float(stop), step_s], self._worker.device
            )
            save, stop, slowest_s = found[0] > 0, found[1] > 0, found[2]
            self._steps, self._since = 0, now
            self._due = max(1, min(1000, int(MEET_EVERY_S / max(slowest_s, 1e-6))))
        self.stopping |= stop
        return save


WARMUP_STEPS, TRACED_STEPS = 5, 5
OPERATORS = 10


class StepProfiler:
    """Traces TRACED_STEPS steps after WARMUP_STEPS; call `step` after every optimiser step."""

    def __init__(self, trace: Path, table: Path, device: torch.device) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if device.type == "cuda" else []),
        ]
        self._trace, self._table = trace, table
        self._device = device.type
        self._profiler: Any = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=WARMUP_STEPS, active=TRACED_STEPS, repeat=1),
            on_trace_ready=self._write,
        )
        self._profiler.start()

    def step(self) -> None:
        """Say that an optimiser step is done."""
        self._profiler.step()

    def close(self) -> None:
        """Write what was traced, if the run was too short to come to its end before."""
        self._profiler.stop()

    def _write(self, profiler: Any) -> None:
        profiler.export_chrome_trace(str(self._trace))
        self._table.write_text(table_of(profiler.key_averages(), self._device), encoding="utf-8")


def table_of(averages: Any, device: str) -> str:
    """The most expensive operators, a line each: time, share, calls, name; of a GPU its kernels."""
    by = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    operators = [event for event in averages if _is_counted(event, device)]
    events = sorted(operators, key=lambda event: -getattr(event, by))
    total_us = sum(getattr(event, by) for event in events) or 1.0
    lines = [f"{'ms/step':>9} {'share':>6} {'calls/step':>10}  operator"]
    for event in events[:OPERATORS]:
        used_us = getattr(event, by)
        calls = event.count / TRACED_STEPS
        lines.append(
            f"{used_us / 1e3 / TRACED_STEPS:9.3f} {used_us / total_us:6.1%} {calls:10.1f} "
            f" {event.key.splitlines()[0]}"
        )
    return "\n".join(lines) + "\n"


def _is_counted(event: Any, device: str) -> bool:
    """Not the step as a whole; of a GPU neither what started kernels nor what is named around them."""
    if event.key.startswith("ProfilerStep"):
        return False
    if device == "cpu":
        return True
    return event.device_type != torch.autograd.DeviceType.CPU and not getattr(
        event, "is_user_annotation", False
    )
