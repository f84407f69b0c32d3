"""The command line: what the arguments ask for, and how every command ends.

Free of torch and Hydra.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Sequence

from expt import __version__, machine, signals
from expt.command import terminal
from expt.command.words import WORDS
from expt.errors import (
    INTERRUPTED_BEFORE,
    ConfigError,
    ExptError,
    Interrupted,
    did_you_mean,
    printable,
)
from expt.launch import forkserver, slurm_variables
from expt.launch.launcher import launcher

# Hydra's options that print something, and start no run.
PRINTING = {"--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}


def main(arguments: Sequence[str], *, typed_at: float | None = None) -> None:
    """Do what `expt ARGUMENTS` asks for, and exit: 0 done, 1 a run failed, 2 wrong input, 130 (143)
    interrupted.
    """
    terminal.prepare()
    with signals.interrupts_noted():
        code = _exit_code(arguments, time.monotonic() if typed_at is None else typed_at)
    if code:
        sys.exit(code)


def _exit_code(arguments: Sequence[str], typed_at: float) -> int:
    try:
        _refuse_lost_folder()
        with terminal.quietly(arguments) as words:
            code = _run(words, typed_at)
    except ExptError as error:
        _complain(error)
        code = signals.exit_code() if isinstance(error, Interrupted) else error.exit_code
    except KeyboardInterrupt:
        code = signals.exit_code()
    except BaseException:  # a RuntimeError, where Ctrl-C came as Python made a class
        if not signals.was_interrupted():
            raise
    finally:
        forkserver.kill()
    return signals.exit_code() if signals.was_interrupted() else code


def _refuse_lost_folder() -> None:
    """Raise ConfigError where the current folder has been removed."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the current folder is no longer there ({error.strerror}); cd to one that is"
        ) from error


def _run(arguments: Sequence[str], typed_at: float) -> int:
    if arguments and arguments[0] in WORDS:
        return int(importlib.import_module(WORDS[arguments[0]].module).main(arguments[1:]))
    if {"--help", "-h"} & {*arguments} or arguments[:1] == ["help"]:
        if word := next((word for word in arguments if word in WORDS), None):
            return int(importlib.import_module(WORDS[word].module).main(["--help"]))
        _help(arguments)
        return 0
    if "--version" in arguments:
        print(f"expt {__version__}")
        return 0
    slurm_variables.adopt(os.environ)
    several = [
        word for word in arguments if word in ("-m", "--multirun") or word.startswith("sweep=")
    ]
    how = launcher()
    if several:
        how.refuse_sweep(several[0])
    if how.starts_workers:
        _refuse_unknown(arguments)
        if not {*PRINTING, "debug=true"} & {
            *arguments
        } and "hydra/launcher=submitit" not in " ".join(arguments):
            # At once: it imports torch on another core while this process composes the
            # configuration.
            forkserver.warm(
                [
                    *(forkserver.SWEEP_MODULES if several else ()),
                    *forkserver.libraries_in(arguments),
                ]
            )
    try:
        with machine.seldom_collecting():  # a tenth sooner
            from expt.command.main import command  # late: it imports Hydra
    except KeyboardInterrupt:
        raise Interrupted(INTERRUPTED_BEFORE) from None
    command(arguments, typed_at=typed_at)
    return 0


def _refuse_unknown(arguments: Sequence[str]) -> None:
    """Raise ConfigError where the first word looks like one of WORDS, and is none."""
    if arguments and re.fullmatch(r"[A-Za-z][\w-]*", arguments[0]):
        raise ConfigError(
            f"{arguments[0]}: neither a command ({', '.join(WORDS)}) nor of the form key=value."
            f"{did_you_mean(arguments[0], WORDS)}"
        )


def _help(arguments: Sequence[str]) -> None:
    from rich.console import Console

    from expt.command.help import print_help

    print_help(Console(), arguments)


def _complain(error: ExptError) -> None:
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("error:", style="bold red", end=" ")
    console.print(printable(str(error)), markup=False, emoji=False)
