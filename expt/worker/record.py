"""What a run remembers and writes: metrics.jsonl, result.json, its best, and early stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypedDict

from torch import Tensor

from expt import progress
from expt.config import imported
from expt.config.identity import VERSION
from expt.config.kinds import Better
from expt.config.schema import EarlyStop as Settings
from expt.dashboards.tensorboard import Dashboard
from expt.errors import warn
from expt.runs import provenance, tags
from expt.runs.attempt import accept
from expt.runs.metrics_file import MetricsWriter
from expt.runs.paths import RunPaths
from expt.runs.result import (
    COMPLETED,
    StoppedEarly,
    cost_until_now,
    read_result,
    update_result,
)
from expt.tasks.sums import Averages
from expt.training.learner import Position


def tagged(values: Averages, tag: Callable[[str], str], *, warns: bool = False) -> dict[str, float]:
    """Return the averages by their tags; warn where nothing had a weight, if it `warns`."""
    found = {tag(name): value for name, value in values.values.items()}
    if warns and not values.has_weight:
        without = ", ".join(name for name, value in found.items() if math.isnan(value))
        warn(f"{without}: not measured, because every target is ignored or has no weight")
    return found


class Record:
    """The record of a run; only rank 0 `writes` files."""

    def __init__(
        self,
        paths: RunPaths,
        position: Position,
        history: History,
        observer: Dashboard,
        *,
        writes: bool,
        has_custom: bool = False,
    ) -> None:
        self._paths, self._position = paths, position
        self._history, self._observer = history, observer
        if writes:  # from here on the earlier record is not restored
            accept(paths)
        self._metrics = MetricsWriter(paths) if writes else None
        self._provenance = provenance.of(read_result(paths)) if writes else {}
        self._begun: Future[None] | None = None
        self._has_custom, self._has_imported = has_custom, False
        self._logged = position.step, time.monotonic()

    def log(self, values: Mapping[str, float], *, all_of: str | None = None) -> None:
        """Log the value of each tag after the last step.

        With `all_of` forget other tags of this prefix, such as those of ranks that are gone.
        """
        self._wait()
        for tag in [tag for tag in self._history.last if all_of and tag.startswith(all_of)]:
            del self._history.last[tag]
        self._history.last.update(values)
        if self._metrics:
            self._metrics.write(self._position.step, self._position.epoch, values)
        self._observer.values(values)
        self._logged = self._position.step, time.monotonic()

    def end_step(self, samples: int) -> None:
        """Log the speed of steps with so many samples, where log points are far apart.

        So a display sees how far the run has come. Only rank 0 does: it needs no other.
        """
        step, since = self._logged
        took_s = time.monotonic() - since
        if self._metrics and took_s > progress.EVERY_S / 5:
            speed = (self._position.step - step) * samples / took_s
            self.log({tags.RUNNING_SAMPLES_PER_S: speed})

    def best(self) -> None:
        """Log the best value of the objective; warn once where it is not finite."""
        if best := self._history.best:
            self.log({tags.best(best["metric"]): best["value"]})
        elif (why := self._history.why_no_best(self._position.epoch)) and self._metrics:
            warn(why)

    @property
    def last(self) -> dict[str, float]:
        """A copy of the last value of each tag."""
        return dict(self._history.last)

    def picture(self, tag: str, image: Tensor) -> None:
        """Show a picture, uint8 [height, width, channels] on the CPU."""
        self._observer.picture(tag, image)

    def begin(self, **fields: Any) -> None:
        """Add to result.json in a thread, next to the first steps: the disk may be slow."""
        self._logged = self._position.step, time.monotonic()
        if self._metrics:
            executor = ThreadPoolExecutor(1, thread_name_prefix="result")
            self._begun = executor.submit(update_result, self._paths, **fields)
            executor.shutdown(wait=False)

    def result(self, **fields: Any) -> None:
        """Add to result.json."""
        self._wait()
        if self._metrics:
            update_result(self._paths, **fields)

    def imported(self) -> None:
        """Add to result.json, once, the person's own modules that have been imported so far."""
        if self._has_custom and not self._has_imported:
            self._has_imported = True
            self.result(**self._imported())

    def _wait(self) -> None:
        """Wait until `begin` has written, and raise its error."""
        if self._begun:
            self._begun.result()
            self._begun = None

    def state_dict(self) -> dict[str, Any]:
        """Return the provenance of the run, and the size of metrics.jsonl at a checkpoint."""
        assert self._metrics
        return {
            "version": VERSION,
            "metrics_bytes": self._metrics.num_bytes,
            "provenance": self._provenance,
        }

    def end(self, status: str, outcome: Mapping[str, Any]) -> str:
        """Close the files, then write the `status` to result.json, and return it."""
        is_complete = status == COMPLETED
        if self._metrics:
            self._metrics.close()
        self._observer.close(complete=is_complete)
        resumable = {} if is_complete else {"resumable": True}
        self.result(status=status, **resumable, **outcome, **self._spent(), **self._imported())
        return status

    def _imported(self) -> Mapping[str, Any]:
        """Return the entry of the person's own modules, by the source that was imported first."""
        found = imported.as_imported() if self._has_custom and self._metrics else {}
        earlier = read_result(self._paths).get("imported", {}) if found else {}
        return {"imported": {**found, **earlier}} if found else {}

    def _spent(self) -> Mapping[str, Any]:
        return cost_until_now(read_result(self._paths)) if self._metrics else {}


class Best(TypedDict):
    """The best value of the objective so far."""

    metric: str
    value: float
    epoch: int


class History:
    """The numbers of a run, over all its attempts."""

    def __init__(
        self, objective: str, better: Better, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._objective, self._better, self._clock = objective, better, clock
        self.last: dict[str, float] = {}
        """The last value of each tag."""
        self.best: Best | None = None
        self.epoch_s: list[float] = []
        self.eval_s = 0.0
        """The seconds of all evaluations."""
        self._epoch_began, self._earlier_s = clock(), 0.0
        self._warned = False

    def begin_epoch(self) -> None:
        """Begin an epoch, or continue it after an earlier attempt."""
        self._epoch_began = self._clock() - self._earlier_s

    def end_epoch(self) -> float:
        """Return the seconds of the epoch's training, which has ended."""
        self.epoch_s.append(self._clock() - self._epoch_began)
        self._earlier_s = 0.0
        return self.epoch_s[-1]

    def note_best(self, epoch: int) -> bool:
        """Return whether the last value of the objective is the best so far."""
        value, best = self.last.get(self._objective), self.best["value"] if self.best else None
        if value is None or not is_better(value, best, self._better):
            return False
        self.best = {"metric": self._objective, "value": value, "epoch": epoch}
        return True

    def why_no_best(self, epoch: int) -> str | None:
        """Return the warning, once, that the objective is not finite and no epoch is the best."""
        value = self.last.get(self._objective)
        if self._warned or self.best or value is None:
            return None
        self._warned = True
        return (
            f"objective {self._objective} is {value:g} after epoch {epoch}: no epoch can be the"
            " best; check the metric, or choose another, such as objective=loss/val"
        )

    @property
    def reached(self) -> dict[str, Any]:
        """What result.json says; the objective is its best value, or that of the test set."""
        value = self.best["value"] if self.best else self.last.get(self._objective)
        objective = {"name": self._objective, "value": value}
        shown = {"metrics": self.last, "best": self.best, "epoch_s": self.epoch_s}
        return {**shown, "objective": objective}

    def state_dict(self, *, within_epoch: bool) -> dict[str, Any]:
        """Return the state, with the time of an epoch that has not ended."""
        elapsed_s = self._clock() - self._epoch_began if within_epoch else 0.0
        times = {"epoch_s": self.epoch_s, "eval_s": self.eval_s, "elapsed_s": elapsed_s}
        return {"best": self.best, "last": self.last, **times}

    def load_state_dict(self, state: Mapping[str, Any], *, has_best: bool = True) -> None:
        """Load what `state_dict` returned; without `has_best` the weights of the best are gone."""
        self.best, self.last = state["best"] if has_best else None, dict(state["last"])
        self.epoch_s, self.eval_s = list(state["epoch_s"]), state["eval_s"]
        self._earlier_s = state["elapsed_s"]


def is_better(value: float, than: float | None, better: Better) -> bool:
    """Return whether `value` is finite and better `than` another."""
    if than is None or not math.isfinite(value):
        return than is None and math.isfinite(value)
    return value < than if better == "min" else value > than


class EarlyStop:
    """The patience with a metric, which all workers know; without settings it is never due."""

    def __init__(self, settings: Settings | None, better: Mapping[str, Better]) -> None:
        self._settings = settings
        self._better = better[settings.metric.partition("/")[0]] if settings else "min"
        self._best: float | None = None
        self._best_epoch = self._epoch = 0

    def look(self, values: Mapping[str, float], epoch: int) -> None:
        """Take in the values after `epoch`, by their tags."""
        if self._settings is None:
            return
        metric, self._epoch = self._settings.metric, epoch
        margin = self._settings.min_delta * (1 if self._better == "min" else -1)
        if is_better(values[metric] + margin, self._best, self._better):
            self._best, self._best_epoch = values[metric], epoch

    @property
    def is_due(self) -> bool:
        """Whether so many epochs have brought no improvement."""
        return self.may_be_due(self._epoch)

    def may_be_due(self, epoch: int) -> bool:
        """Return whether it is due after `epoch` if that brings no improvement."""
        waited = epoch - self._best_epoch
        return self._settings is not None and waited >= self._settings.patience

    @property
    def stopped(self) -> StoppedEarly | None:
        """The entry of result.json, where it is due."""
        if self._settings is None or not self.is_due:
            return None
        count, delta = self._epoch - self._best_epoch, self._settings.min_delta
        best = ""
        if self._best is not None:
            best = f"; its best was {self._best:.4f} in epoch {self._best_epoch}"
        for_epochs = f"for {count} epoch{'s' if count > 1 else ''}"
        by = f" by more than {delta:g}" if delta else ""
        return {
            "epoch": self._epoch,
            "reason": f"{self._settings.metric} has not improved{by} {for_epochs}{best}",
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the best so far, and when it was."""
        metric = self._settings.metric if self._settings else None
        epochs = {"best_epoch": self._best_epoch, "epoch": self._epoch}
        return {"metric": metric, "best": self._best, **epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; count anew where the metric is another now."""
        if self._settings and state["metric"] == self._settings.metric:
            self._best, self._best_epoch = state["best"], state["best_epoch"]
            self._epoch = state["epoch"]
