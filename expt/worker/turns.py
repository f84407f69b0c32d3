"""Who goes first where a person's own dataset is constructed: it may download, which two must not
do at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from expt.data.cache import cache_dir, digest
from expt.training import collectives
from expt.training.collectives import Worker


@contextlib.contextmanager
def one_first(worker: Worker, target: str) -> Iterator[None]:
    """Let one worker of each machine construct the dataset `target` before the others do; a
    collective.

    It is alone among the first ones of other runs on the machine, too; the others then construct it
    side by side."""
    if worker.local_rank == 0:
        with _alone(lock_of(target)):
            yield
        collectives.wait_for_all(worker.device)
    else:
        collectives.wait_for_all(worker.device)
        yield


def lock_of(target: str) -> Path:
    """The file that is locked while the dataset `target` is constructed for the first time in a
    run.
    """
    return cache_dir() / "locks" / f"dataset-{digest([target])}.lock"


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    from filelock import FileLock  # late: of a dataset of one's own alone

    lock = FileLock(path)
    with contextlib.suppress(
        OSError, NotImplementedError
    ):  # a read-only disk, or one without locks
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
