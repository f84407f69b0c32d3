"""The numbers of a run: the last of each tag, the best, the times, and the end that they bring."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from expt.config import schema
from expt.config.kinds import Better
from expt.errors import counted, decimals
from expt.runs.result import Best


class History:
    """The numbers of a run, over all its attempts."""

    def __init__(
        self,
        objective: str,
        better: Better,
        *,
        keep_best: int = 1,
        judges: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin; where nothing `judges` the weights, the last are the best."""
        self._objective, self._better, self._clock = objective, better, clock
        self._keep_best, self._judges = keep_best, judges
        self.evaluations = 0
        """The evaluations begun, but for the test."""
        self.last: dict[str, float] = {}
        """The last value of each tag."""
        self.bests: list[Best] = []
        """The best evaluations, whose checkpoints are kept, the best first."""
        self.epoch_s: list[float] = []
        self.eval_s = 0.0
        """The seconds of all evaluations, and of the test."""
        self.evaluated_at, self._evaluated_s = 0, 0.0
        """The step of the last evaluation, and the seconds of training until then."""
        self._began: float | None = None  # to train on in this epoch, since when its time counts
        self._earlier_s = 0.0
        self._warned = False

    def log(self, values: Mapping[str, float], *, all_of: str | None = None) -> None:
        """Take the last value of each tag; forget other tags of prefix `all_of`."""
        if all_of:
            self.last = {tag: one for tag, one in self.last.items() if not tag.startswith(all_of)}
        self.last.update(values)

    @property
    def best(self) -> Best | None:
        """The best value of the objective so far."""
        return self.bests[0] if self.bests else None

    def begin_epoch(self) -> None:
        """Begin an epoch, or continue it after an earlier attempt."""
        self._began = self._clock()

    def end_epoch(self) -> float:
        """Return the seconds of the epoch's training, which has ended."""
        self.epoch_s.append(self._of_epoch_s)
        self._began, self._earlier_s = None, 0.0
        return self.epoch_s[-1]

    @property
    def is_within_epoch(self) -> bool:
        """True while an epoch is trained and its numbers are still to come."""
        return self._began is not None or self._earlier_s > 0

    def leave_out(self, seconds: float) -> None:
        """Leave seconds of the epoch out, in which nothing was trained."""
        if self._began is not None:
            self._earlier_s -= seconds

    @property
    def _of_epoch_s(self) -> float:
        if self._began is None:
            return self._earlier_s
        return self._earlier_s + (self._clock() - self._began)

    @property
    def trained_s(self) -> float:
        """The seconds of training until now."""
        return sum(self.epoch_s) + self._of_epoch_s

    @property
    def unevaluated_s(self) -> float:
        """The seconds of training since the last evaluation."""
        return self.trained_s - self._evaluated_s

    def forget(self, tags: Iterable[str]) -> None:
        """Forget the values of tags that are not measured now: older ones would pass for new."""
        for tag in tags:
            self.last.pop(tag, None)

    def note_evaluation(self, epoch: int, step: int) -> bool:
        """Note an evaluation; return whether it is one of the best until now."""
        self.evaluated_at, self._evaluated_s = step, self.trained_s
        value = self.last.get(self._objective)
        if value is None or not math.isfinite(value):
            return False
        found: Best = {"metric": self._objective, "value": value, "epoch": epoch, "step": step}
        if not self._judges:
            self.bests = []
        place = sum(not is_better(value, each["value"], self._better) for each in self.bests)
        self.bests = [*self.bests[:place], found, *self.bests[place:]][: self._keep_best]
        return found in self.bests

    def why_no_best(self, epoch: int) -> str | None:
        """Return the warning, once, that the objective is not finite and no epoch is the best."""
        value = self.last.get(self._objective)
        if self._warned or self.bests or value is None:
            return None
        self._warned = True
        where = f"objective {self._objective} is {value:g} after epoch {epoch}"
        return f"{where}: no epoch can be the best; check the metric, or name another as objective"

    @property
    def reached(self) -> dict[str, Any]:
        """The fields of result.json; the objective is its best value, or that of the test set."""
        value = self.best["value"] if self.best else self.last.get(self._objective)
        objective = {"name": self._objective, "value": value}
        shown = {"metrics": self.last, "best": self.best, "epoch_s": self.epoch_s}
        return {**shown, "objective": objective}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the time of an epoch that has not ended."""
        times = {"epoch_s": self.epoch_s, "eval_s": self.eval_s, "elapsed_s": self._of_epoch_s}
        evaluated = {"evaluated_at": self.evaluated_at, "evaluated_s": self._evaluated_s}
        evaluated["evaluations"] = self.evaluations
        return {"best": self.best, "bests": self.bests, "last": self.last, **times, **evaluated}

    def load_state_dict(self, state: Mapping[str, Any], *, has_best: bool = True) -> None:
        """Load a state of `state_dict`; without `has_best` the weights of the best are gone."""
        self.bests = list(state["bests"]) if has_best else []
        self.last = dict(state["last"])
        self.epoch_s, self.eval_s = list(state["epoch_s"]), state["eval_s"]
        self.evaluated_at, self._evaluated_s = state["evaluated_at"], state["evaluated_s"]
        self.evaluations = state["evaluations"]
        self._earlier_s = state["elapsed_s"]


class EarlyStop:
    """The end of a run before its last step, by a metric or the time; all workers know it."""

    def __init__(
        self,
        settings: schema.EarlyStop | None,
        better: Mapping[str, Better],
        max_minutes: float | None = None,
    ) -> None:
        self._settings, self._max_minutes = settings, max_minutes
        self.is_time_up = False
        """True once the run has been trained for its longest time."""
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

    @property
    def ended_by(self) -> str | None:
        """The key by which the run ends; None if it continues."""
        reached = operator.le if self._better == "min" else operator.ge
        threshold, last = self._threshold, self._last
        if threshold is not None and math.isfinite(last) and reached(last, threshold):
            return "early_stop.threshold"
        if self._waited >= self._patience:
            return "early_stop.patience"
        return "max_minutes" if self.is_time_up else None

    @property
    def may_be_due(self) -> bool:
        """True if the run may end by it after one more evaluation."""
        has_threshold = self._threshold is not None
        return self.is_time_up or has_threshold or self._waited + 1 >= self._patience

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
        if self._settings and state["metric"] == self._settings.metric:
            self._best, self._last, self._waited = state["best"], state["last"], state["waited"]
            self._best_at = state["best_at"]


def is_better(value: float, than: float | None, better: Better) -> bool:
    """Return whether `value` is finite and better `than` another."""
    if not math.isfinite(value):
        return False
    return than is None or (value < than if better == "min" else value > than)
