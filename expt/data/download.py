"""Fetch a dataset through torchvision, which knows its mirrors and checksums."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from expt.errors import DataError

_CLASSES = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}
_CONNECT_TIMEOUT_S = 10.0  # torchvision sets none, and would wait for minutes behind a firewall


def fetch(name: str, root: Path) -> None:
    """Put the compressed files of dataset `name` under `root`, in torchvision's layout; the caller
    holds a lock.

    Raises DataError with the reason, in a few words.
    """
    try:
        beside = Path(tempfile.mkdtemp(prefix=".download-", dir=root))
        try:
            with (
                impatient(),
                contextlib.redirect_stdout(io.StringIO()),
            ):  # it prints each failed mirror
                getattr(importlib.import_module("torchvision.datasets"), _CLASSES[name])(
                    beside, download=True
                )
            _move(beside, root)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except (OSError, RuntimeError, ImportError) as error:
        raise DataError(" ".join(str(error).split())) from error


def _move(source: Path, root: Path) -> None:
    """Only the originals: their checksums were verified, and expt keeps its own decoded copy."""
    for path in source.rglob("*.gz"):
        target = root / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Give up on a server that does not answer."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_CONNECT_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
