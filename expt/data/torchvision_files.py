"""The files of torchvision's datasets: where they lie, and how they get there, once for all
workers. Free of torch.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from expt.config.datasets import Torchvision
from expt.data.cache import cache_dir
from expt.data.download import impatient
from expt.data.folders import walked
from expt.data.torchvision_kinds import kind_of
from expt.errors import DataError

_PACKED = (
    ".zip",
    ".tar",
    ".tgz",
    ".gz",
)  # what was unpacked counts, and not whether its archive is kept


def root_of(dataset: Torchvision) -> Path:
    """The folder that the dataset's files lie in, or will, as torchvision lays them out."""
    return Path(dataset.root) if dataset.root is not None else cache_dir() / "data"


def missing(dataset: Torchvision) -> list[Path]:
    """What is not there of the dataset's files and folders."""
    return [
        path for name in kind_of(dataset).paths if not (path := root_of(dataset) / name).exists()
    ]


def files(dataset: Torchvision) -> list[str]:
    """The dataset's files by their paths below the root, sorted; without the archives that they
    came from.
    """
    root, found = root_of(dataset), list[str]()
    for name in kind_of(dataset).paths:
        if not (root / name).is_dir():
            found.append(name)
            continue
        for where, _, names in walked(root / name):
            inside = [os.path.relpath(os.path.join(where, each), root) for each in names]
            found += [each for each in inside if not each.lower().endswith(_PACKED)]
    return sorted(found)


def obtain(dataset: Torchvision) -> None:
    """Have torchvision download what is missing, under a lock; whole, or not at all.

    Raises DataError that names the folder, where the files are not there and cannot be had.
    """
    if not missing(dataset):
        return
    if unfetched := kind_of(dataset).unfetched:
        raise _absent(dataset, f", and {unfetched}")
    if not dataset.download:
        raise _absent(dataset, ", and dataset.download is false")
    from filelock import FileLock  # late: for a download

    root = root_of(dataset)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".download.lock"):
            if missing(dataset):  # another run may have done so meanwhile
                _fetch(dataset, root)
    except (OSError, RuntimeError, ImportError, ValueError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise _absent(dataset, f", and the download failed ({why})") from error
    finally:
        with contextlib.suppress(OSError):
            (root / ".download.lock").unlink()
        with contextlib.suppress(OSError):  # if the folder is empty
            root.rmdir()


def _fetch(dataset: Torchvision, root: Path) -> None:
    """Beside, and then in its place: torchvision takes half of an unpacked archive for the whole."""
    kind, beside = kind_of(dataset), Path(tempfile.mkdtemp(prefix=".download-", dir=root))
    try:
        cls: Any = getattr(importlib.import_module("torchvision.datasets"), dataset.set)
        with impatient(), contextlib.redirect_stdout(io.StringIO()):  # it prints each mirror
            for how in kind.parts.values():
                cls(str(beside), download=True, **(how or {}))
        for name in kind.paths:
            if not (root / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(beside / name, root / name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _absent(dataset: Torchvision, why: str) -> DataError:
    names, root = ", ".join(path.name for path in missing(dataset)), root_of(dataset)
    return DataError(
        f"dataset.set={dataset.set}: {names} not found in {root}{why}; put there what"
        f" torchvision.datasets.{dataset.set} unpacks on a machine with a network, or give"
        " dataset.root=FOLDER that has it"
    )
