"""Checksums of files on disk, which are kept, and digests of a dataset's files by them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import json
import os
import random
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from expt.data.cache import cache_dir, digest
from expt.errors import DataError, collected

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


def state_of(path: str | Path) -> list[int]:
    """Return the size of a file, and its times and place on the disk, to see whether it changes.

    A copy that keeps the times of its source has another change time, which only the system sets.
    """
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns]


def md5(file: IO[bytes] | gzip.GzipFile) -> str:
    """Return the MD5 of a stream."""
    found = hashlib.md5(usedforsecurity=False)
    while block := file.read(1 << 20):
        found.update(block)
    return found.hexdigest()


class Checksums:
    """Checksums of files on disk, by path, size and times, and notes on such contents.

    The only place that takes a file for unchanged. Where they cannot be kept, each file is read
    every time.
    """

    def __init__(self, name: str) -> None:
        self._path = cache_dir() / "checksums" / f"{name}.json"
        self._notes: dict[str, str] = {}  # no lists, which Python's garbage collector would visit
        self._has_changed = False

    @classmethod
    def below(cls, root: Path) -> Checksums:
        """Return those of the files below a folder."""
        return cls(f"folder-{digest([str(root.resolve())])}")

    def __enter__(self) -> Checksums:
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(kept, dict):
                self._notes = {key: text for key, text in kept.items() if isinstance(text, str)}
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_changed:
            beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                beside.write_text(json.dumps(self._notes), encoding="utf-8")
                beside.replace(self._path)

    def of(self, path: str | Path) -> str:
        """Return the MD5 of a file, decompressed if its name ends in .gz; it is read once."""
        try:
            state, (then, last) = state_of(path), self._last(path)
            if then == str(state):
                return last
            opens: Any = gzip.open if str(path).endswith(".gz") else open
            with opens(path, "rb") as file:
                found = md5(file)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path} is damaged or cannot be read ({error}); fix or replace it"
            ) from error
        self.put(_key_of(path), f"{state}|{found}")
        return found

    def of_unchanged(self, path: str | Path) -> str | None:
        """Return the MD5 of a file that was read before, and is unchanged."""
        state, last = self._last(path)
        return last if state == str(state_of(path)) else None

    def last_of(self, path: str | Path) -> str:
        """Return the MD5 that a file had when it was read last; "" if it never was."""
        return self._last(path)[1]

    def _last(self, path: str | Path) -> tuple[str, str]:
        """Return the state and the MD5 of a file when it was read; empty if it never was."""
        state, _, found = self._notes.get(_key_of(path), "").partition("|")
        return state, found

    def refuse_changed(self, path: str | Path) -> None:
        """Raise DataError for a file that holds something else than when it was read before."""
        state, last = self._last(path)
        if last and self.of(path) != last:
            self.put(_key_of(path), f"{state}|{last}")  # it is refused again
            raise DataError(f"{path} has changed since the run began; put it back")

    def get(self, key: str) -> str | None:
        """Return the note under a key, which names contents by their MD5."""
        return self._notes.get(key)

    def put(self, key: str, text: str) -> None:
        """Note a text."""
        self._notes[key], self._has_changed = text, True


def _key_of(path: str | Path) -> str:
    """Return the key of a file's checksum; it ends in a blank, as no key of another note does."""
    return f"{os.path.abspath(path)} "
