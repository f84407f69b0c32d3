"""Rank 0's three records of a run, written together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expt.runs.metrics_file import MetricsReader, MetricsWriter
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, INTERRUPTED, update_result
from expt.tensorboard import events
from expt.training.learner import Position


class Log:
    """The event file, metrics.jsonl and result.json; `continued_at` is the step that an earlier attempt came to."""

    def __init__(
        self,
        paths: RunPaths,
        hyperparameters: Mapping[str, Any],
        charts: Mapping[str, Mapping[str, list[str]]],
        *,
        continued_at: int | None = None,
    ) -> None:
        self._paths = paths
        earlier = None if continued_at is None else paths.event_files()
        self.events = events.Writer(
            paths.folder, hyperparameters, charts, continued_at=continued_at if earlier else None
        )
        if earlier == []:  # in a new folder: TensorBoard gets the whole curve there
            for point in MetricsReader(paths).read():
                self.events.write(point.step, {point.tag: point.value})
        self._metrics = MetricsWriter(paths)
        self.last: dict[str, float] = {}

    @property
    def metrics_bytes(self) -> int:
        """Size of metrics.jsonl."""
        return self._metrics.num_bytes

    def values(self, position: Position, values: Mapping[str, float]) -> None:
        """The value of each tag after the steps that are done."""
        self.last.update(values)
        self._metrics.write(position.step, position.epoch, values)
        self.events.write(position.step, values)

    def result(self, **fields: Any) -> None:
        """Add to result.json."""
        update_result(self._paths, **fields)

    def flush(self) -> None:
        """Let TensorBoard see what was written."""
        self.events.flush()

    def complete(self, outcome: Mapping[str, Any]) -> None:
        """Close the event file, then say in result.json that the run is complete."""
        self._metrics.close()
        self.events.close()
        self.result(status=COMPLETED, **outcome)

    def interrupt(self) -> None:
        """Close the event file, then say in result.json that the run was interrupted and can go on."""
        self._metrics.close()
        self.events.close(complete=False)
        self.result(status=INTERRUPTED, resumable=True, metrics=self.last)
