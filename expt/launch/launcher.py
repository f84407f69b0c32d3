"""Who starts a run's workers: expt itself, or torchrun or Slurm, which already have.

Free of torch, and quick: see each method for what it imports.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from expt import machine
from expt.errors import ConfigError
from expt.launch import slurm_variables

if TYPE_CHECKING:  # before the forkserver runs, only what is small is imported
    from rich.console import Console

    from expt.runs.paths import RunPaths
    from expt.runs.request import RunRequest


class Launcher:
    """This process's part in a run: it starts the workers, or with `debug=true` is the only one."""

    starts_workers = True
    """Whether it starts them; else it is one of them."""

    def refuse_sweep(self, word: str) -> None:
        """Raise ConfigError if there can be only one run, and `word` asks for several."""

    def follow(self, typed_at: float) -> RunPaths | None:
        """Train as rank 0 says, and return the run's folder; None if this process itself decides.

        To be called before any other part of a run.
        """
        return None

    def deciding(self) -> contextlib.AbstractContextManager[None]:
        """While entered, decide what is trained; who waits for it hears if that is refused."""
        return contextlib.nullcontext()

    def earlier_folder(self) -> Path | None:
        """Return the folder in which this job's run began, if its workers were started again."""
        return None

    def carry_out(
        self,
        request: RunRequest,
        on_start: Callable[[], None] | None = None,
        console: Console | None = None,
    ) -> None:
        """Train what is asked for; `on_start` is called once the run has been accepted.

        Raises ConfigError, RunFailed or Interrupted.
        """
        from expt.launch import one_run

        one_run.run(request, on_start, console)


class ExternalWorker(Launcher):
    """One of the workers that torchrun or Slurm has started; rank 0 decides for all."""

    starts_workers = False

    def refuse_sweep(self, word: str) -> None:
        """Refuse it, in the words of rank 0."""
        if os.environ["RANK"] != "0":
            sys.exit(ConfigError.exit_code)
        raise ConfigError(
            f"{word}: a sweep cannot run inside torchrun or srun; start it alone, as in python -m"
            " expt -m ..."
        )

    def follow(self, typed_at: float) -> RunPaths | None:
        """Follow on every rank but 0. Raises ConfigError if the others can't be found."""
        slurm_variables.check(os.environ)
        if os.environ["RANK"] == "0":
            return None
        from expt.launch import torchrun

        return torchrun.follow(typed_at)

    def deciding(self) -> contextlib.AbstractContextManager[None]:
        """Let the other ranks end if what they wait for is refused."""
        from expt.launch import torchrun

        return torchrun.refusal_told()

    def earlier_folder(self) -> Path | None:
        """Ask the store that the workers meet at."""
        from expt.launch import torchrun

        return torchrun.earlier_folder()

    def carry_out(
        self,
        request: RunRequest,
        on_start: Callable[[], None] | None = None,
        console: Console | None = None,
    ) -> None:
        """Do rank 0's part."""
        from expt.launch import torchrun

        torchrun.lead(request, on_start)


def launcher() -> Launcher:
    """Return this process's, by its environment."""
    return ExternalWorker() if machine.is_external_worker() else Launcher()
