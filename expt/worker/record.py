"""What a run writes down as it goes: metrics.jsonl, result.json, and whatever an observer shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from expt.config.identity import VERSION
from expt.errors import warn
from expt.runs import provenance, spending, tags
from expt.runs.attempt import accept
from expt.runs.metrics_file import MetricsWriter
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, INTERRUPTED, PAUSED, read_result, update_result
from expt.tasks.sums import Averages
from expt.training.callback import Observer
from expt.training.learner import Position
from expt.worker.history import History


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
        return spending.until_now(read_result(self._paths)) if self._metrics else {}

    def _close(self, *, complete: bool) -> None:
        if self._metrics:
            self._metrics.close()
        self._observer.close(complete=complete)
