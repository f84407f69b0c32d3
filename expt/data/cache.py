"""Decoded datasets as uncompressed .npy files, mapped into memory: their pages are shared by all workers and runs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock

_FORMAT = 1  # raise it when what is stored changes


class Arrays(NamedTuple):
    """The samples of one split."""

    images: np.ndarray
    """uint8 [N, C, H, W]"""
    labels: np.ndarray
    """int64 [N]"""


def cache_dir() -> Path:
    """$EXPT_CACHE, else expt/ in $XDG_CACHE_HOME, else ~/.cache/expt. It need not exist."""
    if chosen := os.environ.get("EXPT_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "expt"


def decoded(label: str, sources: Sequence[Path], decode: Callable[[], Arrays]) -> Arrays:
    """What `decode()` makes of the files `sources`, kept until one of them changes (path, size or time).

    `label` begins the name of the entry. Where the cache cannot be written, `decode()` runs in memory at every call.
    """
    folder = cache_dir() / "decoded"
    entry = folder / f"{label}-{_key(sources)}"
    if (kept := _read(entry)) is not None:
        return kept
    arrays: Arrays | None = None
    # A read-only or full disk, or one without locks, costs time and memory but stops nobody.
    with contextlib.suppress(OSError, NotImplementedError):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if (kept := _read(entry)) is not None:
                return kept
            arrays = decode()
            _write(entry, arrays)
        return _read(entry) or arrays
    return arrays or decode()


def read(name: str) -> Arrays | None:
    """The entry `name`, mapped into memory, if there is one."""
    return _read(cache_dir() / "decoded" / name)


def fill(name: str, labels: np.ndarray, shape: tuple[int, ...], write: Callable[[Path], None]) -> None:
    """Create the entry `name` unless another process does: `write` gets a .npy file of len(labels) images of `shape`.

    Raises OSError where it cannot be written: the room on the disk is taken before `write` is called.
    """
    entry = cache_dir() / "decoded" / name
    entry.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(entry.with_name(f".{name}.lock")):  # its own: it may be held for minutes
        if _read(entry) is not None:
            return
        with _new(entry) as beside:
            np.save(beside / "labels.npy", labels)
            images = beside / "images.npy"
            np.lib.format.open_memmap(images, "w+", np.uint8, (len(labels), *shape)).flush()
            with images.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, images.stat().st_size)  # else a full disk ends the writer, SIGBUS
                write(images)
                os.fsync(file.fileno())


def digest(words: Iterable[str]) -> str:
    """A key of an entry that holds what is made of `words`."""
    return hashlib.sha256("\0".join((str(_FORMAT), *words)).encode(errors="surrogateescape")).hexdigest()[:16]


def _key(sources: Sequence[Path]) -> str:
    stats = [(path.resolve(), path.stat()) for path in sources]
    return digest(str(word) for path, stat in stats for word in (path, stat.st_size, stat.st_mtime_ns))


def _read(entry: Path) -> Arrays | None:
    try:
        # Copy-on-write: pages are shared until written, and torch takes the array without a warning.
        return Arrays(*(np.load(entry / f"{part}.npy", mmap_mode="c") for part in Arrays._fields))
    except (OSError, ValueError, EOFError):
        return None


def _write(entry: Path, arrays: Arrays) -> None:
    with _new(entry) as beside:
        for part, array in zip(Arrays._fields, arrays, strict=True):
            np.save(beside / f"{part}.npy", array)


@contextlib.contextmanager
def _new(entry: Path) -> Iterator[Path]:
    """A folder that becomes `entry` once it is filled without an error."""
    beside = Path(tempfile.mkdtemp(prefix=".new-", dir=entry.parent))
    try:
        yield beside
        beside.chmod(0o755)
        shutil.rmtree(entry, ignore_errors=True)  # a damaged entry; a whole one would have been read
        beside.rename(entry)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
