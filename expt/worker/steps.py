"""What is done after each step of a run: it is timed, traced, and told to the watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from expt.training.learner import Learner
from expt.training.parameter_groups import rate_of
from expt.worker.profiling import StepProfiler


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
