"""Rank 0's three records of a run, written together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expt import record, tensorboard
from expt.paths import RunPaths
from expt.train import Position


class Log:
    """The event file, metrics.jsonl and result.json."""

    def __init__(self, paths: RunPaths, hyperparameters: Mapping[str, Any], tags: Sequence[str]) -> None:
        self._paths = paths
        self._events = tensorboard.Writer(paths.folder, hyperparameters, tags)
        self._metrics = record.MetricsWriter(paths)
        self.last: dict[str, float] = {}

    def values(self, position: Position, values: Mapping[str, float]) -> None:
        """The value of each tag after the steps that are done."""
        self.last.update(values)
        self._metrics.write(position.step, position.epoch, values)
        self._events.write(position.step, values)

    def result(self, **fields: Any) -> None:
        """Add to result.json."""
        record.update_result(self._paths, **fields)

    def flush(self) -> None:
        """Let TensorBoard see what was written."""
        self._events.flush()

    def complete(self, outcome: Mapping[str, Any]) -> None:
        """Close the event file, then say in result.json that the run is complete."""
        self._metrics.close()
        self._events.close()
        self.result(status=record.COMPLETED, **outcome)
