"""The numbers of a run, over all its attempts: the last of each tag, the best, and the times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from expt.config.kinds import Better
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
        """The seconds of all evaluations."""
        self.evaluated_at, self._evaluated_s = 0, 0.0
        """The step of the last evaluation, and the seconds of training until then."""
        self._began: float | None = None  # to train on in this epoch, since when its time counts
        self._earlier_s = 0.0
        self.is_within_epoch = False
        """True while an epoch is trained and its numbers are still to come."""
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
        self._began, self.is_within_epoch = self._clock(), True

    def end_epoch(self) -> float:
        """Return the seconds of the epoch's training, which has ended."""
        self.epoch_s.append(self._of_epoch_s)
        self._began, self._earlier_s, self.is_within_epoch = None, 0.0, False
        return self.epoch_s[-1]

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

    def begin_evaluation(self) -> None:
        """Count another evaluation."""
        self.evaluations += 1

    def forget(self, tags: Iterable[str]) -> None:
        """Forget the values of tags that are not measured now: older ones would pass for new."""
        for tag in tags:
            self.last.pop(tag, None)

    def end_evaluation(self, seconds: float) -> None:
        """Add the seconds of an evaluation, or of the test."""
        self.eval_s += seconds

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
        fix = "check the metric, or choose another, such as objective=loss/val"
        return f"{where}: no epoch can be the best; {fix}"

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
        self.evaluations = state.get("evaluations", 0)
        self._earlier_s = state["elapsed_s"]
        self.is_within_epoch = self._earlier_s > 0


def is_better(value: float, than: float | None, better: Better) -> bool:
    """Return whether `value` is finite and better `than` another."""
    if not math.isfinite(value):
        return False
    return than is None or (value < than if better == "min" else value > than)
