"""The end of a run before its last step, by a metric or the time."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

from expt.config import schema
from expt.config.kinds import Better
from expt.errors import counted, decimals
from expt.worker.history import is_better


class EarlyStop:
    """The end of a run before its last step, by a metric or the time; all workers know it."""

    def __init__(
        self,
        settings: schema.EarlyStop | None,
        better: Mapping[str, Better],
        max_minutes: float | None = None,
    ) -> None:
        self._settings, self._max_minutes, self._is_time_up = settings, max_minutes, False
        self._threshold = settings.threshold if settings else None
        patience = settings.patience if settings else None
        self._patience = math.inf if patience is None else patience
        self._better = better[settings.metric.partition("/")[0]] if settings else "min"
        self._best: float | None = None
        self._best_at, self._last = 0, math.nan
        self._waited = 0
        """Evaluations without an improvement."""

    def look(self, values: Mapping[str, float], step: int) -> None:
        """Take in the values of an evaluation, by their tags."""
        if self._settings is None or self._settings.metric not in values:
            return
        self._last = values[self._settings.metric]
        self._waited += 1
        margin = self._settings.min_delta * (1 if self._better == "min" else -1)
        if is_better(self._last + margin, self._best, self._better):
            self._best, self._best_at, self._waited = self._last, step, 0

    def note_time_up(self) -> None:
        """Note that the run has been trained for its longest time."""
        self._is_time_up = True

    @property
    def ended_by(self) -> str | None:
        """The key by which the run ends; None if it continues."""
        reached = operator.le if self._better == "min" else operator.ge
        threshold, last = self._threshold, self._last
        if threshold is not None and math.isfinite(last) and reached(last, threshold):
            return "early_stop.threshold"
        if self._waited >= self._patience:
            return "early_stop.patience"
        return "max_minutes" if self._is_time_up else None

    @property
    def may_be_due(self) -> bool:
        """True if the run may end by it after one more evaluation."""
        has_threshold = self._threshold is not None
        return self._is_time_up or has_threshold or self._waited + 1 >= self._patience

    @property
    def reason(self) -> str:
        """Why the run ends, in words."""
        key = self.ended_by
        if self._settings is None or key == "max_minutes":
            return f"max_minutes={self._max_minutes:g} of training are over"
        metric, delta = self._settings.metric, self._settings.min_delta
        if key == "early_stop.threshold":
            last = decimals(self._last)
            return f"{metric} is {last}, early_stop.threshold is {self._threshold:g}"
        by = f" by more than {delta:g}" if delta else ""
        text = f"{metric} has not improved{by} in {counted(self._waited, 'evaluation')}"
        if self._best is None:
            return text
        return f"{text}; its best was {decimals(self._best)} at step {self._best_at}"

    def state_dict(self) -> dict[str, Any]:
        """Return the best so far, when it was, and how long ago."""
        metric = self._settings.metric if self._settings else None
        best = {"best": self._best, "best_at": self._best_at}
        return {"metric": metric, **best, "last": self._last, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`; start counting again if the metric has changed."""
        if self._settings and state["metric"] == self._settings.metric and "waited" in state:
            self._best, self._last, self._waited = state["best"], state["last"], state["waited"]
            self._best_at = state["best_at"]
