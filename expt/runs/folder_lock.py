"""The lock of a run's folder: who writes there holds it, its workers too.

The system releases it when the last of them is gone: a worker that outlives its driver keeps other
commands out of its folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from expt.errors import ConfigError, FolderInUse
from expt.runs.paths import RunPaths

PATIENCE_S = 1.0
"""Wait for the workers of a command that has just been killed."""


class FolderLock:
    """The lock of one run's folder, held until `release`."""

    def __init__(self, paths: RunPaths, patience_s: float | None = None) -> None:
        """Raises FolderInUse where another holds it, ConfigError where there can be no such folder."""
        self._paths = paths
        deadline = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        try:
            paths.folder.mkdir(parents=True, exist_ok=True)
            while (descriptor := self._try()) is None:
                if time.monotonic() > deadline:
                    raise FolderInUse(
                        f"hydra.run.dir={paths.folder}: another command is at work there; wait"
                        " for it"
                    )
                time.sleep(0.02)
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir={paths.folder}: {error.strerror}; choose another folder"
            ) from error
        self.descriptor = descriptor
        """The lock is held as long as a process has it open."""

    def release(self) -> None:
        """Release the lock."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)

    def _try(self) -> int | None:
        descriptor = os.open(self._paths.lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(self._paths.lock)):
                return descriptor
        except (
            BlockingIOError,
            FileNotFoundError,
        ):  # held; or removed by its last holder, and so not the folder's
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None


@contextlib.contextmanager
def at_work(paths: RunPaths) -> Iterator[FolderLock]:
    """Keep other commands out of the run's folder. Raises as FolderLock does."""
    lock = FolderLock(paths)
    try:
        yield lock
    finally:
        lock.release()


def is_held(paths: RunPaths) -> bool:
    """Return whether a process of this machine is, or may be, at work in the run's folder."""
    try:
        descriptor = os.open(paths.lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or a disk without locks
        return True
    finally:
        os.close(descriptor)
    return False
