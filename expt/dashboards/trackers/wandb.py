"""Runs in Weights & Biases."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT
from expt.dashboards.trackers import Copy, Tracker, send_apart, unsent

if TYPE_CHECKING:
    from expt.dashboards.snapshot import Snapshot
    from expt.runs.metrics_file import Point

INIT_S, FINISH_S = 10, 30
KILLED = 255
"""W&B's exit code of a run that was interrupted."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config(Tracker):
    """Weights & Biases; `pip install 'expt[wandb]'`."""

    PACKAGE: ClassVar[str | None] = "wandb"
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] | None = None
    checkpoints: bool = False

    def copy(self, run: Snapshot, state: dict[str, Any], key_of: Callable[[Path], str]) -> Copy:
        """Return the copy of a run."""
        return WandbCopy(run, state, self)


class WandbCopy(Copy):
    """A run's copy there, known by its key; W&B's own count of steps says where it continues."""

    def __init__(self, run: Snapshot, state: dict[str, Any], settings: Config) -> None:
        """Begin the run of the key in `state`, or resume it."""
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
            id=state["key"],
            resume="allow",
            reinit="create_new",  # runs of a sweep lie side by side
            dir=str(run.paths.folder),
            mode=settings.mode,
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=INIT_S, finish_timeout=FINISH_S,
                finish_timeout_raises=True, x_disable_stats=True, disable_code=True,
                disable_git=True,
            ),
        )  # fmt: skip
        self._state = state  # offline nobody else knows the points there
        self._next: int = self._run.step if self._run.url else self._state.get("next_step", 0)
        self.address = self._run.url or f"kept offline in {run.paths.folder / 'wandb'}"

    def describe(self, run: Snapshot) -> None:
        """Send the settings as W&B's config, and facts that W&B has no other place for."""
        update = functools.partial(self._run.config.update, allow_val_change=True)
        self._each({**run.settings, **run.tags}, update)

    def _each(self, values: Mapping[str, Any], send: Callable[[dict[str, Any]], object]) -> None:
        def reach(error: Exception) -> None:
            if not isinstance(error, TypeError | ValueError | self._wandb.errors.UsageError):
                raise error

        send_apart([*values.items()], lambda some: send(dict(some)), reach)

    def add(self, points: Sequence[Point], at: float) -> None:
        """Send the points that are not there yet; a later session's of a row go to the next."""
        for step, row in unsent(points, self._state):
            if step >= self._next - 1:
                self._next = max(step, self._next)
                self._each(row, functools.partial(self._run.log, step=self._next))
                self._state["next_step"] = self._next + 1

    def end(self, run: Snapshot, sweep_status: str) -> None:
        """Send status, summary and files. Raise TimeoutError where not all could be uploaded."""
        from expt.runs.result import COMPLETED, FAILED, PRUNED  # late: it imports the configuration

        about = {"status": run.status, "error": run.record.get("error")}
        self._each({**run.summary, **about}, self._run.summary.update)
        for path in run.files(checkpoints=self._settings.checkpoints):
            self._run.save(str(path), base_path=str(run.paths.folder), policy="now")
        exit_codes = {COMPLETED: 0, PRUNED: 0, FAILED: 1}
        self._run.finish(exit_code=exit_codes.get(run.status, KILLED))

    def leave(self) -> None:
        """Leave a run that is still under way; W&B takes it for finished until more comes."""
        self._run.finish(exit_code=0)
