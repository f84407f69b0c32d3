"""The part of this process in a run: it starts the workers, or is one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from expt.runs.paths import RunPaths
    from expt.runs.request import RunRequest


def alone(environment: Mapping[str, str]) -> str:
    """Return the command that takes this process for no worker of a larger job."""
    counts = ("SLURM_STEP_NUM_TASKS", "SUBMITIT_LOCAL_NTASKS")
    names = ["RANK", *(name for name in counts if name in environment)]
    return f"env {' '.join(f'-u {name}' for name in names)} python -m expt ..."


class Launcher:
    """This process's part in a run: it starts the workers, or with `debug=true` is the only one."""

    def follow(self, typed_at: float) -> RunPaths | None:
        """Train as rank 0 decides, and return the run's folder; None if this process decides.

        To be called before any other part of a run.
        """
        return None

    def deciding(self) -> contextlib.AbstractContextManager[None]:
        """While entered, decide what is trained; who waits for it hears if that is refused."""
        return contextlib.nullcontext()

    def earlier_folder(self) -> Path | None:
        """Return the folder in which this job's run began, if its workers were started again."""
        return None

    def carry_out(self, request: RunRequest, console: Console | None = None) -> None:
        """Train what is asked for. Raises ConfigError, RunFailed or Interrupted."""
        from expt.launch import one_run

        one_run.run(request, console)
