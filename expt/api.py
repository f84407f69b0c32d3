"""expt from a notebook or a script: the command line as a function."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expt import forkserver, record, session


@dataclass(frozen=True)
class Result:
    """A completed run: its folder, and what result.json says of it."""

    folder: Path
    record: dict[str, Any]

    @property
    def metrics(self) -> dict[str, float]:
        """The final value of every tag, as in `metrics["accuracy/test"]`."""
        values: dict[str, float] = self.record["metrics"]
        return values

    @property
    def objective(self) -> float | None:
        """The value that the run was to optimise."""
        value: float | None = self.record["objective"]["value"]
        return value


def run(*arguments: str) -> list[Result]:
    """Do what `python -m expt ARGUMENTS` does, as in `run("model=resnet18", "gpus=4")`; a result for each run.

    Raises ConfigError, RunFailed or Interrupted (see expt.errors). The processes that workers are forked from stay
    warm: the next call starts in a fraction of a second.
    """
    forkserver.warm()
    completed = session.command(arguments, started=time.time())
    return [Result(paths.folder, record.read_result(paths)) for paths in completed]
