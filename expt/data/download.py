"""Fetch a dataset through torchvision, which knows its mirrors and checksums."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from expt.errors import DataError

_CONNECT_TIMEOUT_S = 10.0  # torchvision sets none, and would wait for minutes behind a firewall


def fetch(
    root: Path,
    construct: Callable[[Any, Path], Sequence[Any]],
    name: str,
    *,
    is_there: Callable[[], bool],
    pattern: str = "*",
) -> None:
    """Download the dataset `name` of torchvision into `root`, whole or not at all, once for all.

    `construct` gets its class and a folder beside; the files there that fit the `pattern` are moved
    into the root, as torchvision takes half of an unpacked archive for the whole. Raise DataError
    with the reason, in a few words.
    """
    from filelock import FileLock  # late: for a download

    lock = root / ".download.lock"
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if is_there():  # another run has fetched it meanwhile
                return
            beside = Path(tempfile.mkdtemp(prefix=".download-", dir=root))
            try:
                with _impatient(), contextlib.redirect_stdout(io.StringIO()):  # it prints mirrors
                    cls = getattr(importlib.import_module("torchvision.datasets"), name)
                    construct(cls, beside)
                for path in [path for path in beside.rglob(pattern) if path.is_file()]:
                    target = root / path.relative_to(beside)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(path, target)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
    except (OSError, RuntimeError, ImportError, ValueError) as error:
        raise DataError(" ".join(str(error).split()) or type(error).__name__) from error
    finally:
        with contextlib.suppress(OSError):  # up to the first that holds something
            lock.unlink()
            for folder in new:
                folder.rmdir()


@contextlib.contextmanager
def _impatient() -> Iterator[None]:
    """Give up on a server that does not answer."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_CONNECT_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
