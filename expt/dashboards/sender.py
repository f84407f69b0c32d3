"""The reader of run folders that sends them to one dashboard, each point once.

It runs next to a command as `python -m expt.dashboards.sender NAME FOLDER`, and ends with it: see
expt.dashboards.sending. `expt send` uses the same `Sender` afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import secrets as tokens
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock, Timeout

from expt import registry
from expt.config import secrets
from expt.dashboards.sending import AT, LEFT
from expt.dashboards.snapshot import Snapshot, snapshot, with_epochs
from expt.dashboards.trackers import Copy, Tracker, in_a_line
from expt.errors import warn
from expt.runs.checkpoint_file import stamp
from expt.runs.metrics_file import MetricsReader
from expt.runs.paths import RunPaths, is_held, is_sweep, write_atomically
from expt.runs.result import COMPLETED, FAILED, RUNNING, read_result

POLL_S, MAX_WAIT_S = 1.0, 60.0
"""Seconds between two looks at the folders; at most, where the dashboard can't be reached."""
END_S = 10.0
"""Seconds for the rest, if the command was killed and could not say how long."""
NICENESS = 10
"""The niceness of its process: workers come first."""


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


class _Run:
    """A run that this process sends, and no other."""

    def __init__(self, paths: RunPaths, name: str) -> None:
        """Raise Timeout where another process sends it to the dashboard `name`, and OSError."""
        self._paths, self.sent = paths, _Sent(paths.folder, name)
        self.copy: Copy | None = None
        """The copy of a run that is under way, once it is made."""
        self._reader: MetricsReader | None = None

    def send(self, found: Snapshot, copy: Copy) -> None:
        """Send points that are new to its copy, and the end of a run that has ended."""
        if self._reader is None or found.has_ended:  # all of it: the dashboard has a part
            copy.describe(found)
            self._reader = MetricsReader(self._paths)
        copy.add([*with_epochs(self._reader.read())], time.time())
        if found.has_ended:
            file = found.paths.result.name
            records = found.sweep.glob(f"*/{file}") if found.sweep else ()
            others = {_status(record, stamp(record)) for record in records}
            status = COMPLETED if others <= {COMPLETED} else FAILED
            self.copy = None  # there is nothing to leave
            copy.end(found, RUNNING if RUNNING in others else status)

    def close(self) -> None:
        """Leave the copy, and let other processes send the run."""
        try:
            if self.copy is not None:
                self.copy.leave()
        finally:
            self.sent.close()


class Sender:
    """A sender of runs to the dashboard `name`, by `settings`, or else by their recorded ones."""

    def __init__(self, name: str, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._name, self._settings = name, settings
        self._runs: dict[Path, _Run] = {}
        self._ended: dict[Path, tuple[int, int]] = {}
        """The stamp of the record of each run that was sent to its end."""
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
            try:
                self.num_sent += self._send(paths, last=last)
            except Timeout:
                if last:
                    warn(f"{paths.folder}: another command is sending it to {self._name}")
            except Exception as error:
                with contextlib.suppress(Exception):  # of the same dashboard
                    self._close(paths)
                if not isinstance(error, FileNotFoundError) or paths.folder.exists():
                    failed = failed or error
        if failed is not None:  # not before the others had their turn
            raise failed

    def _send(self, paths: RunPaths, *, last: bool) -> bool:
        at = stamp(paths.result)
        if self._ended.get(paths.folder) == at:
            return False
        found = snapshot(paths, even_lost=last)
        if found is None or not (last or paths.has_trained()):
            return False
        settings = settings_of(found, self._name, self._settings)
        digest = found.digest(checkpoints=settings.checkpoints)
        run = self._runs.get(paths.folder) or _Run(paths, self._name)
        self._runs[paths.folder] = run
        is_new = run.sent.state.get("sent") != digest
        if is_new:
            run.copy = run.copy or settings.copy(found, run.sent.state, self._key_of)
            self.addresses[run.copy.address] = None
            run.send(found, run.copy)
            run.sent.state["sent"] = digest
            run.sent.save()
        if found.has_ended:
            self._ended[paths.folder] = at
            self._close(paths)
        return is_new

    def _close(self, paths: RunPaths) -> None:
        if run := self._runs.pop(paths.folder, None):
            run.close()

    def _key_of(self, sweep: Path) -> str:
        if sweep not in self._sweeps:
            self._sweeps[sweep] = _Sent(sweep, self._name)
        return str(self._sweeps[sweep].state["key"])

    def end(self) -> None:
        """Let go of all. Raises the errors of the dashboard's client."""
        with contextlib.ExitStack() as stack:
            for sweep in self._sweeps.values():
                stack.callback(sweep.close)
            for run in self._runs.values():
                stack.callback(run.close)


@functools.cache
def _status(record: Path, at: tuple[int, int]) -> str | None:
    """Return the status in a run's record, which has the stamp `at`."""
    return read_result(RunPaths(record.parent)).get("status")


def settings_of(run: Snapshot, name: str, chosen: Mapping[str, Any]) -> Tracker:
    """Return how a run is sent: as it was `chosen`, else as its configuration says.

    Raise ConfigError for a variable that is not set.
    """
    recorded: dict[str, Any] = dict((run.record.get("config") or {}).get(name) or {})
    found = {**secrets.restored(recorded), **chosen}
    of_lists = {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
    settings: Tracker = registry.trackers()[name](**{**found, **of_lists})
    return settings


def runs_in(folder: Path) -> list[RunPaths]:
    """Return the run of the folder, or those of a sweep's."""
    if RunPaths(folder).result.is_file() or not is_sweep(folder):
        return [RunPaths(folder)]
    with contextlib.suppress(FileNotFoundError):
        found = [RunPaths(path) for path in sorted(folder.iterdir())]
        return [paths for paths in found if paths.result.is_file()]
    return []


def _heed_end(has_ended: threading.Event) -> None:
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
    threading.Thread(target=_heed_end, args=(has_ended,), daemon=True).start()
    if package := registry.trackers()[name].PACKAGE:
        with contextlib.suppress(ImportError):  # it takes seconds, before any run has a number
            importlib.import_module(package)
    while not has_ended.wait(min(POLL_S * 2.0 ** min(failures, 20), MAX_WAIT_S)):
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
