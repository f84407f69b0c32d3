"""Masks: pictures whose pixels are numbers of classes. Free of torch."""

from __future__ import annotations

from typing import Any

from expt.data.pictures import Picture, turned
from expt.errors import DataError
from expt.features import Mask
from expt.late import np

_OF_NUMBERS = ("1", "L", "P", "I", "I;16")  # modes with one number for each pixel


def mask_of(dataset: Any, task: Any) -> Mask:
    """Return the feature of masks, by the number of classes of the dataset, else of the task."""
    settings = {"ignore_index": task.ignore_index} if hasattr(task, "ignore_index") else {}
    return Mask(num_classes=dataset.mask_classes() or task.num_classes, **settings)


def numbers_of_mask(mask: Picture, picture: Picture, name: str) -> tuple[np.ndarray, set[str]]:
    """Return the number of each pixel, int64 [height, width], and a note where the picture lies.

    A mask that is as large as the picture in its file, and not as a viewer shows it, is turned with
    it; the note says so, or that it is not known. Raise DataError for a mask in colours, or of
    another size.
    """
    image, notes = mask.image, set[str]()
    if image.mode[:4] not in _OF_NUMBERS:  # I;16B too
        raise DataError(
            f"{name} is a picture of mode {image.mode}; save its mask as a grey or palette PNG of"
            " each pixel's class, 0, 1, ... (255 is ignored: task.ignore_index)"
        )
    lying = picture.size[::-1] if picture.orientation >= 5 else picture.size
    if picture.orientation > 1 and image.size == lying:
        notes.add("kept" if lying == picture.size else "masks")
        if lying != picture.size:
            image = turned(image, picture.orientation)
    if image.size != picture.size:
        one, other = (f"{height}x{width}" for width, height in (image.size, picture.size))
        raise DataError(f"{name} is {one}, and its image {other}; make them one size")
    return np.array(image).astype(np.int64), notes
