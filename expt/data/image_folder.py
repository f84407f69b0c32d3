"""A person's folder of images, read image by image: root/train/CLASS/*.jpg, and so in val and test."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from expt.data.image_folder_files import Listing, decode


class FolderDataset(Dataset[tuple[Tensor, int]]):
    """Images of one part as uint8 [channels, height, width]: scaled to cover that size, then
    cropped at the centre.

    Without a size they are as they lie, for transforms. Raises DataError, when it is read, for a
    file that is no image."""

    def __init__(
        self, listing: Listing, image_size: tuple[int, int] | None, channels: int = 3
    ) -> None:
        self._files, self._labels = listing.files, listing.labels
        self._image_size, self._channels = image_size, channels

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(decode(self._files[index], self._image_size, self._channels))
        return image.permute(2, 0, 1).contiguous(), self._labels[index]
