"""The iterator that the pool pulls: it yields the next job of a search, and takes their ends.

The trials are as the folder has them, each by its run.
"""

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
        self.text = text
        self.limit_s = float(match[1]) * UNITS[match[3]]
        self._is_of_devices = match[2] is not None
        self._clock = clock
        self._began_at = clock()

    def left_s(self, device_s: float) -> float:
        """Return the seconds that are left where devices were busy for `device_s`."""
        used = device_s if self._is_of_devices else self._clock() - self._began_at
        return self.limit_s - used


class Trials:
    """The trials of a search, each as its run was last read."""

    def __init__(self, folder: Path, reader: Reader) -> None:
        self._reader = reader
        trials, self.others = reader.own(folder)
        self._by_folder = {trial.folder: trial for trial in trials}
        self._repeated = set[int]()
        self._device_s = {run.folder: device_s(run.record) for run in results(folder)}
        self._leader = self.best

    def __iter__(self) -> Iterator[Trial]:
        """Yield those without a number, which the search did not choose, then the others."""
        return iter(in_order([*self._by_folder.values()]))

    @property
    def chosen(self) -> list[Trial]:
        """The trials that the search chose, by their numbers."""
        return [trial for trial in self if trial.number is not None]

    @property
    def numbers(self) -> set[int]:
        """The numbers of trials, with those that turned out to be runs of earlier trials."""
        return {trial.number for trial in self.chosen if trial.number is not None} | self._repeated

    @property
    def best(self) -> Trial | None:
        """The best trial so far, the first of equal ones."""
        return best([*self], self._reader.goals)

    @property
    def device_s(self) -> float:
        """The seconds that devices were busy with all runs in the folder, as last noted."""
        return sum(self._device_s.values())

    def note(self, trial: Trial, paths: RunPaths) -> None:
        """Note the run of a trial that begins or continues, or another status than its run's."""
        self._by_folder.pop(trial.folder, None)  # another one, where its run was refused there
        self._by_folder[paths.folder] = replace(trial, folder=paths.folder)

    def repeat(self, number: int) -> None:
        """Note that the trial of this number is the run of an earlier one."""
        self._repeated.add(number)

    def note_cost(self, paths: RunPaths) -> None:
        """Note the seconds that the run's devices were busy, up to now if it is running."""
        record = read_result(paths)
        cost = device_s(record)
        if record.get("status") == RUNNING:
            cost = cost_until_now(record).get("device_s", 0.0)
        self._device_s[paths.folder] = cost

    def read_again(self, paths: RunPaths) -> Trial | None:
        """Read the run's trial again; return it, or None if the folder has none."""
        before = self._by_folder.get(paths.folder)
        trial = self._reader.trial(FoundRun.at(paths.folder))
        if trial is None:
            return before
        if before is not None and before.number is not None:
            trial = replace(trial, number=before.number)
        self._by_folder[paths.folder] = trial
        return trial

    def is_new_best(self, paths: RunPaths) -> bool:
        """Return whether the run that has just ended is the best, or is better than before."""
        self.read_again(paths)
        before, self._leader = self._leader, self.best
        if self._leader is None or self._leader.folder != paths.folder:
            return False
        return before is None or before.objectives != self._leader.objectives

    def is_of_another(self, number: int, paths: RunPaths) -> bool:
        """Return whether the run is the trial of another number."""
        trial = self._by_folder.get(paths.folder)
        return trial is not None and trial.number not in (None, number)


class Search(Iterator[Job | None]):
    """The jobs of a search, each chosen when there is room for it; None is "not now"."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        reader: Reader,
        rungs: Rungs | None,
        budget: Budget | None,
        nearest: Callable[[Values, Sequence[Values]], Values],
    ) -> None:
        """Take a function to the `nearest` values that a run can have, and that are not tried."""
        self.trials = Trials(folder, reader)
        self.is_over = False
        """True if no further job comes."""
        self.is_exhausted = False
        """True if the space has no further point."""
        self.is_spent = False
        """True if the budget is used up."""
        self._settings, self._space, self._goals = settings, reader.space, reader.goals
        self._rungs, self._budget, self._nearest = rungs, budget, nearest
        sources = (reader.of_another(Path(source)) for source in settings.warm_start)
        self._warm_start = [*itertools.chain(*sources)]
        self._jobs: dict[Path, Job] = {}
        self._running: list[Job] = []
        self._to_continue = self.unfinished
        self._left_of_batch = 0
        self._look_at = 0.0

    def begin(
        self,
        make: Callable[[int, Values], Job | None],
        *,
        has_room: Callable[[], bool],
        finish: Callable[[str], None],
        batch: int | None,
    ) -> None:
        """Yield jobs from now on.

        `make` returns the job of a trial's number and values, or None where it is the run of an
        earlier trial. With `batch`, that many jobs come together, and the next when all have ended;
        else one comes whenever there is room. `finish` ends the running jobs.
        """
        self._make, self._has_room, self._finish, self._batch = make, has_room, finish, batch

    def __next__(self) -> Job | None:
        if self.look():
            raise StopIteration
        if not self._may_begin():
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
    def unfinished(self) -> list[Trial]:
        """The trials that were chosen and reached neither their end nor a rung."""
        ended = (COMPLETED, PRUNED) if self._rungs else (COMPLETED,)
        return [
            trial for trial in self.trials.chosen if trial.status not in ended and not trial.is_bad
        ]

    @property
    def count(self) -> int:
        """How many trials were chosen, with those that turned out to be runs of earlier ones."""
        return len(self.trials.numbers)

    @property
    def num_left(self) -> int:
        """How many trials are to begin or to continue, apart from those that wait at a rung."""
        return len(self.unfinished) + self._num_planned

    def note_costs(self) -> float:
        """Note the running jobs' costs; return the seconds that devices were busy with all runs."""
        for job in self._running:
            self.trials.note_cost(job.paths)
        return self.trials.device_s

    def suggest(self) -> tuple[int, Values] | None:
        """Return the number and the values of the next trial; None where there is none."""
        taken = self.trials.numbers
        number = next(n for n in itertools.count() if n not in taken)
        before = [t for t in self.trials if t.number is None or t.number < number]
        history, tried = [*self._warm_start, *before], [t.values for t in self.trials]
        values = suggest(Known(self._space, history, number, self._settings, self._goals, tried))
        return None if values is None else (number, self._nearest(values, tried))

    def look(self) -> bool:
        """Take the ends of jobs, and end all if the budget is used up; return whether it is."""
        self._take_ends()
        now = time.monotonic()
        if self._budget and not self.is_spent and now >= self._look_at:
            self._look_at = now + LOOK_S
            if self._budget.left_s(self.note_costs()) <= 0:
                self.is_over = True
                self.is_spent = True
                self._finish(f"search.budget={self._budget.text} is used up")
        return self.is_spent

    @property
    def _num_planned(self) -> int:
        return max(0, self._settings.runs - self.count)

    def _may_begin(self) -> bool:
        """Return whether there is room for a job, or the batch under way has a further one."""
        if self._batch is None:
            return self._has_room()
        if not self._running:
            self._left_of_batch = self._batch
        if self._left_of_batch == 0:
            return False
        self._left_of_batch -= 1
        return True

    def _next(self) -> Job | None:
        """Return the job of a trial that was stopped, of one at a rung, or of a new one."""
        while self._to_continue:
            if job := self._begin(self._to_continue.pop(0)):
                return job
        return self._promoted() or self._new()

    def _promoted(self) -> Job | None:
        """Return the job of a trial that continues from its rung."""
        if self._rungs is None or (trial := self._rungs.promotable(self._for_rungs())) is None:
            return None
        assert trial.folder is not None
        job = self._jobs.get(trial.folder) or self._begin(trial)
        if job is not None:
            job.continue_until(self._rungs.next_stop(trial.epochs))
        return job

    def _new(self) -> Job | None:
        """Return the job of the next trial that is not the run of an earlier one."""
        while not self.is_exhausted and self._num_planned:
            found = self.suggest()
            if found is None:
                self.is_exhausted = True
                break
            number, values = found
            if job := self._begin(Trial(values=values, status=RUNNING, number=number)):
                return job
            self.trials.repeat(number)
        return None

    def _begin(self, trial: Trial) -> Job | None:
        """Return the job of a trial that is new, or that was stopped."""
        assert trial.number is not None
        job = self._make(trial.number, trial.values)
        if job is not None:
            self.trials.note(trial, job.paths)
            if self._rungs is not None:  # one that has begun has it on record
                record, first = read_result(job.paths), self._rungs.next_stop(0)
                job.pause_after(record.get("until_epoch") if "attempts" in record else first)
        return job

    def _for_rungs(self) -> list[Trial]:
        """Return the trials with numbers; those that continue in this command are running."""
        running = {job.paths.folder for job in self._running}
        return [
            replace(trial, status=RUNNING) if trial.folder in running else trial
            for trial in self.trials.chosen
        ]

    def _take_ends(self) -> None:
        ended = [job for job in self._running if job.status not in (QUEUED, RUNNING)]
        for job in ended:
            self._running.remove(job)
            self.trials.note_cost(job.paths)
            trial = self.trials.read_again(job.paths)
            until = job.request.until_epoch if job.request else None
            if trial is not None and trial.status == PRUNED and trial.epochs < (until or math.inf):
                # It could not continue, and would be promoted again at once.
                self.trials.note(replace(trial, status=INTERRUPTED), job.paths)
        if ended:
            self._remove_checkpoints()

    def _remove_checkpoints(self) -> None:
        """Remove the checkpoints of trials that can't continue, except the best trial's."""
        if self._rungs is None or self._settings.keep_checkpoints:
            return
        planned = 0 if self.is_exhausted else self._num_planned
        leader = self.trials.best
        for trial in self._rungs.hopeless(self._for_rungs(), planned):
            if trial.folder is not None and (leader is None or trial.folder != leader.folder):
                remove_checkpoints(RunPaths(trial.folder))


def remove_checkpoints(paths: RunPaths) -> None:
    """Remove the checkpoints of a pruned run, unless another command is at work in its folder."""
    if not any(paths.checkpoints.glob("*")):
        return
    with contextlib.suppress(FolderInUse), at_work(paths):
        if read_result(paths).get("status") == PRUNED:
            update_result(paths, resumable=False)
            paths.remove_checkpoints()
