"""Images made on the spot, whose class shows in them: for trials of speed, memory and launching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Count, Size
from expt.data.kind import Images

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from expt.data.source import Source

_CHUNK = 1024  # images: bounds what is held beside the result


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

    def known_images(self) -> tuple[int, tuple[int, int], int]:
        """See DatasetConfig."""
        return self.channels, self.image_size, self.num_classes

    def open(
        self, task: Any, device: torch.device, num_workers: int, trained_on: Any = None
    ) -> Source:
        """See DatasetConfig."""
        import torch

        from expt.data.images import of_arrays
        from expt.data.indexing import mix

        generator = torch.Generator().manual_seed(mix(self.seed))
        coarse = torch.rand(self.num_classes, self.channels, 4, 4, generator=generator)
        smooth = torch.nn.functional.interpolate(coarse, size=[*self.image_size], mode="bilinear")
        patterns = smooth.mul_(127).to(torch.uint8)
        train, test = (
            _draw(patterns, size, generator) for size in (self.train_size, self.test_size)
        )
        names = tuple(map(str, range(self.num_classes)))
        return of_arrays(train, test, names, device, num_workers)


def _draw(patterns: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    import torch

    labels = torch.randint(len(patterns), (size,), generator=generator)
    images = torch.empty(size, *patterns.shape[1:], dtype=torch.uint8)
    for start in range(0, size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        images[chunk].random_(0, 128, generator=generator).add_(patterns[labels[chunk]])
    return images, labels
