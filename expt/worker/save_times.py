"""When a run saves a checkpoint: every so many steps, epochs or minutes, and at its end."""

from __future__ import annotations

import time
from collections.abc import Callable

from expt.training.learner import Position


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
