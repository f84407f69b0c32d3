"""The iterator of a search: yields the next job to the pool, and learns from those that ended.

Its only state is the run folders: a search that is typed again finds the same trials.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from expt.config.search import Search as Settings
from expt.errors import ConfigError, FolderInUse
from expt.launch.job import QUEUED, Job, request_of
from expt.runs import checkpoint_file, spending
from expt.runs.folder_lock import at_work
from expt.runs.paths import RunPaths
<<<<<<< HEAD
from expt.runs.result import (
    COMPLETED,
    INTERRUPTED,
    PAUSED,
    RUNNING,
    Record,
    read_result,
    results,
    update_result,
)
from expt.search.rungs import Rungs
=======
from expt.runs.result import COMPLETED, INTERRUPTED, PAUSED, RUNNING, Record, read_result
from expt.runs.spending import device_s
from expt.search.folder import forget_training, of_another, read
from expt.search.history import Point, Reader, best, in_order
from expt.search.pausing import Pausing
from expt.search.population import NewRun, PopulationTraining
>>>>>>> main
from expt.search.sampler import suggest
from expt.search.trial import Reader, Trial, best, in_order
from expt.search.space import Values

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*((?:gpu|core)-)?(s|min|h|d)\s*")
LOOK_S = 1.0
"""How often running jobs are looked at for the budget."""


class Budget:
    """What a search may spend: time of this command, or of the devices of all runs in the folder."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        match = _BUDGET.fullmatch(text)
        if match is None or float(match[1]) <= 0:
            written = "write it such as 30min, 2h (of this command) or 20gpu-h (core-h on a CPU)"
            raise ConfigError(f"search.budget={text}: is no budget; {written}")
        self.text, self.of_devices = text, match[2] is not None
        self.limit_s = float(match[1]) * UNITS[match[3]]
        self._clock, self._began_at = clock, clock()

    def left_s(self, device_s: float) -> float:
        """Return the seconds that are left where devices were busy for `device_s`."""
        return self.limit_s - (device_s if self.of_devices else self._clock() - self._began_at)


class Search(Iterator[Job | None]):
    """Yields the jobs of a search, each chosen when there is room for it; None is "not now"."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        reader: Reader,
        rungs: Rungs | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.space, self.goals, self.settings, self.budget = (
            reader.space,
            reader.goals,
            settings,
            budget,
        )
        self._reader, self._rungs = reader, rungs
        trials, self.others = reader.own(folder)
        self._trials = {trial.folder: trial for trial in trials}
        sources = [reader.of_another(Path(source)) for source in settings.warm_start]
        self._warm_start = list(itertools.chain(*sources))
        self._spent = {
            paths.folder: spending.device_s(record) for paths, record in results(folder)
        }
        self._repeated = set[int]()
        self._jobs: dict[Path, Job] = {}
        self._running: list[Job] = []
        self._unfinished = self.unfinished
        self._leader = self.best
        self._left_of_batch, self._look_at = 0, 0.0
        self._make: Callable[[int, Values], Job | None] = lambda *_: None
        self._has_room: Callable[[], bool] = lambda: True
        self._finish: Callable[[str], None] = lambda _: None
        self._batch: int | None = None
        self.is_over = False
        """Whether no further job comes."""
        self.is_exhausted = False
        """Whether the space has no further point."""
        self.is_spent = False
        """Whether the budget is used up."""

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
        earlier trial. With `batch`, so many jobs come together, and the next when all have ended;
        else one comes whenever there is room. `finish` ends the running jobs.
        """
        self._make, self._finish, self._batch = make, finish, batch
        self._has_room = has_room or (lambda: True)

    def __next__(self) -> Job | None:
        if self.has_spent_all():
            raise StopIteration
        if not self._may_start():
            return None
        job = self._next()
        if job is not None:
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
<<<<<<< HEAD
    def unfinished(self) -> list[Trial]:
        """The trials that were chosen and did not come to their end, or to a rung."""
        ended = (COMPLETED, PAUSED) if self._rungs else (COMPLETED,)
        return [
            trial
            for trial in self.trials
            if trial.number is not None and trial.status not in ended and not trial.is_bad
=======
    def total(self) -> int:
        """How many points there are to be, as far as is known; a population has others for each
        place given up.
        """
        forks = sum(point.replaces is not None for point in self._points.values())
        return forks + max(self.settings.runs, self.count - forks)

    @property
    def own(self) -> list[Point]:
        """The points in this search's folder, in their order."""
        return in_order(self._points.values())

    @property
    def points(self) -> list[Point]:
        """All that a sampler can learn from, in its order."""
        return [*self._others, *self.own]

    @property
    def is_complete(self) -> bool:
        """Whether there are as many points as were asked for; of a population, whether none is to
        begin now.
        """
        if self._population:
            return not self._population.wants_more(self.own)
        return self.count >= self.settings.runs

    @property
    def unfinished(self) -> list[Point]:
        """Points that were begun and have come to no end: the command was killed, maybe, or had
        rungs.
        """
        ended = (COMPLETED, PAUSED) if self.pausing else (COMPLETED,)
        replaced = {point.replaces for point in self.own}
        own = [
            point for point in self.own if point.number is not None and point.number not in replaced
        ]
        return [point for point in own if point.status not in ended and not point.is_bad]

    @property
    def stopped(self) -> list[RunPaths]:
        """The runs that were begun and would go on in another command."""
        return [
            RunPaths(point.folder)
            for point in self.unfinished
            if point.folder and _has_begun(point)
>>>>>>> main
        ]

    @property
    def num_left(self) -> int:
        """How many trials are to begin or to continue, apart from those that wait at a rung."""
        new = max(0, self.settings.runs - self.count)
        left = self.space.without([trial.values for trial in self.trials])
        return len(self.unfinished) + (new if left is None else min(new, len(left)))

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

    def has(self, paths: RunPaths) -> bool:
        """Return whether the run is a trial with a number."""
        trial = self._trials.get(paths.folder)
        return trial is not None and trial.number is not None

    def suggest(self) -> tuple[int, Values] | None:
        """Return the number and the values of the next trial; None where there is none."""
        number = next(n for n in itertools.count() if n not in self._numbers)
        trials = [t for t in self.trials if t.number is None or t.number < number]
        values = suggest(
            self.space,
            [*self._warm_start, *trials],
            number,
            self.settings,
            self.goals,
            [trial.values for trial in self.trials],
        )
        return None if values is None else (number, values)

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

    def _may_start(self) -> bool:
        if self._batch is None:
            return self._has_room()
        if not self._running:
            self._left_of_batch = self._batch
        self._left_of_batch -= 1
        return self._left_of_batch >= 0

    def _next(self) -> Job | None:
        while self._unfinished:
            trial = self._unfinished.pop(0)
            assert trial.number is not None
            if job := self._make(trial.number, trial.values):
                self._trials.pop(trial.folder)
                self._trials[job.paths.folder] = replace(trial, folder=job.paths.folder)
                job.pause_after(self._stop_of(job.paths))
                return job
        if job := self._promoted():
            return job
        while not self.is_exhausted and self.count < self.settings.runs:
            found = self.suggest()
            if found is None:
                self.is_exhausted = True
                break
            number, values = found
            job = self._make(number, values)
            if job is None:
                self._repeated.add(number)
                continue
            trial = Trial(values=values, status=RUNNING, number=number, folder=job.paths.folder)
            self._trials[job.paths.folder] = trial
            job.pause_after(self._stop_of(job.paths))
            return job
        return None

    def _stop_of(self, paths: RunPaths) -> int | None:
        """Return the epoch after which a run pauses first; one that has begun has it on record."""
        record = read_result(paths)
        if self._rungs is None or "attempts" in record:
            return record.get("until_epoch") if self._rungs else None
        return self._rungs.next_stop(0)

    def _promoted(self) -> Job | None:
        trial = self._rungs.promotable(self._for_rungs()) if self._rungs else None
        if self._rungs is None or trial is None:
            return None
        assert trial.folder is not None
        assert trial.number is not None
        job = self._jobs.get(trial.folder) or self._make(trial.number, trial.values)
        if job is not None:
            job.go_on(self._rungs.next_stop(trial.epochs))
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
            trial, until = self._read(job.paths), request_of(job).until_epoch
            is_stuck = trial is not None and trial.status == PAUSED and trial.epochs < (until or 0)
            if trial is not None and (is_stuck or job.status == INTERRUPTED or (trial.status == PAUSED and until is None)):
                # It could not continue, and would be promoted again at once.
                self._trials[job.paths.folder] = replace(trial, status=INTERRUPTED)
        if ended:
            self._remove_checkpoints()

<<<<<<< HEAD
    def _read(self, paths: RunPaths) -> Trial | None:
        """Read again what became of a run."""
        before, trial = self._trials.get(paths.folder), self._reader.trial(paths)
        if trial is None:
=======
    def begin_again(self, point: Point) -> None:
        """Let a run that has lost what it had measured be trained from its beginning."""
        if point.folder is not None and point.folder in self.found.damaged:
            forget_training(RunPaths(point.folder))

    def begin(self, number: int, values: Values, paths: RunPaths | None) -> None:
        """Count a point as under way; without `paths` it is another under another name."""
        self._taken.add(number)
        new, known = self.new(number), self._points.get(paths.folder) if paths else None
        if self._population and paths is not None:
            self._population.keep(self.own, new)
        if paths is None or (known and known.number is not None):
            self._num_repeated += 1
            if self._population:
                self._population.repeat(number, values, new)
        else:
            status = RUNNING if known is None else known.status
            objectives = () if known is None else known.objectives
            self._points[paths.folder] = Point(
                values=values,
                status=status,
                number=number,
                objectives=objectives,
                replaces=new.replaces,
                parent=new.parent,
                began_at=new.began_at,
                folder=paths.folder,
            )

    def drop(self, folder: Path) -> None:
        """Let a run that has paused not go on in this command."""
        point = self._points.get(folder)
        if point is not None and point.status == PAUSED:
            self._points[folder] = replace(point, status=INTERRUPTED)

    def count_spent(self, paths: RunPaths) -> None:
        """Let what a run has cost so far count, which is still under way: it waits for another
        turn.
        """
        known, spent_s = self._points.get(paths.folder), device_s(read_result(paths))
        if known is not None:
            self._points[paths.folder] = replace(known, device_s=spent_s)
        else:
            self.found.spent_elsewhere_s[paths.folder] = spent_s

    def look(self, paths: RunPaths) -> Point | None:
        """Read again what has become of a run."""
        before, point = self._points.get(paths.folder), self._reader.point(paths)
        if point is None:
            self.count_spent(paths)
>>>>>>> main
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
    """Return what a run's devices were busy for, up to now where it runs."""
    if record.get("status") == RUNNING:
        return spending.until_now(record).get("device_s", 0.0)
    return spending.device_s(record)


def remove_checkpoints(paths: RunPaths) -> None:
    """Remove the checkpoints of a paused run, unless another command is at work in its folder."""
    if not paths.kept_for_itself:
        return
    try:
        with at_work(paths):
            if read_result(paths).get("status") == PAUSED:
                update_result(paths, resumable=False)
                paths.remove_checkpoints()
                checkpoint_file.remove_unnamed(paths.checkpoints)
    except FolderInUse:
        pass


def stopped(search: Search) -> Sequence[RunPaths]:
    """Return the runs that have begun and would continue in another command."""
    folders = [trial.folder for trial in search.unfinished if trial.folder is not None]
    return [paths for paths in map(RunPaths, folders) if paths.result.exists()]
