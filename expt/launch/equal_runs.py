"""Runs of a sweep that differ only in settings of their length, and turn out to be equally long.

The number of steps is known once the first of them has its data; the first is trained, and the
others begin from its last checkpoint, with nothing left to train.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from expt.config.groups import planned_steps
from expt.config.identity import LENGTH, digest
from expt.config.length import effective, resumable
from expt.launch.job import QUEUED, Job
from expt.runs.result import COMPLETED, RUNNING, read_result


class EqualRuns:
    """The jobs of one command, in groups that differ by their length only."""

    def __init__(self) -> None:
        self._alike = defaultdict[str, list[Job]](list)
        self._steps_per_epoch: dict[str, int] = {}
        """Known once a run of the group has its data; 0 where samples are not counted."""
        self._waiting: dict[int, tuple[str, Job]] = {}

    def hold(self, number: int, job: Job) -> bool:
        """Return whether a job is to wait for an earlier one; it is `released` then."""
        request = job.asked
        is_plain = request.config.fork is None and request.config.resume in (None, "auto")
        if job.is_trial or request.instead or not is_plain:
            return False
        but = (*LENGTH, *resumable())
        key = digest(request.config, request.identity.content, but=but)
        self._alike[key].append(job)
        if next(self._earlier(key, job), None) is not None:
            self._waiting[number] = key, job
        return number in self._waiting

    def released(self) -> Iterator[int]:
        """Yield the numbers of jobs that wait no longer."""
        for key in {key for key, _ in self._waiting.values()} - self._steps_per_epoch.keys():
            known = map(_steps_per_epoch, self._alike[key])
            if (steps := next((one for one in known if one is not None), None)) is not None:
                self._steps_per_epoch[key] = steps
        for number, (key, job) in list(self._waiting.items()):
            first = next(self._earlier(key, job), None)
            if first is None or first.status == COMPLETED:
                del self._waiting[number]
                if first and first.paths.last.exists():
                    job.request = dataclasses.replace(job.asked, shorter=first.paths.folder)
                yield number

    def _earlier(self, key: str, job: Job) -> Iterator[Job]:
        """Yield the earlier jobs that are, or may turn out to be, as long as this one."""
        steps, mine = self._steps_per_epoch.get(key), job.asked.identity
        for one in itertools.takewhile(lambda one: one is not job, self._alike[key]):
            if steps is None:
                may_equal = one.status in (QUEUED, RUNNING)
            else:
                may_equal = _length(one, steps) == _length(job, steps)
                may_equal &= one.status in (QUEUED, RUNNING, COMPLETED)
            if may_equal and one.asked.identity != mine:  # else it is the same run
                yield one

    def drop_waiting(self) -> None:
        """Forget the jobs that wait."""
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)


def _steps_per_epoch(job: Job) -> int | None:
    if not (job.trains or job.status == COMPLETED):
        return None
    record = read_result(job.paths)
    return 0 if record.get("data", {}).get("is_uncounted") else record.get("steps_per_epoch")


def _length(job: Job, steps_per_epoch: int) -> tuple[Any, ...]:
    config = job.asked.config
    steps_per_epoch = steps_per_epoch or config.steps_of_uncounted or 1
    total = config.total_steps(steps_per_epoch)
    plan = planned_steps(config.scheduler, steps_per_epoch=steps_per_epoch, total_steps=total)
    counts = effective(config, steps_per_epoch)
    return total, plan, config.max_minutes, counts, getattr(config.scheduler, "kwargs", None)
