"""The record of a run: metrics.jsonl and result.json."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from expt import progress
from expt.config import own_code
from expt.config.identity import VERSION
from expt.dashboards.tensorboard import Dashboard
from expt.errors import warn
from expt.runs import provenance, tags
from expt.runs.attempt import Rollback
from expt.runs.metrics_file import MetricsWriter
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, cost_until_now, read_result, update_result
from expt.tasks.sums import Averages
from expt.training.learner import Position
from expt.worker.history import History


def tagged(
    values: Averages, split: str | None, warn: Callable[[str], object] = lambda text: None
) -> dict[str, float]:
    """Return a split's averages, or those of the last steps, by tag; `warn` if nothing counts."""
    found = {
        tags.metric(name, split) if split else tags.RUNNING + name: value
        for name, value in values.values.items()
    }
    if not values.has_weight:
        without = ", ".join(name for name, value in found.items() if math.isnan(value))
        warn(f"{without}: not measured, because every target is ignored or has no weight")
    return found


class Record:
    """The record of a run; only rank 0 `writes` files.

    `classes` are the run's custom ones, and `path` was `sys.path` before their import. Where a run
    `is_done` that begins, its earlier record is put back if it is interrupted.
    """

    def __init__(
        self,
        paths: RunPaths,
        position: Position,
        history: History,
        observer: Dashboard,
        *,
        writes: bool,
        is_done: bool = False,
        classes: Sequence[str] = (),
        path: Sequence[str] | None = None,
    ) -> None:
        self._paths, self._position = paths, position
        self._history, self._observer = history, observer
        if writes and not is_done:  # from here on the earlier record is not restored
            Rollback(paths).commit()
        self._metrics = MetricsWriter(paths) if writes else None
        self._provenance = provenance.for_checkpoint(read_result(paths)) if writes else {}
        self._begun: Future[None] | None = None
        self._classes, self._path = classes, path
        self._files = set[Path]()
        """The modules that no import statement names, whose state in git is recorded."""
        self._logged = position.step, time.monotonic()

    def log(self, values: Mapping[str, float], *, all_of: str | None = None) -> None:
        """Log each tag's value after the last step; forget other tags of prefix `all_of`."""
        self._wait()
        self._history.log(values, all_of=all_of)
        if self._metrics:
            self._metrics.write(self._position.step, self._position.epoch, values)
        self._observer.values(values)
        self._logged = self._position.step, time.monotonic()

    def end_step(self, samples: int) -> None:
        """Log rank 0's speed, for displays, in steps with that many samples far from log points."""
        step, since = self._logged
        took_s = time.monotonic() - since
        if self._metrics and took_s > progress.EVERY_S / 5:
            speed = (self._position.step - step) * samples / took_s
            self.log({tags.RUNNING_SAMPLES_PER_S: speed})

    def note_sources(self) -> None:
        """Note the source that was imported, before it is edited."""
        if self._classes:
            self.result(**self._imported())

    def best(self) -> None:
        """Log the best value of the objective; warn once where it is not finite."""
        if best := self._history.best:
            self.log({tags.BEST + best["metric"]: best["value"]})
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

    def _wait(self) -> None:
        """Wait until `begin` has written, and raise its error."""
        if self._begun:
            self._begun.result()
            self._begun = None

    def state_dict(self) -> dict[str, Any]:
        """Return the provenance of the run, and the size of metrics.jsonl at a checkpoint."""
        assert self._metrics
        size = {"metrics_bytes": self._metrics.num_bytes}
        return {"version": VERSION, **size, "provenance": self._provenance}

    def end(self, status: str, outcome: Mapping[str, Any]) -> str:
        """Close the files, then write the `status` to result.json, and return it."""
        if self._metrics:
            self._metrics.close()
        self._observer.close(complete=status == COMPLETED)
        resumable = {} if status == COMPLETED else {"resumable": True}
        spent = cost_until_now(read_result(self._paths)) if self._metrics else {}
        self.result(status=status, **resumable, **outcome, **spent, **self._imported())
        if self._metrics:
            Rollback(self._paths).commit()
        return status

    def _imported(self) -> Mapping[str, Any]:
        """Return result.json's entries of distributions, and of custom modules by first source."""
        if not self._metrics:
            return {}
        versions = {"distributions": provenance.imported_versions()}
        if not self._classes:
            return versions
        own_code.check_caches(own_code.own_files().values())  # for later runs
        known, record = own_code.own_modules(self._classes), read_result(self._paths)
        found = {**own_code.as_imported(known, self._path), **record.get("imported", {})}
        files = {Path(file) for name, file in own_code.own_files().items() if name not in known}
        git = provenance.in_git(files - self._files) if files - self._files else {}
        self._files |= files
        repositories = {**git.get("repositories", {}), **record.get("repositories", {})}
        others = {"repositories": repositories} if repositories else {}
        return {**versions, "imported": found, **others}
