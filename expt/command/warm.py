"""`expt warm`: what workers need is imported once, and the commands that follow start without that
wait.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console

import expt
from expt import signals
from expt.command.words import Parser
from expt.errors import ConfigError, RunFailed, warn
from expt.launch import warm
from expt.launch.surroundings import fingerprint, parts

SECONDS = {"s": 1, "m": 60, "h": 3600}
IMPORT_S = 300
"""How long torch may take to be imported, from a slow disk."""
DRIVERS_S = 10
"""How much longer the process may take that drivers are forked from; without it a command drives
itself.
"""
PROGRAM = (
    "import sys; sys.path.append({root!r}); "
    "from expt.command.warm_drivers import main; main({name!r}, {idle_s!r}, {ready!r})"
)
ABOUT = """\
Import once what the workers of every run need: torch, torchvision, TensorBoard. The runs and sweeps that are typed
next start without that wait. It ends by itself when no command has used it for a while. A command in another
environment (a variable, `ulimit`, `taskset`, an upgrade, another user) takes no notice of it."""


def main(words: Sequence[str]) -> int:
    """Start the warm server, ask about it, or end it.

    Raises ConfigError for words that are not understood.
    """
    parser = Parser("warm", ABOUT)
    parser.add_argument(
        "--for",
        dest="idle",
        default="30m",
        metavar="TIME",
        help="ends when unused for so long: 90s, 30m, 2h [30m]",
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--status",
        action="store_true",
        help="show it, and whether a command typed here would use it",
    )
    either.add_argument(
        "--stop", action="store_true", help="end it; runs under way are not touched"
    )
    asked = parser.parse_args(list(words))
    idle_s = _seconds(asked.idle)
    if asked.stop:
        _stop_all()
    elif asked.status:
        found = list(_answering())
        _show(found, sorted({*_listening()} - {each["name"] for each in found}))
    else:
        try:
            _show([_started(idle_s)])
        except OSError as error:  # a disk that is full, or read-only
            raise ConfigError(
                f"expt warm: {error.filename or warm.folder()}: {error.strerror or error}"
            ) from error
    return 0


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([1-9]\d*)([smh])", text)
    if not found:
        raise ConfigError(
            f"--for {text}: is no length of time; write it as in --for 90s, --for 30m or --for 2h"
        )
    return float(int(found[1]) * SECONDS[found[2]])


def _started(idle_s: float) -> dict[str, Any]:
    """What the warm server for commands typed here says of itself; it is started where there is
    none.
    """
    if signals.in_slurm():
        raise ConfigError("expt warm: not in a job of Slurm, whose processes end with it")
    folder, name = warm.folder(), fingerprint()
    if name is None or not hasattr(os, "pidfd_open"):
        raise ConfigError(
            "expt warm: needs Linux and its /proc; here every command imports torch by itself"
        )
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not warm.is_private(folder):
        raise ConfigError(
            f"{folder}: must be a folder of yours that nobody else can enter; remove it, then try"
            " again"
        )
    with FileLock(folder / "lock"):
        with contextlib.suppress(warm.Cold):
            return {**warm.ask(name, "keep", idle_s=idle_s), "name": name}
        for other in list(_answering()):
            if other["prefix"] == sys.prefix:  # of before an upgrade, or with another `ulimit`
                _stop(other["name"])
                warn(
                    f"process {other['pid']}, of another environment ({_other(other['parts'])}),"
                    " makes way"
                )
        warm.kill(name)  # one that hangs: it would be in nobody's reach as the other has its socket
        _start(name, idle_s)
        if fingerprint() != name:
            _stop(name)
            raise RunFailed(
                "expt warm: files of expt or torch changed while they were imported; type it again"
            )
        try:
            return {**warm.ask(name, "status"), "name": name}
        except warm.Cold as error:
            raise RunFailed("expt warm: it ended as soon as it was ready; type it again") from error


def _start(name: str, idle_s: float) -> None:
    """Start the process, and wait until it is ready. Raises RunFailed where it ends before."""
    ready, tell = os.pipe()
    log = warm.folder() / f"{name}.log"
    program = PROGRAM.format(
        root=str(Path(expt.__file__).parents[1]), name=name, idle_s=idle_s, ready=tell
    )
    options = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    with os.fdopen(ready, "rb", buffering=0) as told, log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *options, "-c", program],
            cwd=warm.folder(),  # where nothing lies that could be imported by mistake
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[tell],
        )
        os.close(tell)
        with Console(stderr=True).status("importing torch"):
            is_ready = bool(select.select([told], [], [], IMPORT_S)[0] and told.read(1))
            select.select(
                [told], [], [], DRIVERS_S
            )  # closed by both, of which the one without torch is mostly first
    lines = log.read_text(errors="replace").strip().splitlines()
    log.unlink()
    if not is_ready:
        process.kill()
        process.wait()
        raise RunFailed(
            "expt warm: it ended before it was ready:"
            f" {lines[-1] if lines else 'killed (out of memory?)'}"
        )


def _answering() -> Iterator[dict[str, Any]]:
    """What each warm server of this user says of itself; what is left of those that were killed is
    removed.
    """
    if not warm.is_private(warm.folder()):
        return
    for name in list(warm.sockets()):
        with contextlib.suppress(warm.Cold):
            yield {**warm.ask(name, "status"), "name": name}
            continue
        if not warm.listens(name):
            for kind in warm.SERVER, warm.DRIVERS:
                warm.hide(name, kind)


def _stop_all() -> None:
    found = list(_answering())
    for each in found:
        _stop(each["name"])
    hanging = _listening()
    for name in hanging:
        warm.kill(name)
    if left := _listening():
        raise RunFailed(
            f"{warm.folder()}: {len(left)} does not answer; `pkill -9 -f warm_drivers` ends it"
        )
    number = len(found) + len(hanging)
    Console().print(f"ended {number}" if number else "there was none")


def _listening() -> list[str]:
    """The names of all that listen: once those that answer have been stopped, of those that hang."""
    return [*warm.sockets()] if warm.is_private(warm.folder()) else []


def _stop(name: str) -> None:
    with contextlib.suppress(warm.Cold):  # it has ended by itself since it was asked what it is
        warm.ask(name, "stop")


def _show(servers: Sequence[dict[str, Any]], hanging: Sequence[str] = ()) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for name in hanging:
        console.print(
            f"warm    {name} does not answer (stopped, or the machine is busy); `expt warm --stop`"
            " ends it"
        )
    if not (servers or hanging):
        console.print("there is none; `expt warm` starts one")
    for found in servers:
        here = found["name"] == fingerprint()
        console.print(f"warm    process {found['pid']}, {_whose(found['parts'], here=here)}")
        console.print(f"holds   {found['mebibytes']} MiB")
        console.print(f"used    by {found['commands']} commands, {found['under_way']} under way")
        if found.get("stopped"):
            console.print(
                f"stopped process {found['stopped']}, in which commands begin; they begin without"
                " it now"
            )
        left = "" if found["under_way"] else f" ({_length(found['left_s'])} left)"
        console.print(
            f"ends    after {_length(found['idle_s'])} without one{left}, or by `expt warm --stop`"
        )


def _whose(its: Mapping[str, str], *, here: bool) -> str:
    if here:
        return "used by commands typed here"
    return (
        f"not used by commands typed here: {_other(its)} differs; `expt warm` starts one for them"
    )


def _other(its: Mapping[str, str]) -> str:
    """What of its surroundings is another than here."""
    ours = parts()
    return ", ".join(sorted(name for name in {*its, *ours} if its.get(name) != ours.get(name))[:4])


def _length(seconds: float) -> str:
    return f"{seconds / 60:.2g} min" if seconds >= 60 else f"{seconds:.0f} s"
