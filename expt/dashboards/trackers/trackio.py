"""Runs in trackio."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT
from expt.dashboards.trackers import MAX_TEXT, Copy, Tracker, unsent, without_password

if TYPE_CHECKING:
    from expt.dashboards.snapshot import Snapshot
    from expt.runs.metrics_file import Point


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config(Tracker):
    """trackio, on this machine or in a Hugging Face Space; `pip install 'expt[trackio]'`."""

    PACKAGE: ClassVar[str | None] = "trackio"
    project: str | None = None
    space_id: str | None = None
    group: str | None = None
    checkpoints: bool = False

    def copy(self, run: Snapshot, state: dict[str, Any], key_of: Callable[[Path], str]) -> Copy:
        """Return the copy of a run."""
        return TrackioCopy(run, state, self)


class TrackioCopy(Copy):
    """A run's copy there, known by its name and key."""

    def __init__(self, run: Snapshot, state: dict[str, Any], settings: Config) -> None:
        """Note where the run goes; `describe` begins or resumes it."""
        self._settings, self._state, self._project = settings, state, settings.project or "expt"
        where = without_password(settings.space_id or os.environ.get("TRACKIO_SERVER_URL", ""))
        there = f"{where}: project {self._project}"
        self.address = there if where else f"trackio show --project {self._project}"
        self._run: Any = None

    def describe(self, run: Snapshot) -> None:
        """Begin or resume the run; trackio takes settings only as a run begins."""
        import trackio

        self.leave()
        begin = functools.partial(
            trackio.init, self._project, f"{run.name}-{self._state['key']}", resume="allow",
            group=self._settings.group or (run.sweep.name if run.sweep else None),
            space_id=self._settings.space_id, config={**run.settings, **run.tags}, embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        with _quiet():
            self._run = contextvars.Context().run(begin)  # else it finishes the run before

    def add(self, points: Sequence[Point], at: float) -> None:
        """Send the points that are not there yet."""
        with _quiet():
            for step, row in unsent(points, self._state):
                self._run.log(row, step=step)

    def end(self, run: Snapshot, sweep_status: str) -> None:
        """Send summary and files, and an alert of a run that has failed."""
        import trackio

        from expt.runs.result import FAILED  # late: it imports the configuration

        files = trackio.Artifact(f"run-{self._state['key']}", type="run")
        for path in run.files(checkpoints=self._settings.checkpoints):
            files.add_file(path)
        with _quiet():
            self._run.log(run.summary, step=int(run.record.get("steps") or 0))
            if run.status == FAILED:
                about, level = str(run.record.get("error")), trackio.AlertLevel.ERROR
                self._run.alert(f"{run.name} failed", about[:MAX_TEXT], level)
            self._run.log_artifact(files)
        self.leave()

    def leave(self) -> None:
        """Wait until all that was logged is there."""
        run, self._run = self._run, None
        if run is not None:
            with _quiet():
                run.finish()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the lines that trackio prints."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
