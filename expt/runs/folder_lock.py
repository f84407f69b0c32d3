"""The lock of a run's folder: whoever writes there holds it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from expt.errors import ConfigError
from expt.runs.paths import RunPaths


@contextlib.contextmanager
def at_work(paths: RunPaths) -> Iterator[None]:
    """Keep other commands out of the run's folder. Raises ConfigError where one is at work there already."""
    from filelock import FileLock, Timeout

    lock = FileLock(paths.lock, timeout=0)
    try:
        paths.folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ConfigError(f"hydra.run.dir={paths.folder}: another command is at work there; wait for it") from None
    except OSError as error:
        raise ConfigError(f"hydra.run.dir={paths.folder}: {error.strerror}; choose another folder") from error
    try:
        yield
    finally:
        lock.release()
