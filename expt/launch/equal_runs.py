"""Runs of a sweep that differ only in settings of their length, and turn out to be equally long.

The number of steps is known once the first of them has its data; the first is trained, and the
others begin from its last checkpoint, with nothing left to train.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from expt.config.groups import planned_steps
from expt.config.identity import LENGTH, digest
from expt.launch.job import QUEUED, Job, request_of
from expt.runs.result import COMPLETED, RUNNING, read_result


class EqualRuns:
    """The jobs of one command by all settings but their length."""

    def __init__(self) -> None:
        self._alike = defaultdict[str, list[Job]](list)
        self._waiting: dict[int, list[Job]] = {}
        """Earlier jobs that may be equal, for each that waits, by its number."""
        self._jobs: dict[int, Job] = {}

    def hold(self, number: int, job: Job) -> bool:
        """Return whether a job is to wait for an earlier one; it is `released` then."""
        request = request_of(job)
        is_plain = request.config.fork is None and request.config.resume in (None, "auto")
        if number in self._jobs or job.is_trial or request.instead or not is_plain:
            return False
        alike = self._alike[digest(request.config, request.identity.content, but=LENGTH)]
        same = request.identity.digest  # the same run, which another command may have begun
        earlier = [one for one in alike if request_of(one).identity.digest != same]
        alike.append(job)
        self._jobs[number] = job
        if earlier:
            self._waiting[number] = earlier
        return bool(earlier)

    def released(self) -> Iterator[int]:
        """Yield the numbers of jobs that wait no longer."""
        for number, earlier in list(self._waiting.items()):
            job = self._jobs[number]
            earlier[:] = [one for one in earlier if _may_equal(one, job)]
            if not earlier or earlier[0].status == COMPLETED:
                del self._waiting[number]
                if earlier and earlier[0].paths.last.exists():
                    job.request = dataclasses.replace(
                        request_of(job), shorter=earlier[0].paths.folder
                    )
                yield number

    def drop_waiting(self) -> None:
        """Forget the jobs that wait."""
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)


def _may_equal(one: Job, other: Job) -> bool:
    """Return whether two jobs have as many steps, or may have."""
    if one.status not in (QUEUED, RUNNING, COMPLETED):
        return False
    steps_per_epoch = read_result(one.paths).get("steps_per_epoch")
    if steps_per_epoch is None:
        return one.status != COMPLETED
    return _length(one, steps_per_epoch) == _length(other, steps_per_epoch)


def _length(job: Job, steps_per_epoch: int) -> tuple[Any, ...]:
    config = request_of(job).config
    total = config.total_steps(steps_per_epoch)
    plan = planned_steps(config.scheduler, steps_per_epoch=steps_per_epoch, total_steps=total)
    return total, plan, config.max_minutes, getattr(config.scheduler, "kwargs", None)
