"""What workers decide together: each may want to save or to stop at any time, all do it after the
same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from expt import signals
from expt.training import collectives
from expt.training.collectives import Worker

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
