"""One memory of what files hold: each is read once, and known again by its size and times."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import random
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from expt.data.cache import cache_dir, digest
from expt.errors import DataError

SAMPLED = 20_000
"""Files of a folder that are read; of a larger one this many, the names and sizes of all."""


def of_files(root: Path, names: Sequence[str]) -> str:
    """Return a digest of files by their paths below `root`.

    It is one of their names, sizes and contents; of very many files the contents of some.
    """
    # Drawn by names only: the same files on every machine.
    chosen = names if len(names) <= SAMPLED else random.Random(digest(names)).sample(names, SAMPLED)
    with Checksums(f"folder-{digest([str(root.resolve())])}") as checksums:
        sums = {name: checksums.of(root / name) for name in chosen}
    words = (
        word
        for name in names
        for word in (name, str((root / name).stat().st_size), sums.get(name, ""))
    )
    return digest(words)


class Checksums:
    """Checksums on disk, by path, size and times.

    Where they cannot be kept, each file is read every time.
    """

    def __init__(self, name: str) -> None:
        self._path = cache_dir() / "checksums" / f"{name}.json"
        self._known: dict[str, list[int | str]] = {}
        self._changed = False

    def __enter__(self) -> Checksums:
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(self._path.read_text(encoding="utf-8"))
            self._known = known if isinstance(known, dict) else {}
        return self

    def __exit__(self, *_: object) -> None:
        if self._changed:
            beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                beside.write_text(json.dumps(self._known), encoding="utf-8")
                beside.replace(self._path)

    def of(self, path: Path) -> str:
        """Return the MD5 of a file, decompressed if its name ends in .gz."""

        def read() -> str:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                return md5(file)

        return self.once(path, "", read)

    def once(self, path: Path, what: str, read: Callable[[], str]) -> str:
        """Return what `read` has made of a file, which is called again if the file has changed."""
        try:
            stat, key = path.stat(), f"{path.resolve()} {what}"
            # Only the system sets the last: a copy that keeps the times of its source has another.
            state = [stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns]
            kept = self._known.get(key)
            if isinstance(kept, list) and kept[:-1] == state:
                return str(kept[-1])
            found = read()
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            raise DataError(f"{path} cannot be read ({error}); fix or replace it") from error
        self._known[key], self._changed = [*state, found], True
        return found


def md5(file: IO[bytes] | gzip.GzipFile) -> str:
    """Return the MD5 of a stream."""
    found = hashlib.md5(usedforsecurity=False)
    while block := file.read(1 << 20):
        found.update(block)
    return found.hexdigest()
