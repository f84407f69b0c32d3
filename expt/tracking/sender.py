"""Sends what run folders hold to one dashboard, each thing once: while runs are under way, or
afterwards.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from expt.config import secrets
from expt.config.trackers import MLflow, Wandb
from expt.errors import ConfigError, warn
from expt.runs.metrics_file import MetricsReader, Point
from expt.runs.paths import RunPaths, is_sweep
from expt.tracking.cursor import Cursor, Taken
from expt.tracking.snapshot import Snapshot, snapshot, unsent, with_epochs
from expt.tracking.times import StepTimes
from expt.tracking.tracker import Copy, Refused, Tracker

TrackerOf = Callable[[Snapshot], Tracker]
Stamp = tuple[tuple[int, int], ...]


class RunSender:
    """Sends one run; `send` may be called again and again, and after an error."""

    def __init__(self, paths: RunPaths, name: str, tracker_of: TrackerOf, *, live: bool) -> None:
        self.paths, self._name, self._tracker_of, self._live = paths, name, tracker_of, live
        self._copy: Copy | None = None
        self._cursor: Cursor | None = None
        self._reader = MetricsReader(paths)
        self._pending: list[Point] = []
        self._begun: float | None = None
        """When the attempt that was described last began."""
        self._times = StepTimes(paths, live=live)
        self._stamp: Stamp | None = None
        self._has_ended = False

    def send(self, *, last: bool) -> bool:
        """Send what is new; returns whether there was something.

        Raises whatever the dashboard's client raises.

        A run that may still be refused, and its folder removed, is left alone but for the `last`
        time."""
        stamp = _stamp(self.paths)
        if stamp == self._stamp and (self._has_ended or not last):
            return False
        run = snapshot(self.paths, even_lost=last)
        if run is None:
            return False
        if not (last or self._has_come_to_something(run)):
            self._tracker_of(run)  # a server that cannot be reached is told of at once
            return False
        is_new = self._send(run)
        self._stamp, self._has_ended = stamp, run.has_ended
        return is_new

    def _has_come_to_something(self, run: Snapshot) -> bool:
        of_sweep = run.has_ended and run.sweep is not None and bool(self.paths.attempts())
        return self.paths.has_trained() or of_sweep

    def _send(self, run: Snapshot) -> bool:
        copy = self._opened(run)
        if run.started_at != self._begun or run.has_ended:
            copy.describe(run)
            self._begun = run.started_at
        if run.has_ended:  # all of it once more: `unsent` knows what is new
            self._reader, self._pending = MetricsReader(self.paths), []
        self._pending += self._reader.read()
        points = [
            point._replace(tag=copy.name_of(point.tag)) for point in with_epochs(self._pending)
        ]
        new = unsent(points, copy.marks)
        if new:
            copy.add(new, self._times)
        self._pending = []
        if not run.has_ended:
            return bool(new)
        was_open = copy.end(run)
        self.close()
        return was_open or bool(new)

    def _opened(self, run: Snapshot) -> Copy:
        if self._copy is None:
            self._cursor = Cursor(self.paths.folder, self._name)
            try:
                self._copy = self._tracker_of(run).open(run, self._cursor)
            except BaseException:
                self.close()
                raise
            self._reader, self._begun = MetricsReader(self.paths), None
        return self._copy

    def leave(self) -> None:
        """Nothing more comes from here, though the run may be under way."""
        if self._copy is not None:
            self._copy.leave()
        self.close()

    def close(self) -> None:
        """Let another process send this run."""
        self._copy = None
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None


class Sender:
    """Sends runs to the dashboard `name`; each by what it has recorded, and by `settings` before
    that.
    """

    def __init__(
        self, name: str, *, live: bool, settings: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._name, self._live, self._settings = name, live, settings
        self._trackers: dict[str, Tracker] = {}
        self._runs: dict[Path, RunSender] = {}
        self._said: set[str] = set()
        self.error: Exception | None = None
        """Why something could not be sent the last time."""
        self.num_sent = 0

    def send(self, folders: Sequence[RunPaths], *, last: bool = False) -> bool:
        """Send what is new of these runs; returns whether all could be: after one that could not,
        no other is tried.
        """
        self.error = None
        for paths in folders:
            run = self._runs.get(paths.folder)
            if run is None:
                run = self._runs[paths.folder] = RunSender(
                    paths, self._name, self._tracker_of, live=self._live
                )
            try:
                self.num_sent += run.send(last=last)
            except Taken:
                if last:
                    self.say(f"{paths.folder}: another command is sending it to {self._name}")
            except (Refused, ConfigError) as problem:
                self.say(f"{self._name}: {problem}; not sent")
            except FileNotFoundError as problem:
                if paths.folder.exists():
                    self.error = problem
                    return False
            except Exception as problem:  # what these clients raise is of many kinds
                run.close()
                self.error = problem
                return False
        return True

    def end(self) -> None:
        """Nothing more comes from here. Raises whatever the dashboard's client raises."""
        for run in self._runs.values():
            run.leave()
        for tracker in self._trackers.values():
            tracker.end_sweeps()

    @property
    def where(self) -> str:
        """The dashboards' addresses."""
        return ", ".join(sorted({tracker.where for tracker in self._trackers.values()}))

    @property
    def addresses(self) -> list[str]:
        """Where a person sees what was sent."""
        found = [tracker.address() for tracker in self._trackers.values()]
        return list(dict.fromkeys(address for address in found if address))

    def say(self, text: str) -> None:
        """Warn, once."""
        if text not in self._said:
            self._said.add(text)
            warn(text)

    def _tracker_of(self, run: Snapshot) -> Tracker:
        settings = settings_of(run, self._name, self._settings)
        if repr(settings) not in self._trackers:
            self._trackers[repr(settings)] = _tracker(settings)
            if self._live:
                self._trackers[repr(settings)].check()
        return self._trackers[repr(settings)]


def settings_of(run: Snapshot, name: str, chosen: Mapping[str, Any]) -> MLflow | Wandb:
    """How the run's configuration says that it is to be sent.

    Raises ConfigError for a variable that is not set.
    """
    recorded: dict[str, Any] = dict((run.record.get("config") or {}).get(name) or {})
    found = {**secrets.restored(recorded), **chosen}
    return (
        MLflow(**found)
        if name == "mlflow"
        else Wandb(**{**found, "tags": tuple(found.get("tags") or ())})
    )


def _tracker(settings: MLflow | Wandb) -> Tracker:
    if isinstance(settings, MLflow):
        from expt.tracking.mlflow_tracker import MLflowTracker

        return MLflowTracker(settings)
    from expt.tracking.wandb_tracker import WandbTracker

    return WandbTracker(settings)


def runs_in(folder: Path) -> list[RunPaths]:
    """The run of the folder, or those of a sweep's."""
    if RunPaths(folder).result.is_file() or not is_sweep(folder):
        return [RunPaths(folder)]
    with contextlib.suppress(FileNotFoundError):
        return [
            RunPaths(path) for path in sorted(folder.iterdir()) if RunPaths(path).result.is_file()
        ]
    return []


def settled(folders: Sequence[RunPaths], patience_s: float) -> None:
    """Wait until no workers are left in runs that say running, where a command was killed; at most
    that long.
    """
    from expt.runs.folder_lock import is_held
    from expt.runs.result import RUNNING, read_result

    end = time.monotonic() + patience_s
    left = [paths for paths in folders if read_result(paths).get("status") == RUNNING]
    while time.monotonic() < end and (left := [paths for paths in left if is_held(paths)]):
        time.sleep(0.1)


def _stamp(paths: RunPaths) -> Stamp:
    """Another one where the run has written something."""
    found = []
    for path in (paths.result, paths.metrics):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            found.append((stat.st_mtime_ns, stat.st_size))
    return tuple(found)
