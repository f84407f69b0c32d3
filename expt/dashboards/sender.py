"""The reader of run folders that sends them to one dashboard, each point once.

It runs next to a command as `python -m expt.dashboards.sender NAME FOLDER`, and ends with it:
closing its stdin, after the seconds that are left, tells it that all runs have ended. `expt send`
uses the same `Sender` afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets as tokens
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock, Timeout

from expt import registry, signals
from expt.config import secrets
from expt.config.schema import RunConfig
from expt.dashboards.snapshot import Snapshot, snapshot, with_epochs
from expt.dashboards.trackers import Copy, Tracker, in_a_line
from expt.errors import WARNING, require, warn
from expt.runs.metrics_file import MetricsReader
from expt.runs.paths import RunPaths, is_held, is_sweep, write_atomically
from expt.runs.provenance import program
from expt.runs.result import COMPLETED, FAILED, RUNNING, read_result
from expt.runs.view.text import Console, field, say, shown_path

POLL_S, MAX_WAIT_S = 1.0, 60.0
"""Seconds between two looks at the folders; at most, where the dashboard can't be reached."""
END_S = 10.0
"""Seconds for the rest, if the command was killed and could not say how long."""
PATIENCE_S, INTERRUPTED_S = 10.0, 2.0
"""Seconds that a dashboard gets at a command's end for the rest; after Ctrl-C."""
NICENESS = 10
"""The niceness of its process: workers come first."""
LEFT, AT = "left: ", "at: "
"""Beginnings of its last lines: why not all could be sent; the address of the copy."""


class _Sent:
    """The state of one run or sweep: its key there, in a file that one process holds."""

    def __init__(self, folder: Path, name: str) -> None:
        """Lock the file. Raise Timeout where another process sends it, and OSError."""
        sent = RunPaths(folder).sent
        sent.mkdir(exist_ok=True)
        self._file = sent / f"{name}.json"
        self._lock = FileLock(sent / f"{name}.lock", timeout=0)
        self._lock.acquire()
        self.state: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):
            self.state = json.loads(self._file.read_text(encoding="utf-8"))
        if "key" not in self.state:  # written down before anything is created there
            self.state["key"] = tokens.token_hex(4)
            self.save()

    def save(self) -> None:
        write_atomically(self._file, json.dumps(self.state, indent=1) + "\n")

    def close(self) -> None:
        self._lock.release()


class Sender:
    """A sender of runs to the dashboard `name`, by `settings`, or else by their recorded ones."""

    def __init__(self, name: str, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._name, self._settings = name, settings
        self._runs: dict[Path, _Run] = {}
        self._sweeps: dict[Path, _Sent] = {}
        self.num_sent = 0
        self.addresses: dict[str, None] = {}
        """The addresses of the copies, in order."""

    def send(self, folders: Sequence[RunPaths], *, last: bool = False) -> None:
        """Send new points of these runs. Raise the errors of the dashboard's client.

        A run that may still be refused, and its folder removed, waits for the `last` time.
        """
        failed: Exception | None = None
        for paths in folders:
            run = self._runs.setdefault(paths.folder, _Run(paths))
            try:
                self.num_sent += self._send(run, last=last)
            except Timeout:
                if last:
                    warn(f"{paths.folder}: another command is sending it to {self._name}")
            except Exception as error:
                run.close()
                if not isinstance(error, FileNotFoundError) or paths.folder.exists():
                    failed = failed or error
        if failed is not None:  # not before the others had their turn
            raise failed

    def _send(self, run: _Run, *, last: bool) -> bool:
        found = snapshot(run.paths, even_lost=last)
        if found is None or not (last or run.paths.has_trained()):
            return False
        settings = settings_of(found, self._name, self._settings)
        digest = found.digest(checkpoints=settings.checkpoints)
        if digest == run.seen:
            return False
        run.sent = run.sent or _Sent(run.paths.folder, self._name)
        if is_new := run.sent.state.get("sent") != digest:
            self._copy(run, run.sent, found, settings)
            run.sent.state["sent"] = digest
            run.sent.save()
        run.seen = digest
        if found.has_ended:
            run.close()
        return is_new

    def _copy(self, run: _Run, sent: _Sent, found: Snapshot, settings: Tracker) -> None:
        is_new = run.copy is None
        run.copy = run.copy or settings.copy(found, sent.state, self._key_of)
        if is_new or found.has_ended:  # all of it: the dashboard has a part
            run.copy.describe(found)
            run.reader = MetricsReader(run.paths)
        self.addresses[run.copy.address] = None
        run.copy.add([*with_epochs(run.reader.read())], time.time())
        if found.has_ended:
            runs = runs_in(found.sweep) if found.sweep else []
            others = {read_result(paths).get("status") for paths in runs}
            status = COMPLETED if others <= {COMPLETED} else FAILED
            run.copy.end(found, RUNNING if RUNNING in others else status)

    def _key_of(self, sweep: Path) -> str:
        if sweep not in self._sweeps:
            self._sweeps[sweep] = _Sent(sweep, self._name)
        return str(self._sweeps[sweep].state["key"])

    def end(self) -> None:
        """Let go of all. Raises the errors of the dashboard's client."""
        for run in self._runs.values():
            if run.copy is not None:
                run.copy.leave()
            run.close()
        for sweep in self._sweeps.values():
            sweep.close()


class _Run:
    """A run on its way."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths, self.reader = paths, MetricsReader(paths)
        self.copy: Copy | None = None
        self.sent: _Sent | None = None
        self.seen = ""

    def close(self) -> None:
        self.copy = None
        if self.sent is not None:
            self.sent.close()
            self.sent = None


def settings_of(run: Snapshot, name: str, chosen: Mapping[str, Any]) -> Tracker:
    """Return how a run is sent: as it was `chosen`, else as its configuration says.

    Raise ConfigError for a variable that is not set.
    """
    recorded: dict[str, Any] = dict((run.record.get("config") or {}).get(name) or {})
    found = {**secrets.restored(recorded), **chosen}
    of_lists = {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
    settings: Tracker = registry.trackers()[name](**{**found, **of_lists})
    return settings


def require_package(name: str, word: str) -> None:
    """Raise ConfigError where the package of a tracker, asked for by `word`, is not installed."""
    if package := registry.trackers()[name].PACKAGE:
        require(word, package, extra=name)


def runs_in(folder: Path) -> list[RunPaths]:
    """Return the run of the folder, or those of a sweep's."""
    if RunPaths(folder).result.is_file() or not is_sweep(folder):
        return [RunPaths(folder)]
    with contextlib.suppress(FileNotFoundError):
        found = [RunPaths(path) for path in sorted(folder.iterdir())]
        return [paths for paths in found if paths.result.is_file()]
    return []


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
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is the command's to tell
        )
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
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, end + 0.5 - time.monotonic()))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # and the processes of its client
            self._process.wait()
        self._reader.join(1.0)
        for line in self._said:
            if line.startswith(AT):
                say(Console(), field(self._name, line.removeprefix(AT)))
        left = [line.removeprefix(LEFT) for line in self._said if line.startswith(LEFT)]
        if self._process.returncode or left:
            again = shlex.join([*program().split(), "send", shown_path(self._folder)])
            why = left[0] if left else "its process has died"
            warn(f"{self._name}: not all could be sent ({why}); the rest, once: {again}")


def _listen(has_ended: threading.Event) -> None:
    """Wait until the command has ended, and then end this process after the seconds it says."""
    words = sys.stdin.read()
    patience_s = float(words) if words.strip() else END_S
    has_ended.set()
    time.sleep(patience_s)  # the main thread ends this process, or waits for a server
    with contextlib.suppress(OSError):
        os.write(1, f"{LEFT}no answer in {patience_s:g} s\n".encode())
    os._exit(1)


def main(name: str, folder: Path) -> None:
    """Send until the command ends, and then the rest."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    has_ended, sender = threading.Event(), Sender(name)
    failures = 0
    threading.Thread(target=_listen, args=(has_ended,), daemon=True).start()
    if package := registry.trackers()[name].PACKAGE:
        with contextlib.suppress(ImportError):  # it takes seconds, before any run has a number
            importlib.import_module(package)
    while not has_ended.wait(min(POLL_S * 2**failures, MAX_WAIT_S)):
        try:
            sender.send(runs_in(folder))
            failures = 0
        except Exception as error:  # errors of these clients are of many classes
            failures += 1
            if failures == 1:
                warn(f"{name}: {in_a_line(error)}; runs train on, it is tried again")
    end = time.monotonic() + 3.0  # workers of a killed command may still be there
    while time.monotonic() < end and any(
        read_result(paths).get("status") == RUNNING and is_held(paths) for paths in runs_in(folder)
    ):
        time.sleep(0.1)
    left = ""
    try:
        sender.send(runs_in(folder), last=True)
        sender.end()
    except Exception as error:
        left = f"{LEFT}{in_a_line(error)}"
    print(*(f"{AT}{address}" for address in sender.addresses), left, sep="\n", flush=True)


if __name__ == "__main__":
    from setproctitle import setproctitle

    setproctitle(f"expt send {sys.argv[1]} {sys.argv[2]}")
    sys.stderr = sys.stdout  # for warnings; the reader drops lines of libraries
    main(sys.argv[1], Path(sys.argv[2]))
    os._exit(0)  # no atexit hook of a library is waited for
