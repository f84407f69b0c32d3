"""Decoded datasets on disk: uncompressed .npy files, whose pages all workers and runs share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from expt.errors import ConfigError
from expt.late import np

if TYPE_CHECKING:
    from filelock import FileLock

Made = TypeVar("Made")
LIMIT_GB = 50.0
"""The size of all decoded datasets together, without EXPT_CACHE_GB."""
_FORMAT = 3  # raise it when the format of entries or a rule on columns changes
_NEW = ".new-"
_NAME = re.compile(r".+-[0-9a-f]+\.[0-9a-f]+")
"""The name of an entry: a folder of another name is a person's."""


class Arrays(NamedTuple):
    """The samples of one split."""

    images: np.ndarray
    """uint8 [N, C, H, W]"""
    labels: np.ndarray
    """int64 [N]"""


class Entry(NamedTuple):
    """The files of one split in the cache."""

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
    except RuntimeError:  # neither HOME nor passwd know a container's user, a mere number
        return Path(tempfile.gettempdir()) / f"expt-cache-{os.getuid()}"


def limit_bytes() -> int:
    """Return the largest size of all decoded datasets together, by EXPT_CACHE_GB."""
    given = os.environ.get("EXPT_CACHE_GB", str(LIMIT_GB))
    try:
        return int(float(given) * 1e9)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"EXPT_CACHE_GB={given}: not a number; give the most that the cache may hold [GB]"
        ) from None


def digest(words: Iterable[str]) -> str:
    """Return a digest of `words`."""
    return hashlib.sha256(
        "\0".join((str(_FORMAT), *words)).encode(errors="surrogateescape")
    ).hexdigest()[:16]


def decoded(
    label: str, sources: Iterable[Path], content: str, decode: Callable[[], Arrays]
) -> Arrays:
    """Return the arrays that `decode()` makes of the files `sources`, from the cache.

    `label` begins the name of the entry, and the digest of the files' `content` ends it. Where the
    cache cannot be written, `decode()` runs in memory at every call.
    """
    name = f"{label}-{digest(str(path.resolve()) for path in sources)}.{content}"

    def write(folder: Path) -> None:
        for part, array in zip(Arrays._fields, decode(), strict=True):
            np.save(folder / f"{part}.npy", array)

    def read(folder: Path) -> Arrays:
        # Copy-on-write: pages are shared until written, and torch takes the array without warning.
        parts = (np.load(folder / f"{part}.npy", mmap_mode="c") for part in Arrays._fields)
        return Arrays(*parts)

    return read_or_fill(name, write, read) or decode()


def _folder() -> Path:
    return cache_dir() / "decoded"


def read_or_fill(
    name: str, write: Callable[[Path], object], read: Callable[[Path], Made]
) -> Made | None:
    """Return the result of `read` on the entry `name`, which `write` fills if it is not there.

    A read-only or full disk, or one without locks, costs time and memory but stops nobody.
    """
    if (found := read_entry(name, read)) is None:
        with contextlib.suppress(OSError, NotImplementedError):
            fill_entry(name, write, read)
        found = read_entry(name, read)
    return found


def read_entry(name: str, read: Callable[[Path], Made]) -> Made | None:
    """Return the result of `read` on the entry `name`, if there is one that is whole."""
    entry = _folder() / name
    found = _whole(entry, read)
    with contextlib.suppress(OSError):  # another's cache
        os.utime(entry)  # it was used
    return found


def _whole(entry: Path, read: Callable[[Path], Made]) -> Made | None:
    with contextlib.suppress(OSError, ValueError, EOFError, KeyError):
        return read(entry)
    return None


def fill_entry(name: str, write: Callable[[Path], object], read: Callable[[Path], object]) -> None:
    """Let `write` fill the folder of the entry `name`, unless `read` returns one that is whole.

    An entry whose name is the same up to the last dot makes way. Raise OSError where it cannot be
    written.
    """
    limit = limit_bytes()  # before work of minutes
    entry = _folder() / name
    beside = entry.with_name(f"{_NEW}{name}")
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _lock(entry):  # it may be held for minutes
        if _whole(entry, read) is not None:
            return
        shutil.rmtree(beside, ignore_errors=True)  # of one that was killed
        beside.mkdir()
        try:
            write(beside)
            for old in [*entry.parent.glob("[!.]*")]:
                if _kind(old) == _kind(entry):
                    shutil.rmtree(old, ignore_errors=True)
            beside.rename(entry)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    _make_room(entry, limit)


def _lock(entry: Path, timeout: float = -1) -> FileLock:
    """Return the lock of all entries whose names are the same up to the last dot."""
    from filelock import FileLock  # late: for who writes

    return FileLock(entry.with_name(f".{_kind(entry)}.lock"), timeout=timeout)


def _kind(entry: Path) -> str:
    """Return the name of an entry, or of its new folder, up to the last dot."""
    name = entry.name.removeprefix(_NEW)
    return name.rpartition(".")[0] or name


def _make_room(kept: Path, limit: int) -> None:
    """Keep within the limit: the entries that were not used for longest go first."""
    remove_left_over()
    found = entries()
    total = sum(entry.num_bytes for entry in found)
    for entry in reversed(found):
        if total <= limit:
            return
        if entry.path != kept and remove(entry.path):
            total -= entry.num_bytes


def entries() -> list[Entry]:
    """Return all entries, the last used first."""
    found = []
    for path in filter(lambda path: _NAME.fullmatch(path.name), _folder().glob("[!.]*")):
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
    """Remove entries that killed commands have left half written."""
    for path in _folder().glob(f"{_NEW}*"):
        remove(path)


class CachedImages:
    """Images of an entry that come one by one, from all processes that read them, mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        mode: Any = "c" if self.are_whole else "r+"
        self.images = np.load(folder / "images.npy", mmap_mode=mode)
        """uint8 [N, C, H, W]"""
        self._sums = np.load(folder / "sums.npy", mmap_mode=mode)
        """uint32 [N]: the checksum of each image that is there, else 0"""

    @property
    def are_whole(self) -> bool:
        """True once all were there, and written to the disk."""
        return (self.folder / "whole").exists()

    def has(self, row: int) -> bool:
        """Return whether the image is there: its writer may have been killed, or the machine."""
        found = int(self._sums[row])
        return found != 0 and found == (zlib.crc32(self.images[row].data) or 1)

    def put(self, row: int, image: np.ndarray) -> None:
        """Write an image, and then its checksum; another process would write the same."""
        self.images[row] = image
        self._sums[row] = zlib.crc32(image.data) or 1

    def seal(self) -> None:
        """Note that all are there, if they are."""
        if not self.are_whole and all(map(self.has, range(len(self._sums)))):
            self.images.flush()
            (self.folder / "whole").touch()


def new_images(folder: Path, number: int, shape: tuple[int, ...]) -> CachedImages:
    """Write files for `number` images of `shape` into a folder of `fill_entry`.

    The room on the disk is taken before: a full disk would end a writer by SIGBUS.
    """
    np.save(folder / "sums.npy", np.zeros(number, np.uint32))
    images = folder / "images.npy"
    np.lib.format.open_memmap(images, "w+", np.uint8, (number, *shape)).flush()
    with images.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, images.stat().st_size)
    return CachedImages(folder)
