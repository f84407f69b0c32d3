"""When a step was logged, which metrics.jsonl does not say: TensorBoard's files do."""

from __future__ import annotations

import time

from expt.runs.paths import RunPaths


def of_steps(paths: RunPaths) -> dict[int, float]:
    """Of each step that TensorBoard knows, when it was logged last [seconds since the epoch]."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[int, float] = {}
    for path in paths.event_files():
        try:
            for event in EventFileLoader(str(path)).Load():
                if event.HasField("summary"):
                    found[event.step] = event.wall_time
        except Exception:  # a damaged file: what TensorBoard raises is of many kinds
            continue
    return found


class StepTimes:
    """Now, for what is sent as it comes; what TensorBoard says, for what was there before."""

    def __init__(self, paths: RunPaths, *, live: bool) -> None:
        self._paths = paths
        self._known: dict[int, float] | None = {} if live else None

    def __call__(self, step: int) -> float:
        """Seconds since the epoch."""
        if self._known is None:
            self._known = of_steps(self._paths)
        return self._known.get(step) or time.time()
