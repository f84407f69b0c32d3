"""What workers decide together: each may wish for something at any time, all do it after the same step."""

from __future__ import annotations

import time
from collections.abc import Sequence

from expt.training import collectives
from expt.training.collectives import Worker

MEET_EVERY_S = 0.3


class Agreement:
    """A meeting of all workers, a few times a second, however long a step takes."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._steps, self._due, self._since = 0, 1, time.perf_counter()

    def after_step(self, wishes: Sequence[bool]) -> list[bool]:
        """For each of `wishes` whether some worker has it, where the workers meet after this step; else False."""
        self._steps += 1
        if self._worker.world_size > 1 and self._steps < self._due:
            return [False] * len(wishes)
        return self.meet(wishes)

    def meet(self, wishes: Sequence[bool]) -> list[bool]:
        """For each of `wishes` whether some worker has it; a collective."""
        if self._worker.world_size == 1:
            return list(wishes)
        now = time.perf_counter()
        step_s = (now - self._since) / max(1, self._steps)
        *found, slowest_s = collectives.max_across_workers([*map(float, wishes), step_s], self._worker.device)
        self._steps, self._since = 0, now
        self._due = max(1, min(1000, int(MEET_EVERY_S / max(slowest_s, 1e-6))))
        return [value > 0 for value in found]
