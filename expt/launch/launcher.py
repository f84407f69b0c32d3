"""Who starts a run's workers, chosen here and nowhere else: expt itself, or torchrun or Slurm,
which already have.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from expt import machine
from expt.errors import ConfigError
from expt.launch import slurm_variables

if TYPE_CHECKING:  # before the forkserver runs, only what is small is imported
    from rich.console import Console

    from expt.runs.paths import RunPaths
    from expt.runs.request import RunRequest


class Launcher(Protocol):
    """This process's part in a run."""

    starts_workers: bool
    """Whether it starts them; else it is one of them."""

    def refuse_sweep(self, word: str) -> None:
        """Raise ConfigError for a command of several runs, which `word` asks for, where there can
        be but one.
        """

    def follow(self, typed_at: float) -> RunPaths | None:
        """Train as rank 0 tells; returns the run's folder.

        None where this process itself decides what is trained.

        To be called before any other part of a run.
        """

    def deciding(self) -> contextlib.AbstractContextManager[None]:
        """While entered, this process decides what is trained; whoever waits for it hears where
        that is refused.
        """

    def earlier_folder(self) -> Path | None:
        """The folder in which this job's run began, where the workers have been started again."""

    def carry_out(
        self,
        request: RunRequest,
        on_start: Callable[[], None] | None = None,
        console: Console | None = None,
    ) -> None:
        """Train what is asked for; `on_start` is called once the run has been accepted.

        Raises ConfigError, RunFailed or Interrupted.
        """


def launcher() -> Launcher:
    """This process's, by its environment.

    Free of torch, and quick: see each method for what it imports.
    """
    return OneOfMany() if machine.is_external_worker() else Driver()


class Driver:
    """This process starts the workers, on this machine; with `debug=true` it is the only one."""

    starts_workers = True

    def refuse_sweep(self, word: str) -> None:
        """Several runs are welcome."""

    def follow(self, typed_at: float) -> RunPaths | None:
        """It decides."""
        return None

    def deciding(self) -> contextlib.AbstractContextManager[None]:
        """Nobody waits for it."""
        return contextlib.nullcontext()

    def earlier_folder(self) -> Path | None:
        """The person names the folder."""
        return None

    def carry_out(
        self,
        request: RunRequest,
        on_start: Callable[[], None] | None = None,
        console: Console | None = None,
    ) -> None:
        """See expt.launch.one_run."""
        from expt.launch import one_run

        one_run.run(request, on_start, console)


class OneOfMany:
    """Torchrun or Slurm has started the workers, and this process is one; rank 0 decides for all."""

    starts_workers = False

    def refuse_sweep(self, word: str) -> None:
        """Rank 0 says so."""
        if os.environ["RANK"] != "0":
            sys.exit(ConfigError.exit_code)
        raise ConfigError(
            f"{word}: a sweep cannot run inside torchrun or srun; start it alone, as in python -m"
            " expt -m ..."
        )

    def follow(self, typed_at: float) -> RunPaths | None:
        """Every rank but 0. Raises ConfigError where the environment does not say where the others
        are.
        """
        slurm_variables.check(os.environ)
        if os.environ["RANK"] == "0":
            return None
        from expt.launch import torchrun

        return torchrun.follow(typed_at)

    def deciding(self) -> contextlib.AbstractContextManager[None]:
        """The other ranks wait."""
        from expt.launch import torchrun

        return torchrun.refusal_told()

    def earlier_folder(self) -> Path | None:
        """The store that the workers meet at knows it."""
        from expt.launch import torchrun

        return torchrun.earlier_folder()

    def carry_out(
        self,
        request: RunRequest,
        on_start: Callable[[], None] | None = None,
        console: Console | None = None,
    ) -> None:
        """Rank 0's part."""
        from expt.launch import torchrun

        torchrun.lead(request, on_start)
