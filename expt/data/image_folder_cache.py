"""A folder of images that fits in memory, decoded once into the cache: by the driver, on all cores.

Free of torch.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from expt.config import datasets
from expt.data import cache
from expt.data.image_folder_files import Listing, decode, list_parts
from expt.errors import DataError
from expt.machine import available_memory, usable_cpus

CHUNK = 64
"""images that a thread decodes at a time"""
_SHARE = 0.25  # of the free memory and disk, that `auto` takes


def prepare_folder(dataset: datasets.ImageFolder) -> None:
    """Decode the folder's images into the cache, unless they are there, do not fit, or
    `dataset.cache` is false.

    For transforms none are decoded.

    Raises DataError for an image that cannot be read, and where cache=true and the cache cannot be
    written."""
    listings = [*list_parts(dataset.root).values()]
    if dataset.cache is False or dataset.transforms:
        return
    missing = [listing for listing in listings if cache.read(_name(listing, dataset)) is None]
    if not missing or (dataset.cache == "auto" and not _fits(listings, dataset)):
        return
    try:
        for listing in missing:
            _decode_into_cache(listing, dataset)
    except (
        OSError,
        NotImplementedError,
    ) as error:  # a read-only or full disk, or one without locks
        if dataset.cache is True:
            raise DataError(
                f"dataset.cache=true: {cache.cache_dir()} cannot be written ({error}); "
                "set EXPT_CACHE to a folder with room, or use dataset.cache=false"
            ) from error


def decoded_folder(listing: Listing, dataset: datasets.ImageFolder) -> cache.Arrays | None:
    """The images of `listing` where `prepare_folder` has put them in the cache, mapped into memory."""
    return None if dataset.cache is False else cache.read(_name(listing, dataset))


def _name(listing: Listing, dataset: datasets.ImageFolder) -> str:
    """The cache's entry: another one, in its place, as soon as a file is added, removed or changed."""
    grey = ["grey"] if dataset.channels == 1 else []
    where = cache.digest([str(listing.folder.resolve()), *map(str, dataset.image_size), *grey])
    words = list(listing.classes)
    for file, label in zip(listing.files, listing.labels, strict=True):
        stat = os.stat(file)
        words += (
            os.path.relpath(file, listing.folder),
            str(label),
            str(stat.st_size),
            str(stat.st_mtime_ns),
        )
    return f"image_folder-{listing.folder.name}-{where}.{cache.digest(words)}"


def _fits(listings: list[Listing], dataset: datasets.ImageFolder) -> bool:
    height, width = dataset.image_size
    size = sum(len(listing.files) for listing in listings) * dataset.channels * height * width
    return size <= _SHARE * min(available_memory(), _free_disk())


def _free_disk() -> int:
    folder = cache.cache_dir()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _decode_into_cache(listing: Listing, dataset: datasets.ImageFolder) -> None:
    import numpy as np

    def write(images: Path) -> None:
        starts = range(0, len(listing.files), CHUNK)
        # Threads are enough: Pillow decodes and resizes without Python's lock.
        with ThreadPoolExecutor(usable_cpus()) as pool:
            how = dataset.image_size, dataset.channels
            files = [listing.files[start : start + CHUNK] for start in starts]
            futures = [
                pool.submit(_decode_chunk, images, start, some, *how)
                for start, some in zip(starts, files, strict=True)
            ]
            try:
                for future in futures:
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    labels = np.array(listing.labels, np.int64)
    cache.fill(_name(listing, dataset), labels, (dataset.channels, *dataset.image_size), write)


def _decode_chunk(
    images: Path, start: int, files: list[str], image_size: tuple[int, int], channels: int
) -> None:
    """Decode `files` into the array stored in `images`, from row `start` on."""
    import numpy as np

    array = np.load(images, mmap_mode="r+")
    for row, file in enumerate(files, start):
        array[row] = decode(file, image_size, channels).transpose(2, 0, 1)
