"""Which GPUs of a machine are in use, agreed among all expt commands on it."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout


class GpuLocks:
    """A file lock for each GPU in use: two commands on a machine don't take the same; it ends with
    its holder.

    `uuid_of` a device is what all commands call it, whatever number it has in each.
    """

    def __init__(self, uuid_of: Callable[[str], str] = str) -> None:
        self._uuid_of = functools.cache(uuid_of)
        self._folder = Path(os.environ.get("EXPT_LOCKS", Path(tempfile.gettempdir()) / "expt-gpus"))
        self._held: dict[str, FileLock] = {}

    def acquire(self, devices: Sequence[str]) -> list[str]:
        """Lock all of `devices`, or none; returns those that another command holds."""
        new = [device for device in devices if device not in self._held]
        missed = [device for device in new if not self._try(device)]
        if missed:
            self.release([device for device in new if device not in missed])
        return missed

    def release(self, devices: Sequence[str]) -> None:
        """Let other commands have `devices`."""
        for device in devices:
            self._held.pop(device).release()

    def _try(self, device: str) -> bool:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._uuid_of(device)}.lock"
        lock = FileLock(path, timeout=0)
        try:
            lock.acquire()
            for ours in (self._folder, path):
                with contextlib.suppress(PermissionError):
                    ours.chmod(0o777)  # other people's commands on this machine take part
        except Timeout:
            return False
        self._held[device] = lock
        return True
