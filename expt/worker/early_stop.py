"""When a run ends before its last epoch, because a metric no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expt.config.schema import EarlyStop as Settings
from expt.config.tasks import Better
from expt.runs.result import StoppedEarly
from expt.worker.history import is_better


class EarlyStop:
    """Looks at each epoch's numbers, which all workers have alike; with None for settings it is
    never due.
    """

    def __init__(self, settings: Settings | None, better: Mapping[str, Better]) -> None:
        """`better` says of each metric which way it is better."""
        self._settings = settings
        self._better = better[settings.metric.partition("/")[0]] if settings else "min"
        self._best: float | None = None
        self._best_epoch = self._epoch = 0

    def look(self, values: Mapping[str, float], epoch: int) -> None:
        """Take in what was measured after `epoch`, under its tags."""
        if self._settings is None:
            return
        metric, self._epoch = self._settings.metric, epoch
        margin = self._settings.min_delta * (1 if self._better == "min" else -1)
        if is_better(values[metric] + margin, self._best, self._better):
            self._best, self._best_epoch = values[metric], epoch

    @property
    def is_due(self) -> bool:
        """Whether so many epochs have brought no improvement."""
        return (
            self._settings is not None and self._epoch - self._best_epoch >= self._settings.patience
        )

    @property
    def stopped(self) -> StoppedEarly | None:
        """What result.json says, where it is due."""
        if self._settings is None or not self.is_due:
            return None
        count, delta = self._epoch - self._best_epoch, self._settings.min_delta
        best = (
            ""
            if self._best is None
            else f"; its best was {self._best:.4f} in epoch {self._best_epoch}"
        )
        for_epochs = f"for {count} epoch{'s' if count > 1 else ''}"
        by = f" by more than {delta:g}" if delta else ""
        return {
            "epoch": self._epoch,
            "reason": f"{self._settings.metric} has not improved{by} {for_epochs}{best}",
        }

    def state_dict(self) -> dict[str, Any]:
        """The best so far, and when."""
        metric = self._settings.metric if self._settings else None
        return {
            "metric": metric,
            "best": self._best,
            "best_epoch": self._best_epoch,
            "epoch": self._epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from what `state_dict` gave; from there anew where another metric is looked at
        now.
        """
        if self._settings and state["metric"] == self._settings.metric:
            self._best, self._best_epoch, self._epoch = (
                state["best"],
                state["best_epoch"],
                state["epoch"],
            )
