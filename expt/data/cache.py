"""Keep decoded datasets, downloads, and checksums of files on disk.

Decoded datasets are uncompressed .npy files, whose pages all workers and runs share.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import json
import os
import random
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

from expt.errors import ConfigError, DataError, collected
from expt.late import np

if TYPE_CHECKING:
    from filelock import FileLock

Made = TypeVar("Made")
LIMIT_GB = 50.0
"""The size of all decoded datasets together, without EXPT_CACHE_GB."""
_FORMAT = 2  # raise it when the format of entries changes
_NEW = ".new-"


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


def decoded(
    label: str, sources: Sequence[Path], decode: Callable[[], Arrays], kept: str = "known"
) -> Arrays:
    """Return the arrays that `decode()` makes of the files `sources`, from the cache.

    `label` begins the name of the entry, and the files' checksums are `kept` by that name. Where
    the cache cannot be written, `decode()` runs in memory at every call.
    """
    content = of_content(sources, kept)
    name = f"{label}-{digest(str(path.resolve()) for path in sources)}.{content}"

    def write(folder: Path) -> None:
        for part, array in zip(Arrays._fields, decode(), strict=True):
            np.save(folder / f"{part}.npy", array)

    def read(folder: Path) -> Arrays:
        # Copy-on-write: pages are shared until written, and torch takes the array without warning.
        parts = (np.load(folder / f"{part}.npy", mmap_mode="c") for part in Arrays._fields)
        return Arrays(*parts)

    return filled(name, write, read) or decode()


def filled(name: str, write: Callable[[Path], object], read: Callable[[Path], Made]) -> Made | None:
    """Return the result of `read` on the entry `name`, which `write` fills if it is not there.

    A read-only or full disk, or one without locks, costs time and memory but stops nobody.
    """
    if (found := used(name, read)) is None:
        with contextlib.suppress(OSError, NotImplementedError):
            fill(name, write, read)
        found = used(name, read)
    return found


def used(name: str, read: Callable[[Path], Made]) -> Made | None:
    """Return the result of `read` on the entry `name`, if there is one that is whole."""
    found = _whole(entry := _folder() / name, read)
    with contextlib.suppress(OSError):  # another's cache
        os.utime(entry)  # it was used
    return found


def _whole(entry: Path, read: Callable[[Path], Made]) -> Made | None:
    with contextlib.suppress(OSError, ValueError, EOFError, KeyError):
        return read(entry)
    return None


def fill(name: str, write: Callable[[Path], object], read: Callable[[Path], object]) -> None:
    """Let `write` fill the folder of the entry `name`, unless `read` returns one that is whole.

    An entry whose name is the same up to the last dot makes way. Raise OSError where it cannot be
    written.
    """
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
            for old in [path for path in entry.parent.glob("[!.]*") if _kind(path) == _kind(entry)]:
                shutil.rmtree(old, ignore_errors=True)
            beside.rename(entry)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    _make_room(entry)


class Rows:
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


def new_rows(folder: Path, number: int, shape: tuple[int, ...]) -> Rows:
    """Write files for `number` images of `shape` into a folder of `fill`.

    The room on the disk is taken before: a full disk would end a writer by SIGBUS.
    """
    np.save(folder / "sums.npy", np.zeros(number, np.uint32))
    images = folder / "images.npy"
    np.lib.format.open_memmap(images, "w+", np.uint8, (number, *shape)).flush()
    with images.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, images.stat().st_size)
    return Rows(folder)


def entries() -> list[Entry]:
    """Return all entries, the last used first."""
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
    """Remove entries that killed commands have left half written."""
    for path in _folder().glob(f"{_NEW}*"):
        remove(path)


def digest(words: Iterable[str]) -> str:
    """Return a digest of `words`."""
    return hashlib.sha256(
        "\0".join((str(_FORMAT), *words)).encode(errors="surrogateescape")
    ).hexdigest()[:16]


def _folder() -> Path:
    return cache_dir() / "decoded"


def state_of(path: str | Path) -> list[int]:
    """Return the size of a file, and its times and place on the disk, to see whether it changes.

    A copy that keeps the times of its source has another change time, which only the system sets.
    """
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns]


def _lock(entry: Path, timeout: float = -1) -> FileLock:
    """Return the lock of all entries whose names are the same up to the last dot."""
    from filelock import FileLock  # late: for who writes

    return FileLock(entry.with_name(f".{_kind(entry)}.lock"), timeout=timeout)


def _kind(entry: Path) -> str:
    return entry.name.removeprefix(_NEW).rpartition(".")[0] or entry.name.removeprefix(_NEW)


def _make_room(kept: Path) -> None:
    """Keep within the limit: the entries that were not used for longest go first."""
    remove_left_over()
    found = entries()
    total = sum(entry.num_bytes for entry in found)
    for entry in reversed(found):
        if total <= limit_bytes():
            return
        if entry.path != kept and remove(entry.path):
            total -= entry.num_bytes


SAMPLED = 20_000
"""Files of a folder that are read; of a larger one this many, the names and sizes of all."""


def sampled(names: Sequence[str]) -> Sequence[str]:
    """Return the files that are read, drawn by names only: the same on every machine."""
    few = len(names) <= SAMPLED
    return names if few else random.Random(digest(names)).sample(names, SAMPLED)


def of_files(root: Path, names: Sequence[str]) -> str:
    """Return a digest of files by their paths below `root`.

    It is one of their names, sizes and contents; of very many files the contents of some.
    """
    start = os.path.join(root, "")  # joined by Path, very many take seconds
    with Checksums.below(root) as checksums:
        read = sampled(names)
        found = collected(lambda name: checksums.of(start + name), read)
    sums = dict(zip(read, found, strict=True))
    about = ((name, str(os.stat(start + name).st_size), sums.get(name, "")) for name in names)
    return digest(itertools.chain.from_iterable(about))


def of_content(paths: Iterable[Path], kept: str = "known") -> str:
    """Return a digest of the content of files, whose checksums are `kept` by that name."""
    with Checksums(kept) as checksums:
        return digest(collected(checksums.of, paths))


class Checksums:
    """Checksums of files on disk, by path, size and times, and notes on such contents.

    The only place that takes a file for unchanged. Where they cannot be kept, each file is read
    every time.
    """

    def __init__(self, name: str) -> None:
        self._path = cache_dir() / "checksums" / f"{name}.json"
        self._known: dict[str, str] = {}  # no lists, which Python's garbage collector would visit
        self._changed = False

    @classmethod
    def below(cls, root: Path) -> Checksums:
        """Return those of the files below a folder."""
        return cls(f"folder-{digest([str(root.resolve())])}")

    def __enter__(self) -> Checksums:
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(self._path.read_text(encoding="utf-8"))
            known = known.items() if isinstance(known, dict) else ()
            self._known = {key: text for key, text in known if isinstance(text, str)}
        return self

    def __exit__(self, *_: object) -> None:
        if self._changed:
            beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                beside.write_text(json.dumps(self._known), encoding="utf-8")
                beside.replace(self._path)

    def of(self, path: str | Path) -> str:
        """Return the MD5 of a file, decompressed if its name ends in .gz; it is read once."""
        try:
            state = state_of(path)
            if (kept := self.known(path)) is not None:
                return kept
            opens: Any = gzip.open if str(path).endswith(".gz") else open
            with opens(path, "rb") as file:
                found = md5(file)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path} is damaged or cannot be read ({error}); fix or replace it"
            ) from error
        self.note(key_of(path), f"{state}|{found}")
        return found

    def known(self, path: str | Path) -> str | None:
        """Return the MD5 of a file that was read before, and is unchanged."""
        state, _, kept = self._known.get(key_of(path), "").partition("|")
        return kept if state == str(state_of(path)) else None

    def refuse_changed(self, path: str | Path) -> None:
        """Raise DataError for a file that holds something else than when it was read before."""
        state, _, before = self._known.get(key_of(path), "").partition("|")
        if before and state != str(state_of(path)) and self.of(path) != before:
            raise DataError(f"{path} has changed since the run began; put it back")

    def noted(self, key: str) -> str | None:
        """Return the note under a key, which names contents by their MD5."""
        return self._known.get(key)

    def note(self, key: str, text: str) -> None:
        """Note a text."""
        self._known[key], self._changed = text, True


def key_of(path: str | Path) -> str:
    """Return the key of a file's checksum."""
    return f"{os.path.abspath(path)} "


def md5(file: IO[bytes] | gzip.GzipFile) -> str:
    """Return the MD5 of a stream."""
    found = hashlib.md5(usedforsecurity=False)
    while block := file.read(1 << 20):
        found.update(block)
    return found.hexdigest()
