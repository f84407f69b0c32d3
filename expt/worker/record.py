"""What a run writes down as it goes: metrics.jsonl, result.json, and whatever an observer shows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypedDict

from torch import Tensor

from expt.config.identity import VERSION
from expt.config.kinds import Better
from expt.config.schema import EarlyStop as Settings
from expt.errors import warn
from expt.runs import provenance, tags
from expt.runs.attempt import accept
from expt.runs.metrics_file import MetricsWriter
from expt.runs.paths import RunPaths
from expt.runs.result import (
    COMPLETED,
    INTERRUPTED,
    PAUSED,
    StoppedEarly,
    cost_until_now,
    read_result,
    update_result,
)
from expt.tasks.sums import Averages
from expt.training.callback import Observer
from expt.training.learner import Position


def tagged(values: Averages, tag: Callable[[str], str], *, warns: bool = False) -> dict[str, float]:
    """The averages by their tags; where nothing had a weight it `warns` of them."""
    found = {tag(name): value for name, value in values.values.items()}
    if warns and not values.has_weight:
        without = ", ".join(name for name, value in found.items() if math.isnan(value))
        warn(
            f"{without}: nothing was measured, for every target there is to be ignored or has no"
            " weight"
        )
    return found


class Record:
    """One worker's part of it: all remember and look on, but only rank 0, which `writes`, has
    files.
    """

    def __init__(
        self,
        paths: RunPaths,
        position: Position,
        history: History,
        observer: Observer,
        *,
        writes: bool,
    ) -> None:
        self._paths, self._position, self._history, self._observer = (
            paths,
            position,
            history,
            observer,
        )
        if writes:  # what was there before is not to come back any more
            accept(paths)
        self._metrics = MetricsWriter(paths) if writes else None
        self._provenance = provenance.of(read_result(paths)) if writes else {}
        self._begun: Future[None] | None = None

    def log(self, values: Mapping[str, float], *, all_of: str | None = None) -> None:
        """The value of each tag after the steps that are done.

        They are all that begin with `all_of`: one that an earlier attempt has measured, with other
        workers, is gone."""
        self._wait()
        for tag in [tag for tag in self._history.last if all_of and tag.startswith(all_of)]:
            del self._history.last[tag]
        self._history.last.update(values)
        if self._metrics:
            self._metrics.write(self._position.step, self._position.epoch, values)
        self._observer.values(values)

    def best(self) -> None:
        """Log the objective's best value so far; say once that there is none, because it is not
        finite.
        """
        if best := self._history.best:
            self.log({tags.best(best["metric"]): best["value"]})
        elif (why := self._history.first_without_best(self._position.epoch)) and self._metrics:
            warn(why)

    @property
    def last(self) -> dict[str, float]:
        """The newest value of each tag, in a copy."""
        return dict(self._history.last)

    def picture(self, tag: str, image: Tensor) -> None:
        """Show a picture, uint8 [height, width, channels] on the CPU."""
        self._observer.picture(tag, image)

    def begin(self, **fields: Any) -> None:
        """Add to result.json beside the first steps, before anything is logged: the disk may take
        its time.
        """
        if self._metrics:
            with_one = ThreadPoolExecutor(1, thread_name_prefix="result")
            self._begun = with_one.submit(update_result, self._paths, **fields)
            with_one.shutdown(wait=False)

    def result(self, **fields: Any) -> None:
        """Add to result.json."""
        self._wait()
        if self._metrics:
            update_result(self._paths, **fields)

    def _wait(self) -> None:
        """Return when `begin` has written. Raises what went wrong."""
        if self._begun:
            self._begun.result()
            self._begun = None

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: how much of metrics.jsonl belongs to it, and where the run comes from."""
        assert self._metrics
        return {
            "version": VERSION,
            "metrics_bytes": self._metrics.num_bytes,
            "provenance": self._provenance,
        }

    def complete(self, outcome: Mapping[str, Any]) -> str:
        """Close the files, then say in result.json that the run is complete."""
        self._close(complete=True)
        self.result(status=COMPLETED, **outcome, **self._spent())
        return COMPLETED

    def pause(self, outcome: Mapping[str, Any]) -> str:
        """Close the files, then say in result.json that the run has paused, and what it has come
        to.
        """
        self._close(complete=False)
        self.result(status=PAUSED, resumable=True, **outcome, **self._spent())
        return PAUSED

    def interrupt(self) -> str:
        """Close the files, then say in result.json that the run was interrupted and can be resumed."""
        self._close(complete=False)
        history = self._history
        reached = {"metrics": history.last, "best": history.best, "objective": history.objective}
        self.result(
            status=INTERRUPTED, resumable=True, epoch_s=history.epoch_s, **reached, **self._spent()
        )
        return INTERRUPTED

    def _spent(self) -> Mapping[str, Any]:
        return cost_until_now(read_result(self._paths)) if self._metrics else {}

    def _close(self, *, complete: bool) -> None:
        if self._metrics:
            self._metrics.close()
        self._observer.close(complete=complete)


class Best(TypedDict):
    """The best value of the objective so far."""

    metric: str
    value: float
    epoch: int


class History:
    """Of a run, over all attempts at it."""

    def __init__(
        self, objective: str, better: Better, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._objective, self._better, self._clock = objective, better, clock
        self.last: dict[str, float] = {}
        """The newest value of each tag."""
        self.best: Best | None = None
        self.epoch_s: list[float] = []
        self.eval_s = 0.0
        """Of all evaluations."""
        self._epoch_began, self._earlier_s = clock(), 0.0
        self._told_none = False

    def begin_epoch(self) -> None:
        """An epoch begins, or goes on after what an earlier attempt has done of it."""
        self._epoch_began = self._clock() - self._earlier_s

    def end_epoch(self) -> float:
        """The epoch's training has ended; returns its seconds."""
        self.epoch_s.append(self._clock() - self._epoch_began)
        self._earlier_s = 0.0
        return self.epoch_s[-1]

    def note_best(self, epoch: int) -> bool:
        """Look at the objective's newest value; returns whether it is the best so far."""
        value = self.last.get(self._objective)
        if value is None or not is_better(
            value, self.best["value"] if self.best else None, self._better
        ):
            return False
        self.best = {"metric": self._objective, "value": value, "epoch": epoch}
        return True

    def first_without_best(self, epoch: int) -> str | None:
        """What is to be said, once, of an objective that is not finite, where no epoch has been the
        best yet.
        """
        value = self.last.get(self._objective)
        if self._told_none or self.best or value is None:
            return None
        self._told_none = True
        return (
            f"objective {self._objective} is {value:g} after epoch {epoch}: no epoch can be the"
            " best; see that the metric is finite and its weight not 0, or choose another by"
            " objective=loss/val"
        )

    @property
    def objective(self) -> dict[str, Any]:
        """What the run is chosen by: the best that any epoch reached, and test's one value."""
        return {
            "name": self._objective,
            "value": self.best["value"] if self.best else self.last.get(self._objective),
        }

    def state_dict(self, *, within_epoch: bool) -> dict[str, Any]:
        """All of it, with what was done of an epoch that has not ended."""
        elapsed_s = self._clock() - self._epoch_began if within_epoch else 0.0
        times = {"epoch_s": self.epoch_s, "eval_s": self.eval_s, "elapsed_s": elapsed_s}
        return {"best": self.best, "last": self.last, **times}

    def load_state_dict(self, state: Mapping[str, Any], *, has_best: bool = True) -> None:
        """Remember what `state_dict` gave; no best whose weights are gone, for they can be neither
        tested nor used.
        """
        self.best, self.last = state["best"] if has_best else None, dict(state["last"])
        self.epoch_s, self.eval_s, self._earlier_s = (
            list(state["epoch_s"]),
            state["eval_s"],
            state["elapsed_s"],
        )


def is_better(value: float, than: float | None, better: Better) -> bool:
    """Whether `value` is better than the best so far."""
    if than is None or not math.isfinite(value):
        return than is None and math.isfinite(value)
    return value < than if better == "min" else value > than


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
