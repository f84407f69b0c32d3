"""W&B: a run for each run, those of a sweep in one group."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

from expt.config.schema import Wandb
from expt.dashboards.snapshot import Snapshot
from expt.runs.metrics_file import Point
from expt.runs.result import COMPLETED, FAILED, PAUSED

INIT_S, FINISH_S = 10, 30
KILLED = 255
"""W&B's exit code of a run that was interrupted."""
_EXIT_CODES = {COMPLETED: 0, PAUSED: 0, FAILED: 1}


class WandbCopy:
    """A run's copy there, known by its key; W&B's own count of steps says what it has."""

    def __init__(self, run: Snapshot, states: Sequence[dict[str, Any]], settings: Wandb) -> None:
        """Begin the run of the key in `states[-1]`, or resume it."""
        import wandb

        self._settings, self._wandb = settings, wandb
        self._run: Any = wandb.init(
            project=settings.project or os.environ.get("WANDB_PROJECT") or "expt",
            entity=settings.entity,
            group=settings.group
            or os.environ.get("WANDB_RUN_GROUP")
            or (run.sweep.name if run.sweep else None),
            tags=settings.tags or None,
            name=run.name,
            id=states[-1]["key"],
            resume="allow",
            reinit="create_new",  # runs of a sweep lie side by side
            dir=str(run.paths.folder),
            mode=settings.mode,
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=INIT_S, finish_timeout=FINISH_S,
                finish_timeout_raises=True, x_disable_stats=True, disable_code=True, disable_git=True,
            ),
        )  # fmt: skip
        self._state = states[-1]  # offline nobody else knows what is there
        self._next = self._run.step if self._run.url else self._state.get("next_step", 0)
        self.address = self._run.url or f"kept offline in {run.paths.folder / 'wandb'}"

    def describe(self, run: Snapshot) -> None:
        """Send the settings as W&B's config, and with them what W&B has no other place for."""
        self._run.config.update({**run.settings, **run.tags}, allow_val_change=True)

    def add(self, points: Sequence[Point], at: float) -> bool:
        """Send a row for each step that is not there yet; return whether there was any."""
        before = self._next
        for step, row in itertools.groupby(points, key=lambda point: point.step):
            if step >= self._next:
                self._run.log({point.tag: point.value for point in row}, step=step)
                self._next = self._state["next_step"] = step + 1
        return self._next > before

    def end(self, run: Snapshot, sweep_status: str) -> None:
        """Send status, summary and files. Raises TimeoutError where not all could be uploaded."""
        self._run.summary.update(
            {**run.summary, "status": run.status, "error": run.record.get("error")}
        )
        for path in run.files(checkpoints=False):
            self._run.save(str(path), base_path=str(run.paths.folder), policy="now")
        if self._settings.checkpoints:
            artifact: Any = self._wandb.Artifact(f"checkpoints-{self._run.id}", type="model")
            for path in (run.paths.best, run.paths.last):
                if path.is_file():
                    artifact.add_file(str(path))
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=_EXIT_CODES.get(run.status, KILLED))

    def leave(self) -> None:
        """Leave a run that is still under way; W&B takes it for finished until more comes."""
        self._run.finish(exit_code=0)
