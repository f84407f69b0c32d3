"""The command line: `python -m expt KEY=VALUE ...`, and the console script `expt`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from expt import __version__, signals
from expt.errors import ExptError, Interrupted
from expt.launch import forkserver, slurm_variables
from expt.launch.launcher import launcher

TYPED_AT = time.time()
# Hydra's options that print something, and start no run.
PRINTING = {"--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}


def main() -> None:
    """Run the command in sys.argv, and exit: 0 done, 1 a run failed, 2 a wrong configuration, 130 (143) interrupted."""
    try:
        _run(sys.argv[1:])
    except ExptError as error:
        _complain(error)
        sys.exit(signals.exit_code() if isinstance(error, Interrupted) else error.exit_code)
    except KeyboardInterrupt:
        sys.exit(signals.exit_code())
    finally:
        forkserver.kill()


def _run(arguments: Sequence[str]) -> None:
    if {"--help", "-h"} & {*arguments}:
        _help(arguments)
        return
    if "--version" in arguments:
        print(f"expt {__version__}")
        return
    if arguments[:1] == ["doctor"]:
        forkserver.warm(forkserver.SWEEP_MODULES)
        from expt.command.doctor import examine  # late: an option of few commands

        sys.exit(examine(arguments[1:]))
    slurm_variables.adopt(os.environ)
    several = [word for word in arguments if word in ("-m", "--multirun") or word.startswith("sweep=")]
    how = launcher()
    if several:
        how.refuse_sweep(several[0])
    here = not {*PRINTING, "debug=true"} & {*arguments} and "hydra/launcher=submitit" not in " ".join(arguments)
    if here and how.starts_workers:
        # At once: it imports torch on another core while this process composes the configuration.
        forkserver.warm(forkserver.SWEEP_MODULES if several else ())
    from expt.command.main import command  # late: it imports Hydra

    command(arguments, typed_at=TYPED_AT)


def _help(arguments: Sequence[str]) -> None:
    from rich.console import Console

    from expt.command.help import print_help

    config_dir = None
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if option in ("--config-dir", "-cd"):
            config_dir = value
        elif option.startswith("--config-dir="):
            config_dir = option.partition("=")[2]
    print_help(Console(), config_dir)


def _complain(error: ExptError) -> None:
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("error:", style="bold red", end=" ")
    console.print(str(error), markup=False)


if __name__ == "__main__":
    main()
