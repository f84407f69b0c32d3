"""Decoded datasets as uncompressed .npy files, mapped into memory.

Their pages are shared by all workers and runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from expt.errors import ConfigError

if TYPE_CHECKING:  # it takes as long to import as Hydra, and many a run has no arrays in its driver
    import numpy as np
    from filelock import FileLock

LIMIT_GB = 50.0
_FORMAT = 2  # raise it when what is stored changes
_NEW = ".new-"


class Arrays(NamedTuple):
    """The samples of one split."""

    images: np.ndarray
    """uint8 [N, C, H, W]"""
    labels: np.ndarray
    """int64 [N]"""


class Entry(NamedTuple):
    """What the cache holds of one split."""

    path: Path
    num_bytes: int
    used_at: float
    """[seconds since the epoch]"""


def cache_dir() -> Path:
    """$EXPT_CACHE, else expt/ in $XDG_CACHE_HOME, else ~/.cache/expt. It need not exist."""
    if chosen := os.environ.get("EXPT_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "expt"
    try:
        return Path.home() / ".cache" / "expt"
    except (
        RuntimeError
    ):  # neither HOME nor an entry in passwd: a container's user that is a mere number
        return Path(tempfile.gettempdir()) / f"expt-cache-{os.getuid()}"


def limit_bytes() -> int:
    """Return how large the decoded datasets may be together: EXPT_CACHE_GB."""
    given = os.environ.get("EXPT_CACHE_GB", str(LIMIT_GB))
    try:
        return int(float(given) * 1e9)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"EXPT_CACHE_GB={given}: not a number; give the most that the cache may hold [GB]"
        ) from None


def decoded(label: str, sources: Sequence[Path], decode: Callable[[], Arrays]) -> Arrays:
    """Return what `decode()` makes of the files `sources`, kept until one of them changes.

    `label` begins the name of the entry. Where the cache cannot be written, `decode()` runs in
    memory at every call.
    """
    import numpy as np

    entry = _folder() / _name_of(label, sources)
    if (kept := _read(entry)) is not None:
        return kept
    arrays: Arrays | None = None
    # A read-only or full disk, or one without locks, costs time and memory but stops nobody.
    with contextlib.suppress(OSError, NotImplementedError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _lock(entry):
            if (kept := _read(entry)) is not None:
                return kept
            arrays = decode()
            with _new(entry) as beside:
                for part, array in zip(Arrays._fields, arrays, strict=True):
                    np.save(beside / f"{part}.npy", array)
        _make_room(entry)
        return _read(entry) or arrays
    return arrays or decode()


def read(name: str) -> Arrays | None:
    """Return the entry `name`, mapped into memory, if there is one."""
    return _read(_folder() / name)


def fill(
    name: str, labels: np.ndarray, shape: tuple[int, ...], write: Callable[[Path], None]
) -> None:
    """Create the entry `name` unless another process does.

    `write` gets a .npy file of len(labels) images of `shape`. An entry whose name is the same up to
    the last dot makes way. Raise OSError where it cannot be written: the room on the disk is taken
    before.
    """
    import numpy as np

    entry = _folder() / name
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _lock(entry):  # it may be held for minutes
        if _read(entry) is not None:
            return
        with _new(entry) as beside:
            np.save(beside / "labels.npy", labels)
            images = beside / "images.npy"
            np.lib.format.open_memmap(images, "w+", np.uint8, (len(labels), *shape)).flush()
            with images.open("r+b") as file:
                os.posix_fallocate(
                    file.fileno(), 0, images.stat().st_size
                )  # else a full disk ends the writer, SIGBUS
                write(images)
                os.fsync(file.fileno())
    _make_room(entry)


def entries() -> list[Entry]:
    """All that is there, what was used last first."""
    found = []
    for path in _folder().glob("[!.]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            size = sum(part.stat().st_size for part in path.iterdir())
            found.append(Entry(path, size, path.stat().st_mtime))
    return sorted(found, key=lambda entry: -entry.used_at)


def remove(path: Path) -> bool:
    """Remove an entry, unless it is being written; who has mapped it keeps it."""
    from filelock import Timeout

    with contextlib.suppress(Timeout, OSError), _lock(path, timeout=0):
        shutil.rmtree(path, ignore_errors=True)
        return True
    return False


def remove_left_over() -> None:
    """Remove what commands that were killed have left half written."""
    for path in _folder().glob(f"{_NEW}*"):
        remove(path)


def digest(words: Iterable[str]) -> str:
    """Return a key of what is made of `words`."""
    return hashlib.sha256(
        "\0".join((str(_FORMAT), *words)).encode(errors="surrogateescape")
    ).hexdigest()[:16]


def _folder() -> Path:
    return cache_dir() / "decoded"


def _name_of(label: str, sources: Sequence[Path]) -> str:
    stats = [path.stat() for path in sources]
    what = digest(str(number) for stat in stats for number in (stat.st_size, stat.st_mtime_ns))
    return f"{label}-{digest(str(path.resolve()) for path in sources)}.{what}"


def _lock(entry: Path, timeout: float = -1) -> FileLock:
    """Return the lock of all entries whose names are the same up to the last dot."""
    from filelock import FileLock  # late: for who writes

    return FileLock(entry.with_name(f".{_kind(entry)}.lock"), timeout=timeout)


def _kind(entry: Path) -> str:
    return entry.name.removeprefix(_NEW).rpartition(".")[0] or entry.name.removeprefix(_NEW)


def _make_room(kept: Path) -> None:
    """Keep within the limit: what was not used for longest goes first."""
    remove_left_over()
    found = entries()
    total = sum(entry.num_bytes for entry in found)
    for entry in reversed(found):
        if total <= limit_bytes():
            return
        if entry.path != kept and remove(entry.path):
            total -= entry.num_bytes


def _read(entry: Path) -> Arrays | None:
    import numpy as np

    try:
        # Copy-on-write: pages are shared until written, and torch takes the array without a
        # warning.
        arrays = Arrays(*(np.load(entry / f"{part}.npy", mmap_mode="c") for part in Arrays._fields))
    except (OSError, ValueError, EOFError):
        return None
    with contextlib.suppress(OSError):  # another's cache
        os.utime(entry)  # it was used
    return arrays


@contextlib.contextmanager
def _new(entry: Path) -> Iterator[Path]:
    """Yield a folder that becomes `entry` once it is filled without an error; hold its lock."""
    beside = entry.with_name(f"{_NEW}{entry.name}")
    shutil.rmtree(beside, ignore_errors=True)  # of one that was killed
    beside.mkdir()
    try:
        yield beside
        for old in [path for path in entry.parent.glob("[!.]*") if _kind(path) == _kind(entry)]:
            shutil.rmtree(old, ignore_errors=True)
        beside.rename(entry)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
