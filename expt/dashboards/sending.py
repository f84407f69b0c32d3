"""The processes that send a command's runs to dashboards while it runs: expt.dashboards.sender.

Closing the stdin of such a process, after the seconds that are left, tells it that all runs have
ended. Its stdout has warnings as they come, and at its end the lines of AT and LEFT.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import connection
from pathlib import Path

from expt import machine, registry, signals
from expt.config.schema import RunConfig
from expt.errors import WARNING, require, warn
from expt.runs.provenance import program
from expt.runs.view.text import Console, field, say, shown_path

PATIENCE_S, INTERRUPTED_S = 10.0, 2.0
"""Seconds that a dashboard gets at a command's end for the rest; after Ctrl-C."""
LEFT, AT = "left: ", "at: "
"""Beginnings of a sender's last lines: why not all could be sent; the address of a copy."""


def require_package(name: str, word: str) -> None:
    """Raise ConfigError where the package of a tracker, asked for by `word`, is not installed."""
    if package := registry.trackers()[name].PACKAGE:
        require(word, package, extra=name)


class Sending:
    """The dashboards' processes of one command; none of them is waited for but in `wait`."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}
        self._end = 0.0

    def follow(self, config: RunConfig, folder: Path) -> None:
        """Have the run or the sweep of `folder` sent to where `config` says, from now on.

        Raise ConfigError where a dashboard's package is missing.
        """
        for name in config.send:
            require_package(name, f"send={name}")
        for name in config.send:
            if name not in self._processes:
                self._processes[name] = _Process(name, folder)

    def close(self) -> None:
        """Tell them that all runs have ended. To be followed by `wait`."""
        patience_s = INTERRUPTED_S if signals.asked() else PATIENCE_S
        self._end = time.monotonic() + patience_s
        for process in self._processes.values():
            process.tell_end(patience_s)

    def wait(self) -> None:
        """Wait for them, as long as `close` has said, and print their reports."""
        for process in self._processes.values():
            process.wait(self._end)
        self._processes = {}


class _Process:
    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._said: list[str] = []
        self._is_told = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "expt.dashboards.sender", name, str(folder.absolute())],
            env=machine.for_child(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is the command's to tell
        )
        self._alive = os.pidfd_open(self._process.pid)  # ready once it has ended
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        """Pass on warnings as they come."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith(WARNING):
                    warn(line.removeprefix(WARNING).rstrip("\n"))
                else:
                    self._said.append(line.rstrip("\n"))
        if not self._is_told:  # it would wait for the end
            warn(f"{self._name}: the process that sends runs has died; runs train on")

    def tell_end(self, patience_s: float) -> None:
        self._is_told = True
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has died
            self._process.stdin.write(f"{patience_s}")
            self._process.stdin.close()

    def wait(self, end: float) -> None:
        try:
            connection.wait([self._alive], max(0.0, end + 0.5 - time.monotonic()))
        finally:
            with contextlib.suppress(PermissionError):  # before its pid may be another's
                os.killpg(self._process.pid, signal.SIGKILL)  # and the processes of its client
            self._process.wait()
            os.close(self._alive)
        self._reader.join(1.0)
        for line in self._said:
            if line.startswith(AT):
                say(Console(), field(self._name, line.removeprefix(AT)))
        left = [line.removeprefix(LEFT) for line in self._said if line.startswith(LEFT)]
        if self._process.returncode or left:
            again = shlex.join([*program().split(), "send", shown_path(self._folder)])
            why = left[0] if left else "its process has died"
            warn(f"{self._name}: not all could be sent ({why}); the rest, once: {again}")
