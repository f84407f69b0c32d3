"""expt: configuration-driven experiments for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expt.api import Result, rerun, run, sweep
    from expt.errors import SweepFailed
    from expt.tasks.task import Task


__all__ = ["Result", "SweepFailed", "Task", "__version__", "rerun", "run", "sweep"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Late, so that `python -m expt --help` does not import Hydra.
    if name in ("Result", "rerun", "run", "sweep"):
        from expt import api

        return getattr(api, name)
    if name == "SweepFailed":
        from expt.errors import SweepFailed

        return SweepFailed
    if name == "Task":  # imports torch
        from expt.tasks.task import Task

        return Task
    raise AttributeError(f"module 'expt' has no attribute '{name}'")
