"""expt: configuration-driven experiments for PyTorch."""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING

from expt import registry

if TYPE_CHECKING:
    from expt.api import evaluate, list_runs, predict, rerun, run, sweep
    from expt.errors import ConfigError, RunFailed, SweepFailed
    from expt.inference.frozen import Frozen
    from expt.inference.load import TrainedModel, load
    from expt.python.arguments import Interval, interval
    from expt.python.results import FailedResult, Metrics, Predictions, Result, Runs, SweepResult
    from expt.runs.view.curves import History
    from expt.tasks.task import PhasedTask, Task, train_mode
    from expt.training.callback import Callback, View


__all__ = [
    "Callback",
    "ConfigError",
    "FailedResult",
    "Frozen",
    "History",
    "Interval",
    "Metrics",
    "PhasedTask",
    "Predictions",
    "Result",
    "RunFailed",
    "Runs",
    "SweepFailed",
    "SweepResult",
    "Task",
    "TrainedModel",
    "View",
    "__version__",
    "evaluate",
    "interval",
    "list_runs",
    "load",
    "predict",
    "rerun",
    "run",
    "sweep",
    "train_mode",
]
__version__ = "0.2.0"


_FROM = {
    "api": ("evaluate", "list_runs", "predict", "rerun", "run", "sweep"),
    "python.arguments": ("Interval", "interval"),
    "python.results": ("FailedResult", "Metrics", "Predictions", "Result", "Runs", "SweepResult"),
    "errors": ("ConfigError", "RunFailed", "SweepFailed"),
    "inference.frozen": ("Frozen",),  # imports torch, as the next do
    "inference.load": ("TrainedModel", "load"),
    "runs.view.curves": ("History",),
    "training.callback": ("Callback", "View"),
    "tasks.task": ("PhasedTask", "Task", "train_mode"),
}


def __getattr__(name: str) -> object:
    # Late, so that `python -m expt --help` does not import Hydra.
    for module, names in _FROM.items():
        if name in names:
            state = random.getstate()
            found = getattr(importlib.import_module(f"expt.{module}"), name)
            random.setstate(state)  # rich draws from it as it is imported
            return found
    raise AttributeError(f"module 'expt' has no attribute '{name}'")


# Late too: a script that imports expt has no need of pydantic.
registry.register(lambda: importlib.import_module("expt.catalogue"))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
