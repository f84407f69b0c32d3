"""expt: configuration-driven experiments for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expt.api import Predictions, Result, Runs, evaluate, list_runs, predict, rerun, run, sweep
    from expt.errors import SweepFailed
    from expt.inference.load import TrainedModel, load
    from expt.tasks.phases import PhasedTask
    from expt.tasks.task import Task
    from expt.training.callback import Callback, View


__all__ = [
    "Callback",
    "PhasedTask",
    "Predictions",
    "Result",
    "Runs",
    "SweepFailed",
    "Task",
    "TrainedModel",
    "View",
    "__version__",
    "evaluate",
    "list_runs",
    "load",
    "predict",
    "rerun",
    "run",
    "sweep",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Late, so that `python -m expt --help` does not import Hydra.
    if name in ("Predictions", "Result", "Runs", "evaluate", "list_runs", "predict", "rerun", "run", "sweep"):
        from expt import api

        return getattr(api, name)
    if name == "SweepFailed":
        from expt.errors import SweepFailed

        return SweepFailed
    if name in ("TrainedModel", "load"):  # imports torch
        from expt.inference import load

        return getattr(load, name)
    if name in ("Callback", "View"):  # as well
        from expt.training import callback

        return getattr(callback, name)
    if name == "PhasedTask":
        from expt.tasks.phases import PhasedTask

        return PhasedTask
    if name == "Task":
        from expt.tasks.task import Task

        return Task
    raise AttributeError(f"module 'expt' has no attribute '{name}'")
