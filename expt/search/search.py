"""The iterator that the pool pulls: it yields the next job of a search, and takes their ends."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from expt.config.search import Search as Settings
from expt.errors import ConfigError, FolderInUse
from expt.launch.job import QUEUED, Job
from expt.runs.found import FoundRun, results
from expt.runs.paths import RunPaths, at_work
from expt.runs.result import (
    COMPLETED,
    INTERRUPTED,
    PRUNED,
    RUNNING,
    Record,
    cost_until_now,
    device_s,
    read_result,
    update_result,
)
from expt.search.rungs import Rungs
from expt.search.sampler import Known, suggest
from expt.search.space import Values
from expt.search.trial import Reader, Trial, best, in_order

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*((?:gpu|core)-)?(s|min|h|d)\s*")
LOOK_S = 1.0
"""Seconds between two looks at running jobs for the budget."""


class Budget:
    """The budget of a search: time of the command, or of the devices of the folder's runs."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        match = _BUDGET.fullmatch(text)
        if match is None or float(match[1]) <= 0:
            written = "write it such as 30min, 2h (of this command) or 20gpu-h (core-h on a CPU)"
            raise ConfigError(f"search.budget={text}: is not a budget; {written}")
        self.text, self.of_devices = text, match[2] is not None
        self.limit_s = float(match[1]) * UNITS[match[3]]
        self._clock, self._began_at = clock, clock()

    def left_s(self, device_s: float) -> float:
        """Return the seconds that are left where devices were busy for `device_s`."""
        return self.limit_s - (device_s if self.of_devices else self._clock() - self._began_at)


class Search(Iterator[Job | None]):
    """The jobs of a search, each chosen when there is room for it; None is "not now"."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        reader: Reader,
        rungs: Rungs | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.space, self.goals = reader.space, reader.goals
        self.settings, self.budget = settings, budget
        self._reader, self._rungs = reader, rungs
        trials, self.others = reader.own(folder)
        self._trials = {trial.folder: trial for trial in trials}
        sources = [reader.of_another(Path(source)) for source in settings.warm_start]
        self._warm_start = list(itertools.chain(*sources))
        self._spent = {run.folder: device_s(run.record) for run in results(folder)}
        self._repeated = set[int]()
        self._jobs: dict[Path, Job] = {}
        self._running: list[Job] = []
        self._unfinished = self.unfinished
        self._leader = self.best
        self._left_of_batch, self._look_at = 0, 0.0
        self.begin(lambda *_: None)
        self.nearest: Callable[[Values, Sequence[Values]], Values] = lambda values, _: values
        """A function to the nearest values that a run can have, and that are not tried yet."""
        self.is_over = False
        """True if no further job comes."""
        self.is_exhausted = False
        """True if the space has no further point."""
        self.is_spent = False
        """True if the budget is used up."""

    def begin(
        self,
        make: Callable[[int, Values], Job | None],
        *,
        has_room: Callable[[], bool] | None = None,
        finish: Callable[[str], None] = lambda _: None,
        batch: int | None = None,
    ) -> None:
        """Yield jobs from now on.

        `make` returns the job of a trial's number and values, or None where it is the run of an
        earlier trial. With `batch`, that many jobs come together, and the next when all have ended;
        else one comes whenever there is room. `finish` ends the running jobs.
        """
        self._make, self._finish, self._batch = make, finish, batch
        self._has_room = has_room or (lambda: True)

    def __next__(self) -> Job | None:
        if self.has_spent_all():
            raise StopIteration
        if self._batch is None and not self._has_room():
            return None
        if self._batch is not None:
            self._left_of_batch = (self._left_of_batch if self._running else self._batch) - 1
            if self._left_of_batch < 0:
                return None
        job = self._next()
        if job is not None:
            job.is_trial = True
            self._running.append(job)
            self._jobs[job.paths.folder] = job
        elif not self._running:
            self.is_over = True
            self._remove_checkpoints()
            raise StopIteration
        return job

    @property
    def trials(self) -> list[Trial]:
        """The trials in this search's folder, in order."""
        return in_order(list(self._trials.values()))

    @property
    def count(self) -> int:
        """How many trials were chosen, with those that turned out to be runs of earlier ones."""
        return len(self._numbers)

    @property
    def unfinished(self) -> list[Trial]:
        """The trials that were chosen and reached neither their end nor a rung."""
        ended = (COMPLETED, PRUNED) if self._rungs else (COMPLETED,)
        own = [trial for trial in self.trials if trial.number is not None]
        return [trial for trial in own if trial.status not in ended and not trial.is_bad]

    @property
    def num_left(self) -> int:
        """How many trials are to begin or to continue, apart from those that wait at a rung."""
        return len(self.unfinished) + max(0, self.settings.runs - self.count)

    @property
    def best(self) -> Trial | None:
        """The best trial so far in this folder."""
        return best(self.trials, self.goals)

    @property
    def spent_s(self) -> float:
        """The seconds that devices were busy with the runs in the folder."""
        for job in self._running:
            self._spent[job.paths.folder] = _device_s(read_result(job.paths))
        return sum(self._spent.values())

    def is_new_best(self, paths: RunPaths) -> bool:
        """Return whether the run that has just ended is the best, or is better than before."""
        self._read(paths)
        before, self._leader = self._leader, self.best
        if self._leader is None or self._leader.folder != paths.folder:
            return False
        return before is None or before.objectives != self._leader.objectives

    def is_of_another(self, number: int, paths: RunPaths) -> bool:
        """Return whether the run is the trial of another number."""
        trial = self._trials.get(paths.folder)
        return trial is not None and trial.number not in (None, number)

    def suggest(self) -> tuple[int, Values] | None:
        """Return the number and the values of the next trial; None where there is none."""
        taken = self._numbers
        number = next(n for n in itertools.count() if n not in taken)
        before = [t for t in self.trials if t.number is None or t.number < number]
        history, tried = [*self._warm_start, *before], [t.values for t in self.trials]
        values = suggest(Known(self.space, history, number, self.settings, self.goals, tried))
        return None if values is None else (number, self.nearest(values, tried))

    def has_spent_all(self) -> bool:
        """Take the ends of jobs; return whether the budget is used up, and end all jobs then."""
        self._take_ends()
        now = time.monotonic()
        if self.budget and not self.is_spent and now >= self._look_at:
            self._look_at = now + LOOK_S
            if self.budget.left_s(self.spent_s if self.budget.of_devices else 0.0) <= 0:
                self.is_over = self.is_spent = True
                self._finish(f"search.budget={self.budget.text} is used up")
        return self.is_spent

    @property
    def _numbers(self) -> set[int]:
        own = {trial.number for trial in self._trials.values() if trial.number is not None}
        return own | self._repeated

    def _next(self) -> Job | None:
        while self._unfinished:
            trial = self._unfinished.pop(0)
            if job := self._begin(trial):
                return job
        if job := self._promoted():
            return job
        while not self.is_exhausted and self.count < self.settings.runs:
            found = self.suggest()
            if found is None:
                self.is_exhausted = True
                break
            number, values = found
            if job := self._begin(Trial(values=values, status=RUNNING, number=number)):
                return job
            self._repeated.add(number)
        return None

    def _begin(self, trial: Trial) -> Job | None:
        """Return the job of a trial that is new, or that was stopped."""
        assert trial.number is not None
        job = self._make(trial.number, trial.values)
        if job is not None:
            self._trials.pop(trial.folder, None)  # another one, where its run was refused there
            self._trials[job.paths.folder] = replace(trial, folder=job.paths.folder)
            if self._rungs is not None:  # one that has begun has it on record
                record, first = read_result(job.paths), self._rungs.next_stop(0)
                job.pause_after(record.get("until_epoch") if "attempts" in record else first)
        return job

    def _promoted(self) -> Job | None:
        if self._rungs is None or (trial := self._rungs.promotable(self._for_rungs())) is None:
            return None
        assert trial.folder is not None
        job = self._jobs.get(trial.folder) or self._begin(trial)
        if job is not None:
            job.continue_until(self._rungs.next_stop(trial.epochs))
        return job

    def _for_rungs(self) -> list[Trial]:
        """Return the trials with numbers; those that continue in this command are running."""
        running = {job.paths.folder for job in self._running}
        return [
            replace(trial, status=RUNNING) if trial.folder in running else trial
            for trial in self.trials
            if trial.number is not None
        ]

    def _take_ends(self) -> None:
        ended = [job for job in self._running if job.status not in (QUEUED, RUNNING)]
        for job in ended:
            self._running.remove(job)
            self._spent[job.paths.folder] = _device_s(read_result(job.paths))
            trial, until = self._read(job.paths), job.request and job.request.until_epoch
            if trial is not None and trial.status == PRUNED and trial.epochs < (until or math.inf):
                # It could not continue, and would be promoted again at once.
                self._trials[job.paths.folder] = replace(trial, status=INTERRUPTED)
        if ended:
            self._remove_checkpoints()

    def _read(self, paths: RunPaths) -> Trial | None:
        """Read the trial of a run again."""
        before = self._trials.get(paths.folder)
        trial = self._reader.trial(FoundRun.at(paths.folder))
        if trial is None:
            return before
        if before is not None and before.number is not None:
            trial = replace(trial, number=before.number)
        self._trials[paths.folder] = trial
        return trial

    def _remove_checkpoints(self) -> None:
        """Remove the checkpoints of trials that can't continue, except the best trial's."""
        if self._rungs is None or self.settings.keep_checkpoints:
            return
        planned = 0 if self.is_exhausted else max(0, self.settings.runs - self.count)
        leader = self.best
        for trial in self._rungs.hopeless(self._for_rungs(), planned):
            if trial.folder is not None and (leader is None or trial.folder != leader.folder):
                remove_checkpoints(RunPaths(trial.folder))


def _device_s(record: Record) -> float:
    """Return the seconds that a run's devices were busy, up to now where it runs."""
    if record.get("status") == RUNNING:
        return cost_until_now(record).get("device_s", 0.0)
    return device_s(record)


def remove_checkpoints(paths: RunPaths) -> None:
    """Remove the checkpoints of a pruned run, unless another command is at work in its folder."""
    if not any(paths.checkpoints.glob("*")):
        return
    with contextlib.suppress(FolderInUse), at_work(paths):
        if read_result(paths).get("status") == PRUNED:
            update_result(paths, resumable=False)
            paths.remove_checkpoints()
