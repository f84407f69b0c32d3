"""Training images that are normalised and padded once, for each batch to be one gather."""

from __future__ import annotations

import torch
from torch import Tensor

from expt.data.loading import LoaderOptions, Normalise
from expt.errors import ConfigError

_BYTES_AT_A_TIME = 64 << 20
"""Of float32 images, while they are prepared."""


class PreparedImages:
    """Images as the model gets them, beside one another in memory, with what a crop may reach
    around each.

    Of each pixel the channels lie side by side, so that choosing images, cropping and mirroring
    them is one gather of pixels, and what it gives is in the memory format channels_last already.
    """

    def __init__(self, images: Tensor, options: LoaderOptions, dtype: torch.dtype) -> None:
        """Of uint8 `images` [N, C, H, W].

        Raises ConfigError where the device has no room for them.
        """
        self._augment = options.augment
        self._layout = torch.channels_last if options.channels_last else torch.contiguous_format
        channels, self._height, self._width = images.shape[1:]
        padding = self._augment.crop_padding
        size = self._height + 2 * padding, self._width + 2 * padding
        self._row, self._image = size[1], size[0] * size[1]
        device = options.device
        needed = len(images) * self._image * channels * dtype.itemsize
        if device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(device)[0]):
            raise ConfigError(
                f"prepare_once=true: takes {needed / 1e9:.1f} GB of the GPU's memory, of which"
                f" {free / 1e9:.1f} GB are free; use prepare_once=false"
            )
        normalise = Normalise(
            options.mean, options.std, channels=channels, device=device, channels_last=False
        )
        pixels = torch.empty(len(images), *size, channels, dtype=dtype, device=device)
        at_a_time = max(1, _BYTES_AT_A_TIME // (4 * channels * self._image))
        for made, part in zip(pixels.split(at_a_time), images.split(at_a_time), strict=True):
            made.copy_(normalise(self._augment.padded(part.to(device))).permute(0, 2, 3, 1))
        self._pixels = pixels.view(-1, channels)

    def batch(self, chosen: Tensor, drawn: Tensor | None) -> Tensor:
        """The images `chosen` [b], augmented by the random numbers `drawn` [5, b]; both on the
        device.
        """
        if drawn is None:  # an evaluation
            padding, device = self._augment.crop_padding, chosen.device
            rows = torch.arange(self._height, device=device).expand(len(chosen), -1) + padding
            columns = torch.arange(self._width, device=device).expand(len(chosen), -1) + padding
        else:
            rows, columns = self._augment.places(drawn, self._height, self._width)
        places = (
            (chosen * self._image)[:, None, None]
            + (rows * self._row)[:, :, None]
            + columns[:, None, :]
        )
        images = (
            self._pixels.index_select(0, places.flatten())
            .view(*places.shape, -1)
            .permute(0, 3, 1, 2)
        )
        images = images.contiguous(memory_format=self._layout)
        return images if drawn is None else self._augment.cut(images, drawn)
