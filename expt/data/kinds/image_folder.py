"""Folders of images: root/train/CLASS/*.jpg, or root/train/{images,masks}; and so in val and test.

Images of classes that fit in memory are decoded once into the cache, by the driver on all cores.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Key, Size
from expt.data import cache
from expt.data.cache import of_files
from expt.data.image_files import EXTENSIONS, decode, files_below, names_of_parts, parts_there
from expt.data.kinds import DatasetConfig, Images, Place, Readers, problems_of_masks
from expt.errors import DataError
from expt.machine import available_memory, usable_cpus

if TYPE_CHECKING:
    import torch

    from expt.data.source import Source

CHUNK = 64
"""Images that a thread decodes at a time."""
_SHARE = 0.25  # of the free memory and disk, that `auto` takes


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImageFolder(Images):
    """Images in a folder for each class."""

    name: Literal["image_folder"]
    root: Place
    cache: Annotated[Literal["auto"] | bool, Key(result="none")] = "auto"
    image_size: Size
    channels: Literal[1, 3] = 3
    num_workers: Readers

    names_classes = True
    may_have_val = True

    def problems(self, task: Any) -> list[str]:
        """See DatasetConfig."""
        if self.transforms and self.cache is True:
            return ["dataset.cache=true: dataset.transforms read each image as it is; use auto"]
        return []

    def parts(self) -> Collection[str]:
        """See DatasetConfig."""
        class_folders(Path(self.root))
        return parts_there(self.root)

    def prepare(self, task: Any = None, *, learns: bool = True) -> None:
        """Decode the images into the cache, unless they do not fit or `cache` is false.

        For transforms none are decoded. Raise DataError for an image that cannot be read, and where
        cache=true and the cache cannot be written.
        """
        listings = [*list_parts(self.root).values()]
        if self.cache is False or self.transforms:
            return
        missing = [listing for listing in listings if cache.read(_name(listing, self)) is None]
        if not missing or (self.cache == "auto" and not _fits(listings, self)):
            return
        try:
            for listing in missing:
                _decode_into_cache(listing, self)
        except (OSError, NotImplementedError) as error:  # a full disk, or one without locks
            if self.cache is True:
                raise DataError(
                    f"dataset.cache=true: {cache.cache_dir()} cannot be written ({error}); set"
                    " EXPT_CACHE to a folder with room, or use dataset.cache=false"
                ) from error

    def fingerprint(self) -> str:
        """See DatasetConfig."""
        class_folders(Path(self.root))
        return of_files(Path(self.root), names_of_parts(self.root))

    def open(
        self, task: Any, device: torch.device, num_workers: int, trained_on: Any = None
    ) -> Source:
        """Read from memory if the driver has put the images into the cache, else one by one."""
        import torch

        from expt.data.images import Pairs, Pictures, in_memory, of_pictures

        listings = list_parts(self.root)
        decoded = {part: decoded_folder(listing, self) for part, listing in listings.items()}
        found = {part: arrays for part, arrays in decoded.items() if arrays is not None}
        is_whole = len(found) == len(listings)
        memory = {part: in_memory(each, device) for part, each in found.items() if is_whole}
        sets = {
            part: Pictures(Pairs(each.files, each.labels), self.channels, self.image_size)
            for part, each in listings.items()
        }
        labels = torch.tensor(listings["train"].labels) if "train" in listings else None
        classes = next(iter(listings.values())).classes
        return of_pictures(sets, classes, labels, num_workers, memory)

    def origin(self, task: Any, split: str) -> Callable[[int], dict[str, str | int]]:
        """Return the paths of a split's files; of val those of train, if it is held out."""
        there = "train" if split == "val" and "val" not in parts_there(self.root) else split
        paths = list_images(self.root, there).files
        return lambda index: {"path": paths[index]}


class Listing(NamedTuple):
    """The images of one part, class by class."""

    folder: Path
    """root/train, root/val or root/test"""
    files: list[str]
    labels: list[int]
    classes: tuple[str, ...]


def list_parts(root: str | Path) -> dict[str, Listing]:
    """Return the images of each part that is there; see `list_images`."""
    return {part: list_images(root, part) for part in parts_there(root)}


def list_images(root: str | Path, part: str) -> Listing:
    """Return the images of one part, in the order of torchvision's ImageFolder.

    Raise DataError for a folder that is missing, has no classes, or has an empty class.
    """
    folder, classes = Path(root) / part, class_folders(Path(root))
    files, labels, empty = list[str](), list[int](), []
    for label, name in enumerate(classes):
        found = files_below(folder / name, EXTENSIONS)
        if not found:
            empty.append(str(folder / name))
        files += found
        labels += [label] * len(found)
    if empty:
        raise DataError(
            f"no images in the class folder {', '.join(empty)}; add some, or remove the folder"
        )
    return Listing(folder, files, labels, classes)


def class_folders(root: Path) -> tuple[str, ...]:
    """Return the names of the classes, sorted: the same folders in every part.

    Raise DataError.
    """
    first, *others = (root / part for part in parts_there(root))
    names = _subfolders(first)
    for other in others:
        if only := sorted({*names} ^ {*_subfolders(other)}):
            raise DataError(
                f"{first} and {other} have different classes: only one of them has"
                f" {', '.join(only)}; give both the same class folders"
            )
    return names


def _subfolders(folder: Path) -> tuple[str, ...]:
    there = folder.is_dir()
    names = (
        tuple(sorted(path.name for path in folder.glob("[!.]*") if path.is_dir())) if there else ()
    )
    if not names:
        what = f"no class folders in {folder}" if there else f"no folder {folder}"
        raise DataError(
            f"dataset.root={folder.parent}: {what}: expected {folder}/CLASS/IMAGE; dataset.root is"
            " the folder that holds train/, val/ and test/"
        )
    return names


def decoded_folder(listing: Listing, dataset: ImageFolder) -> cache.Arrays | None:
    """Return the images of `listing` if they are in the cache, mapped into memory."""
    return None if dataset.cache is False else cache.read(_name(listing, dataset))


def _name(listing: Listing, dataset: ImageFolder) -> str:
    """Return the cache's entry: another one as soon as a file is added, removed or changed."""
    grey = ["grey"] if dataset.channels == 1 else []
    where = cache.digest([str(listing.folder.resolve()), *map(str, dataset.image_size), *grey])
    words = list(listing.classes)
    for file, label in zip(listing.files, listing.labels, strict=True):
        name = os.path.relpath(file, listing.folder)
        words += (name, str(label), *map(str, cache.state_of(file)))
    return f"image_folder-{listing.folder.name}-{where}.{cache.digest(words)}"


def _fits(listings: list[Listing], dataset: ImageFolder) -> bool:
    height, width = dataset.image_size
    size = sum(len(listing.files) for listing in listings) * dataset.channels * height * width
    return size <= _SHARE * min(available_memory(), _free_disk())


def _free_disk() -> int:
    folder = cache.cache_dir()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _decode_into_cache(listing: Listing, dataset: ImageFolder) -> None:
    import numpy as np

    labels, shape = np.array(listing.labels, np.int64), (dataset.channels, *dataset.image_size)

    def write(folder: Path) -> None:
        how = dataset.image_size, dataset.channels
        # Threads are enough: Pillow decodes and resizes without Python's lock.
        with (
            cache.new_images(folder, labels, shape) as images,
            ThreadPoolExecutor(usable_cpus()) as pool,
        ):
            futures = [
                pool.submit(
                    _decode_chunk, images, start, listing.files[start : start + CHUNK], *how
                )
                for start in range(0, len(listing.files), CHUNK)
            ]
            try:
                for future in futures:
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    cache.fill(_name(listing, dataset), write)


def _decode_chunk(
    images: Path, start: int, files: list[str], image_size: tuple[int, int], channels: int
) -> None:
    """Decode `files` into the array stored in `images`, from row `start` on."""
    import numpy as np

    array = np.load(images, mmap_mode="r+")
    for row, file in enumerate(files, start):
        array[row] = decode(file, image_size, channels).transpose(2, 0, 1)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SegmentationFolder(DatasetConfig):
    """Images and masks by the same names."""

    name: Literal["segmentation_folder"]
    root: Place
    num_classes: Annotated[int, Field(ge=2)]
    image_size: Size
    channels: Literal[1, 3] = 3
    num_workers: Readers

    TASKS = ("segmentation",)
    may_have_val = True

    def has_masks(self, segments: bool) -> bool:
        """See DatasetConfig."""
        return True

    def mask_classes(self) -> int:
        """See DatasetConfig."""
        return self.num_classes

    def problems(self, task: Any) -> list[str]:
        """See DatasetConfig."""
        return problems_of_masks(self, task)

    def parts(self) -> Collection[str]:
        """See DatasetConfig."""
        return parts_there(self.root)

    def prepare(self, task: Any = None, *, learns: bool = True) -> None:
        """See DatasetConfig."""
        for part in parts_there(self.root):
            list_pairs(Path(self.root), part)

    def fingerprint(self) -> str:
        """See DatasetConfig."""
        self.prepare()
        return of_files(Path(self.root), names_of_parts(self.root))

    def open(
        self, task: Any, device: torch.device, num_workers: int, trained_on: Any = None
    ) -> Source:
        """See DatasetConfig."""
        from expt.data import masks

        how: Any = {"channels": self.channels, "size": self.image_size}
        how["values"] = masks.values_of(self, task)
        folders = {
            part: masks.MaskPictures(pairs=list_pairs(Path(self.root), part), **how)
            for part in parts_there(self.root)
        }
        return masks.of_masks(folders, self.num_classes, num_workers)

    def origin(self, task: Any, split: str) -> Callable[[int], dict[str, str | int]]:
        """Return the paths of a split's images; of val those of train, if it is held out."""
        there = "train" if split == "val" and "val" not in parts_there(self.root) else split
        paths = [pair.image for pair in list_pairs(Path(self.root), there)]
        return lambda index: {"path": paths[index]}


class Pair(NamedTuple):
    """The files of an image and of its mask."""

    image: str
    mask: str


def list_pairs(root: Path, part: str) -> list[Pair]:
    """Return the pairs of one part, sorted by their path below `images`.

    Raise DataError for a missing folder, and for an image or a mask without the other.
    """
    images, masks = (_by_stem(root, root / part / kind) for kind in ("images", "masks"))
    for stem in sorted(images.keys() ^ masks.keys()):
        if stem in images:
            raise DataError(f"{images[stem]} has no mask {root / part / 'masks' / stem}.png")
        raise DataError(f"{masks[stem]} has no image in {root / part / 'images'}")
    return [Pair(image, masks[stem]) for stem, image in images.items()]


def _by_stem(root: Path, folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in files_below(folder, EXTENSIONS):
        stem = os.path.splitext(os.path.relpath(file, folder))[0]
        if stem in found:
            raise DataError(f"{found[stem]} and {file} have one name; rename or remove one of them")
        found[stem] = file
    if not found:
        raise DataError(
            f"dataset.root={root}: no pictures in {folder}: expected {root}/train/images/NAME.jpg"
            f" and {root}/train/masks/NAME.png, and so in val and test ({', '.join(EXTENSIONS)})"
        )
    return found
