"""The trials of a search, as its folder has them: each by its run, the best, and their cost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from expt.errors import FolderInUse
from expt.runs.found import FoundRun, results
from expt.runs.paths import RunPaths, at_work
from expt.runs.result import PRUNED, RUNNING, cost_until_now, device_s, read_result, update_result
from expt.search.trial import Reader, Trial, best, in_order


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
        own = {trial.number for trial in self._by_folder.values() if trial.number is not None}
        return own | self._repeated

    @property
    def best(self) -> Trial | None:
        """The best trial so far, the first of equal ones."""
        return best([*self], self._reader.goals)

    @property
    def device_s(self) -> float:
        """The seconds that devices were busy with all runs in the folder, as last noted."""
        return sum(self._device_s.values())

    def begin(self, trial: Trial, paths: RunPaths) -> None:
        """Note the run of a trial that begins or continues."""
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

    def note_status(self, trial: Trial, status: str) -> None:
        """Let the trial have another status than its run."""
        self._by_folder[trial.folder] = replace(trial, status=status)

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


def remove_checkpoints(paths: RunPaths) -> None:
    """Remove the checkpoints of a pruned run, unless another command is at work in its folder."""
    if not any(paths.checkpoints.glob("*")):
        return
    with contextlib.suppress(FolderInUse), at_work(paths):
        if read_result(paths).get("status") == PRUNED:
            update_result(paths, resumable=False)
            paths.remove_checkpoints()
