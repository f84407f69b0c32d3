"""Samples of an image and a mask of class numbers: root/{train,val,test}/{images,masks}, or of a person's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.config import datasets, tasks
from expt.data import samples
from expt.data.loading import Finish, Loader, LoaderOptions
from expt.data.mask_files import Pair, decode
from expt.data.stream import SampleLoader
from expt.errors import DataError


@dataclass(frozen=True, kw_only=True)
class MaskValues:
    """What masks may hold."""

    num_classes: int
    ignore_index: int = 255

    def wrong(self, mask: Tensor) -> int | None:
        """A value that is neither a class nor to be ignored; None where there is none."""
        out = (mask < 0) | (mask >= self.num_classes)
        out &= mask != self.ignore_index
        return int(mask[out][0]) if out.any() else None

    @property
    def expected(self) -> str:
        """In words."""
        return f"expected 0 to {self.num_classes - 1}, or {self.ignore_index} (task.ignore_index)"


def values_of(dataset: datasets.SegmentationFolder | datasets.TargetDataset, task: Any) -> MaskValues:
    """What masks may hold by the configuration: the folder says how many classes, else the task."""
    settings = {"ignore_index": task.ignore_index} if isinstance(task, tasks.Segmentation) else {}
    number = dataset.num_classes if isinstance(dataset, datasets.SegmentationFolder) else task.num_classes
    return MaskValues(num_classes=number, **settings)


class MaskFolder(Dataset[tuple[Tensor, Tensor]]):
    """Images uint8 [3, H, W] and masks int64 [H, W] of one part, resized to `image_size`.

    Raises DataError, when it is read, for what cannot be read, a mask of another size than its image, or one with
    other values.
    """

    def __init__(self, pairs: list[Pair], image_size: tuple[int, int], values: MaskValues) -> None:
        self._pairs, self._image_size, self._values = pairs, image_size, values

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pair = self._pairs[index]
        image, mask = map(torch.from_numpy, decode(pair, self._image_size, self._refuse))
        return image.permute(2, 0, 1).contiguous(), mask

    def _refuse(self, mask: str, array: Any) -> None:
        if (wrong := self._values.wrong(torch.from_numpy(array))) is not None:
            raise DataError(
                f"{mask} holds the class {wrong}, {self._values.expected}; mend the mask, or dataset.num_classes"
            )


class ImageMaskLoader(SampleLoader):
    """Batches of a MaskFolder; see SampleLoader. Its images are normalised, its masks stay as they are."""

    def __init__(self, dataset: MaskFolder, indices: Tensor, options: LoaderOptions, *, num_workers: int) -> None:
        # Logits of many classes are as large as an image: no more of them at a time than in training.
        chunk = max(1, options.batch_size // options.shard.world_size)
        options = dataclasses.replace(options, eval_batch_size=chunk)
        finish = Finish(options, channels=3)
        super().__init__(dataset, indices, options, collate=samples.collated, num_workers=num_workers, finish=finish)


def loading(dataset: MaskFolder, num_workers: int) -> Callable[[Tensor, LoaderOptions], Loader]:
    """What makes a loader of the samples at given indices."""
    return lambda indices, options: ImageMaskLoader(dataset, indices, options, num_workers=num_workers)


def checked_mask(sample: Any, values: MaskValues) -> tuple[Any, Tensor]:
    """A person's own (inputs, mask), the mask as int64. Raises DataError for another: a GPU says nothing of it."""
    if not isinstance(sample, list | tuple) or len(sample) != 2:
        raise DataError(f"is a {type(sample).__name__}, expected (image, mask)")
    mask = torch.as_tensor(sample[1])
    if mask.dim() != 2 or mask.is_floating_point():
        raise DataError(f"its mask is {mask.dtype} {list(mask.shape)}, expected class numbers, int64 [height, width]")
    if (wrong := values.wrong(mask)) is not None:
        raise DataError(f"its mask holds the class {wrong}, {values.expected}; mend the mask, or task.num_classes")
    return sample[0], mask.long()
