"""Under which name a dashboard knows a run, and what it has of it: a file in the run's folder, or a
sweep's.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import Any

from expt.runs.files import write_atomically
from expt.runs.paths import RunPaths


class Taken(Exception):
    """Another process is sending this run."""


class Cursor:
    """What `tracker` has of one run, or of one sweep; held by one process at a time, until `close`."""

    def __init__(self, folder: Path, tracker: str) -> None:
        """Raises Taken, and OSError where nothing can be written there."""
        self.folder, sent = folder, RunPaths(folder).sent
        sent.mkdir(exist_ok=True)
        self._path = sent / f"{tracker}.json"
        self._lock = _locked(sent / f"{tracker}.lock")
        try:
            self.state = self._read()
            self.key: str = self.state.setdefault("key", secrets.token_hex(4))
            """Under which the dashboard finds it again: written down before anything is created
            there.
            """
            self.save()
        except BaseException:
            self.close()
            raise

    def save(self) -> None:
        """Write the state down."""
        write_atomically(self._path, json.dumps(self.state, indent=1) + "\n")

    def close(self) -> None:
        """Let others in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock; None on a disk without locks. Raises Taken."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Taken(path) from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
