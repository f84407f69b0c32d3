"""The way of a command, from its words to finished runs, and how every command ends."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import sys
import time
from collections.abc import Sequence

from expt import __version__, machine, progress, signals
from expt.command import terminal
from expt.command.words import WORDS, Options, call, last_value, options_of
from expt.errors import (
    ConfigError,
    ExptError,
    Interrupted,
    RunFailed,
    did_you_mean,
    printable,
    refuse_undecoded,
    warned_once,
)
from expt.launch import forkserver
from expt.launch.launcher import adopt

AGAIN = "interrupted; type the command again"


def main(arguments: Sequence[str], *, typed_at: float | None = None) -> None:
    """Carry out `python -m expt ARGUMENTS`, and exit.

    The exit code is 0 where all is done, 1 where a run failed, 2 for wrong input, and 130 (143)
    where it was interrupted. With `--json` it is in the document that is printed, too.
    """
    terminal.prepare()
    words = [word for word in arguments if word != "--json"]
    with terminal.document(wanted=len(words) < len(arguments)):
        try:
            code = _exit_code(words, time.monotonic() if typed_at is None else typed_at)
        finally:
            forkserver.kill()
        terminal.put(exit_code=code)
    if code:
        sys.exit(code)


def _exit_code(words: Sequence[str], typed_at: float) -> int:
    """Carry out the command, also to the end of an interrupt, and return its exit code."""
    try:
        with signals.interrupts_noted():
            code = _carried_out(words, typed_at)
        if code == signals.exit_code() or not signals.was_interrupted():
            return code
    except BaseException as error:  # a RuntimeError, where Ctrl-C came as Python made a class
        if not isinstance(error, KeyboardInterrupt) and not signals.was_interrupted():
            raise
    _complain(Interrupted(AGAIN))  # it came before or after all lines but this one
    return signals.exit_code()


def _carried_out(words: Sequence[str], typed_at: float) -> int:
    """Carry out the command, print the error that ends it, and return the exit code."""
    # A breakpoint may wait for a person.
    shown = progress.reported(str if _is_debugged(words) else _progressed)
    try:
        with machine.seldom_collecting(), shown, warned_once():
            code = _do(words, typed_at)
            sys.stdout.flush()
            return code
    except (ExptError, KeyboardInterrupt, OSError) as error:
        return _explained(error, words)


def _explained(error: ExptError | KeyboardInterrupt | OSError, words: Sequence[str]) -> int:
    """Print the error that has ended the command, and return the exit code; raise others again."""
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted(AGAIN)
    elif isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # a word, then
        error = ConfigError(f"{error.filename}: {error.strerror}; shorten it")
    if isinstance(error, ExptError):
        if isinstance(error, ConfigError):
            error.args = (f"{error}{_place_of(str(error), words)}",)
        _complain(error)
        return signals.exit_code() if isinstance(error, Interrupted) else error.exit_code
    reason = terminal.unwritten()
    if not reason and error.filename is None:
        raise error
    if not isinstance(error, BrokenPipeError):  # `| head` has seen enough
        _complain(RunFailed(reason or f"{error.filename}: {error.strerror}"))
    return 1


def _do(arguments: Sequence[str], typed_at: float) -> int:
    refuse_undecoded(arguments)
    if not {"--help", "-h", "help", "--version"} & {*arguments}:
        _refuse_lost_folder()
    first = arguments[0] if arguments else ""
    if first in WORDS:
        return call(first, arguments[1:])
    if {"--help", "-h"} & {*arguments} or first == "help":
        return _help(arguments)
    if "--version" in arguments:
        print(f"expt {__version__}")
        return 0
    options = options_of(arguments)
    if re.fullmatch(r"[A-Za-z][\w.-]*:?", first):
        raise ConfigError(
            f"{first}: neither a command ({', '.join(WORDS)}) nor of the form key=value."
            f"{did_you_mean(first, WORDS)}"
        )
    adopt(os.environ)
    if not machine.is_external_worker():
        _start_importing(options)
    from expt.command.invoke import command  # late: it imports Hydra

    gc.freeze()  # the exit looks through the rest only: 0.08 s
    command(options, typed_at=typed_at)
    return 0


def _is_debugged(words: Sequence[str]) -> bool:
    return (last_value(words, "debug") or "").lower() == "true"


def _start_importing(options: Options) -> None:
    """Let the forkserver import torch on another core while this process composes."""
    words = options.settings
    on_cluster = (last_value(words, "hydra/launcher") or "").startswith("submitit")
    if not (options.printing or on_cluster or _is_debugged(words)):
        sweep = forkserver.SWEEP_MODULES if options.sweep or last_value(words, "sweep") else ()
        forkserver.warm([*sweep, *forkserver.libraries_in(words)])


def _refuse_lost_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError("the current folder is no longer there; cd to one that is") from error


def _help(arguments: Sequence[str]) -> int:
    if word := next((word for word in arguments if word in WORDS), None):
        return call(word, ["--help"])
    from expt.command.help import print_help
    from expt.runs.view.text import Console

    print_help(Console(wraps=True), arguments)
    return 0


def _progressed(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # of several workers of torchrun one reports
        print(line, file=sys.stderr, flush=True)


def _place_of(problem: str, words: Sequence[str]) -> str:
    """Return a further line if a run in `words` was started where the problem is none, or ""."""
    from expt.command.trained_runs import started_elsewhere

    named = (word.partition("=")[2] for word in words)
    places = (started_elsewhere(each, problem) for each in (*words, *named))
    with contextlib.suppress(OSError):  # a folder that can't be entered
        return next((f"\n{place}" for place in places if place), "")
    return ""


def _complain(error: ExptError) -> None:
    from expt.runs.view.text import Console

    terminal.put(error={"kind": type(error).__name__, "message": str(error)})
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("error:", style="bold red", end=" ")
    console.print(printable(str(error)))
