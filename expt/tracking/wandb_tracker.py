"""W&B: a run for each run, those of a sweep in one group.

W&B's client writes all that it is given into a file below the run's folder before it goes out. What
was not uploaded (no network, `mode=offline`, a killed process) lies there, and `wandb sync` uploads
it; later points are added to that."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from expt.config.trackers import Wandb
from expt.runs.metrics_file import Point
from expt.runs.result import COMPLETED, FAILED, PAUSED
from expt.tracking.cursor import Cursor
from expt.tracking.snapshot import EPOCH, Marks, Snapshot, marked
from expt.tracking.tracker import Refused, Times

STEP = "step"
CONNECT_S, INIT_S, FINISH_S, SYNC_S = 5, 10, 30, 120
_EXIT_CODES = {COMPLETED: 0, PAUSED: 0, FAILED: 1}
KILLED = 255
"""W&B's exit code for what was interrupted."""


class WandbTracker:
    """W&B's server, or with `mode=offline` its files in the run's folder."""

    def __init__(self, settings: Wandb) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_CONSOLE", "off")
        import wandb

        self._wandb: Any = wandb
        self._settings = settings
        self._mode = settings.mode or os.environ.get("WANDB_MODE") or "online"
        self.where = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        self._url: str | None = None
        self._kept_offline: Path | None = None

    def check(self) -> None:
        """A connection alone: W&B's own client would try for minutes.

        Through a proxy only W&B's client can tell.
        """
        parts = urlsplit(self.where)
        if self._mode != "online" or parts.hostname is None or getproxies().get(parts.scheme):
            return
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), CONNECT_S).close()

    def open(self, run: Snapshot, cursor: Cursor) -> WandbCopy:
        """Upload what an earlier process could not, and go on with W&B's run of that key, or begin
        it.
        """
        if self._mode == "disabled":
            raise Refused("WANDB_MODE=disabled")
        state = cursor.state
        state.setdefault("marks", {})
        state.setdefault("parts", {})
        digest = run.digest(checkpoints=self._settings.checkpoints)
        if self._mode == "online":
            self.check()
            self._sync(cursor)
        if run.has_ended and state.get("ended") == digest:
            self._url = state.get("url") or self._url
            return WandbCopy(None, cursor, self._settings)
        begun = self._begin(run, cursor)
        self._url = state["url"] = begun.url if self._mode == "online" else None
        folder = Path(begun.dir).parent
        if self._mode == "offline":
            self._kept_offline = folder.parent
        state["parts"][folder.name] = False
        cursor.save()
        return WandbCopy(begun, cursor, self._settings, online=self._mode == "online")

    def address(self) -> str | None:
        """The last run's page; where its files are, if they were kept offline."""
        return self._url or (
            f"kept offline in {self._kept_offline}" if self._kept_offline else None
        )

    def end_sweeps(self) -> None:
        """A group has no status."""

    def _begin(self, run: Snapshot, cursor: Cursor) -> Any:
        sweep = run.sweep.name if run.sweep else None
        chosen = self._settings
        settings = self._wandb.Settings(
            console="off", silent=True, init_timeout=INIT_S, finish_timeout=FINISH_S, finish_timeout_raises=True,
            x_disable_stats=True, x_start_time=run.started_at, disable_code=True, disable_git=True, save_code=False,
        )  # fmt: skip
        return self._wandb.init(
            project=chosen.project or os.environ.get("WANDB_PROJECT") or "expt",
            entity=chosen.entity,
            group=chosen.group or os.environ.get("WANDB_RUN_GROUP") or sweep,
            tags=chosen.tags or None,
            name=run.name,
            id=cursor.key,
            resume="allow",
            reinit="create_new",  # runs of a sweep lie side by side
            dir=str(run.paths.folder),
            mode=self._mode,
            settings=settings,
        )

    def _sync(self, cursor: Cursor) -> None:
        """Upload the parts that W&B has written to the disk, and not sent to their end.

        Raises OSError.
        """
        for name in [name for name, is_sent in cursor.state["parts"].items() if not is_sent]:
            folder = cursor.folder / "wandb" / name
            if folder.is_dir():
                words = [
                    sys.executable,
                    "-m",
                    "wandb",
                    "sync",
                    "--include-online",
                    "--include-synced",
                    str(folder),
                ]
                done = subprocess.run(
                    words, capture_output=True, text=True, timeout=SYNC_S, check=False
                )
                if done.returncode:
                    said = (done.stderr or done.stdout).strip().splitlines()
                    raise OSError(f"wandb sync {folder}: {said[-1] if said else done.returncode}")
            cursor.state["parts"][name] = True
            cursor.save()


class WandbCopy:
    """A run there; without `begun` one that has all."""

    def __init__(
        self, begun: Any, cursor: Cursor, settings: Wandb, *, online: bool = False
    ) -> None:
        self._run, self._cursor, self._settings, self._online = begun, cursor, settings, online
        self.marks: Marks = dict(cursor.state["marks"])

    def name_of(self, tag: str) -> str:
        """As it is."""
        return tag

    def describe(self, run: Snapshot) -> None:
        """The settings as W&B's config, and beside them what W&B has no other place for."""
        if self._run is None:
            return
        tags = {key: value for key, value in run.tags.items() if not key.startswith("user")}
        self._run.config.update({**run.settings, **tags}, allow_val_change=True)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def add(self, points: Sequence[Point], times: Times) -> None:
        """A row for each step; `step` is the charts' axis, for W&B's own counts rows."""
        if self._run is None:
            return
        for step, at_step in itertools.groupby(points, key=lambda point: point.step):
            together = list(at_step)
            values = {point.tag: point.value for point in together if point.tag != EPOCH}
            self._run.log(
                {STEP: step, EPOCH: together[0].epoch, **values, "_timestamp": times(step)}
            )
            marked(together, self.marks)
        self._cursor.state["marks"] = dict(self.marks)
        self._cursor.save()

    def end(self, run: Snapshot) -> bool:
        """Status, summary and files.

        Raises TimeoutError where not all could be uploaded; it is still on the disk.
        """
        if self._run is None:
            return False
        self._run.summary.update(
            {**run.summary, "status": run.status, "error": run.record.get("error")}
        )
        for path in run.files(checkpoints=False):
            self._run.save(str(path), base_path=str(run.paths.folder), policy="now")
        if self._settings.checkpoints:
            self._log_checkpoints(run)
        self._cursor.state["ended"] = run.digest(checkpoints=self._settings.checkpoints)
        self._finish(_EXIT_CODES.get(run.status, KILLED))
        return True

    def leave(self) -> None:
        """W&B takes it for finished, until more comes."""
        if self._run is not None:
            self._finish(0)

    def _finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        part = Path(run.dir).parent.name
        self._cursor.save()
        run.finish(exit_code=exit_code)
        self._cursor.state["parts"][part] = self._online
        self._cursor.save()

    def _log_checkpoints(self, run: Snapshot) -> None:
        import wandb

        artifact: Any = wandb.Artifact(f"checkpoints-{self._cursor.key}", type="model")
        for path in (run.paths.best, run.paths.last):
            if path.is_file():
                artifact.add_file(str(path))
        self._run.log_artifact(artifact)
