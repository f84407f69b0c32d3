"""Samples of an image and a mask of class numbers: files, pictures, or a custom dataset's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expt.data.image_files import (
    MODES,
    look_at_pair,
    mask_of,
    numbers_of_mask,
    open_picture,
    refuse_damaged,
    stretch,
)
from expt.data.images import Pictures, image_part, of_one_shape, of_parts
from expt.data.source import Source
from expt.features import Mask


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskPictures(Pictures):
    """Pictures as uint8 [C, H, W], and their masks int64 [H, W], both resized to `size`.

    Raise DataError, when it is read, also for a mask of another size than its picture, or one with
    other values.
    """

    values: Mask

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, source = self.opened(index)
        name = source if isinstance(source, str) else f"sample {index}: its mask"
        mask = self._numbers(source, name, image)
        self.values.check_values(mask, name)
        if self.size is None:
            self.check_size(index, image)
        return _resized(image, mask, self.size or mask.shape)

    def look(self, index: int, name: str) -> Any:
        """See Pictures; of the mask, too."""
        with refuse_damaged(name):
            source, mask = self.pairs[index]
        return look_at_pair(source, mask, MODES[self.channels], self.values, name)

    def _numbers(self, source: Any, name: str, image: Any = None) -> np.ndarray:
        mask = open_picture(source, name=name)
        return numbers_of_mask(mask, image or mask, name)

    def occurring(self, indices: Tensor) -> Tensor:
        """Return the numbers in masks, of at most 512 that lie evenly, until all classes occur."""
        found, wanted = set[int](), {*range(self.values.num_classes)}
        places = torch.linspace(0, len(indices) - 1, min(len(indices), 512)).long()
        for index in indices[places].tolist():
            if wanted <= found:
                break
            found |= {*np.unique(self._numbers(self.pairs[index][1], f"sample {index}")).tolist()}
        return torch.tensor(sorted(found))


def _resized(image: Any, mask: np.ndarray, image_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return a picture as uint8 [C, height, width], and its mask: bilinear, and nearest."""
    height, width = image_size
    if image.size != (width, height):
        image = stretch(image, image_size)
    if mask.shape != (height, width):
        # As Pillow's nearest, whose modes do not hold all numbers: the pixel in whose middle the
        # new one's lies.
        rows, columns = (
            ((np.arange(new) + 0.5) * old / new).astype(int)
            for new, old in zip(image_size, mask.shape, strict=True)
        )
        mask = np.ascontiguousarray(mask[rows][:, columns])
    pixels = torch.from_numpy(np.array(image).reshape(height, width, -1))
    return pixels.permute(2, 0, 1).contiguous(), torch.from_numpy(mask)


def of_masks(pairs: Mapping[str, Any], dataset: Any, task: Any, num_workers: int) -> Source:
    """Return the parts of pictures and masks."""
    how: Any = {"channels": dataset.channels or 3, "size": dataset.image_size}
    how |= {"needed": dataset.needed, "values": (values := mask_of(dataset, task))}
    shape, sets = of_one_shape({part: MaskPictures(each, **how) for part, each in pairs.items()})

    # Logits of many classes are as large as an image.
    parts = {
        part: image_part(each, shape, num_workers, eval_as_training=True)
        for part, each in sets.items()
    }
    more: dict[str, Any] = {"pictures": sets}
    more |= {"targets_of": sets["train"].occurring} if "train" in sets else {}
    return of_parts(shape, values, parts, torch.zeros(shape[1:], dtype=torch.int64), **more)
