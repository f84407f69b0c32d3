"""What a dataset's files hold, in a few digits: the same on another machine, another for other
files. Free of torch.

A dataset of the same name and folder may be another one: the files of MNIST and Fashion-MNIST have
the same names, and images in a folder are overwritten. A file is read once: what it held is
remembered by its size and time."""

from __future__ import annotations

import contextlib
import functools
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

from expt.config import datasets, user_code
from expt.config.identity import Content
from expt.config.schema import RunConfig
from expt.data import (
    files,
    huggingface_files,
    image_folder_files,
    mask_files,
    table,
    text_files,
    torchvision_files,
)
from expt.data.cache import cache_dir, digest
from expt.data.image_folder_files import class_folders, images_of_all_splits
from expt.errors import ConfigError, DataError, RunFailed, warn
from expt.runs import continuing
from expt.runs.named_checkpoint import weights_file

SAMPLED = 20_000
"""Images of a folder that are read; of a larger one these many, the names and sizes of all."""
# MD5 of the decompressed files: CIFAR's as torchvision lists them, the others' computed from the
# originals, of which torchvision lists the compressed files alone.
ORIGINAL = {
    "mnist": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion_mnist": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    "cifar10": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    "cifar100": {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    },
}


def content_of(
    config: RunConfig, *, fetch: bool = True, to_train: bool = True, fork: Content | None = None
) -> Content:
    """What the run is made of beside its settings; reads files that it has not read before.

    With `fetch` what torchvision has to download is there then: it is known by what it holds.
    Raises DataError where the files cannot be read, or are another known dataset's, and `to_train`
    where a folder has nothing to train on; ConfigError where a checkpoint to fork is not there.
    `fork` is of another fork of the same run."""
    return continuing.as_forked(
        config, _of_files_alone(config, fetch=fetch, to_train=to_train), fork
    )


def _of_files_alone(config: RunConfig, *, fetch: bool = True, to_train: bool = True) -> Content:
    code = user_code.fingerprint(user_code.targets(config))
    if fetch and isinstance(config.dataset, datasets.Torchvision):
        torchvision_files.obtain(config.dataset)
    if to_train and isinstance(config.dataset, datasets.ImageFolder | datasets.SegmentationFolder):
        refuse_without_train(config.dataset)
    content = Content(of_data(config.dataset), code, of_weights(config))
    return continuing.as_continued(config, content)


def refuse_changed(config: RunConfig, content: Content, *, to_train: bool = True) -> None:
    """Raise RunFailed where files have changed since `content` was taken: the run would not be what
    it is known as.

    Raises DataError where they are gone.
    """
    now = _of_files_alone(config, to_train=to_train)
    if now.data is None and content.data:
        files.prepare(config.dataset)
    kinds = ("dataset's files", "own source", "first weights")
    for what, before, after in zip(kinds, content, now, strict=False):
        if before != after:
            raise RunFailed(
                f"the {what} changed after the command was typed; type it again, for another run"
            )


def of_weights(config: RunConfig) -> str | None:
    """The checksum of the file that `config.weights` names; None where there is none, or none is
    needed any more.
    """
    if config.weights is None:
        return None
    try:
        with _Remembered("weights") as remembered:
            return digest([remembered.sum_of(weights_file(config.weights))])
    except ConfigError:
        if config.resume is not None:  # its checkpoint has what came of them
            return None
        raise


def of_data(dataset: files.DatasetConfig) -> str | None:
    """The fingerprint of a dataset's files; None where its settings say it all: no files, or the
    originals.

    Files that are yet to be downloaded will be the originals: torchvision checks them.
    """
    if isinstance(dataset, datasets.ImageFolder | datasets.SegmentationFolder):
        return _of_folder(dataset)
    if isinstance(dataset, datasets.Torchvision):
        if torchvision_files.missing(dataset):
            return None
        return _of_files(torchvision_files.root_of(dataset), torchvision_files.files(dataset))
    if isinstance(dataset, datasets.HuggingFace):
        huggingface_files.check(dataset)
        return _of_files(Path(dataset.path), huggingface_files.files(dataset))
    if isinstance(dataset, datasets.Text):
        return _of_text(dataset)
    if isinstance(dataset, datasets.Table):
        with _Remembered("known") as remembered:
            return digest([remembered.sum_of(table.found(dataset))])
    if not isinstance(dataset, datasets.Downloaded) or (found := files.sources(dataset)) is None:
        return None
    files.prepare(dataset)  # damaged ones are an error, and not another set
    sums = _sums(found, tuple(ORIGINAL[dataset.name]))
    known = next(
        (name for name, original in ORIGINAL.items() if [*original.values()] == sums), None
    )
    if known not in (None, dataset.name):
        raise DataError(
            f"dataset={dataset.name}: the files in {found[0].parent} are those of {known}; "
            f"use dataset={known}, or another dataset.root"
        )
    if known is None:
        _warn_once(
            f"dataset={dataset.name}: the files in {found[0].parent} are not the published ones"
        )
    return None if known else digest(sums)


@functools.cache
def _warn_once(text: str) -> None:  # not for each run of a sweep
    warn(text)


def _sums(paths: Sequence[Path], names: Sequence[str]) -> list[str]:
    """The MD5 of each decompressed file; of CIFAR's archive, that of its members `names`."""
    with _Remembered("known") as remembered:
        if len(paths) < len(names):
            return remembered.sums_of_members(paths[0], names)
        return [remembered.sum_of(path) for path in paths]


def refuse_without_train(dataset: datasets.ImageFolder | datasets.SegmentationFolder) -> None:
    """Raise DataError where the folder has nothing to train on."""
    module = mask_files if isinstance(dataset, datasets.SegmentationFolder) else image_folder_files
    module.refuse_without_train(Path(dataset.root))


def _of_folder(dataset: datasets.ImageFolder | datasets.SegmentationFolder) -> str:
    root = Path(dataset.root)
    if isinstance(dataset, datasets.ImageFolder):
        class_folders(root)  # raises where there are none
    else:
        mask_files.list_parts(root)
    names = images_of_all_splits(root)
    if wrong := [name for name in names if not (root / name).is_file()]:
        raise DataError(
            f"dataset.root={dataset.root}: {root / wrong[0]} is no file, or leads nowhere;"
            " remove it"
        )
    return _of_files(root, names)


def _of_files(root: Path, names: Sequence[str]) -> str:
    """Of the names and sizes of all, and of what is in them; of very many in some."""
    # Drawn by names alone: the same files on every machine.
    chosen = names if len(names) <= SAMPLED else random.Random(digest(names)).sample(names, SAMPLED)
    with _Remembered(f"folder-{digest([str(root.resolve())])}") as remembered:
        sums = {name: remembered.sum_of(root / name) for name in chosen}
    words = (
        word
        for name in names
        for word in (name, str((root / name).stat().st_size), sums.get(name, ""))
    )
    return digest(words)


def _of_text(dataset: datasets.Text) -> str:
    text_files.parts_of(dataset)  # raises for what it has not
    paths = [
        *text_files.files_of(dataset),
        *([] if dataset.tokens == "bytes" else [Path(dataset.tokens)]),
    ]
    with _Remembered(f"text-{digest([str(Path(dataset.root).resolve())])}") as remembered:
        return digest(remembered.sum_of(path) for path in paths)


class _Remembered:
    """Checksums on the disk, by path, size and time; where they cannot be kept, each file is read
    every time.
    """

    def __init__(self, name: str) -> None:
        self._path = cache_dir() / "checksums" / f"{name}.json"
        self._known: dict[str, list[int | str]] = {}
        self._changed = False

    def __enter__(self) -> _Remembered:
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

    def sum_of(self, path: Path) -> str:
        """MD5 of a file, decompressed where its name ends in .gz."""

        def read() -> str:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                return _md5(file)

        return self._once(path, "", read)

    def sums_of_members(self, archive: Path, names: Sequence[str]) -> list[str]:
        """MD5 of the files of a tar.gz that have these names."""

        def read() -> str:
            with tarfile.open(archive) as opened:
                found = {Path(member.name).name: member for member in opened if member.isfile()}
                streams = [
                    opened.extractfile(found[name]) if name in found else None for name in names
                ]
                return " ".join(_md5(stream) if stream else "" for stream in streams)

        return self._once(archive, " ".join(names), read).split(" ")

    def _once(self, path: Path, what: str, read: Callable[[], str]) -> str:
        stat, key = path.stat(), f"{path.resolve()} {what}"
        # The last is set by the system alone: a copy that keeps the times of its source has
        # another.
        state = [stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns]
        kept = self._known.get(key)
        if isinstance(kept, list) and kept[:-1] == state:
            return str(kept[-1])
        try:
            found = read()
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            raise DataError(f"{path} cannot be read ({error}); mend or replace it") from error
        self._known[key], self._changed = [*state, found], True
        return found


def _md5(file: IO[bytes] | gzip.GzipFile) -> str:
    found = hashlib.md5(usedforsecurity=False)
    while block := file.read(1 << 20):
        found.update(block)
    return found.hexdigest()
