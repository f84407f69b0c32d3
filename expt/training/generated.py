"""Pictures of what a generator makes: an example of a callback."""

from __future__ import annotations

import torch

from expt.training.callback import Callback, View


class Generated(Callback):
    """After each `every` epochs the images that `model.generator` makes of the same `rows` x `rows`
    vectors of noise.

    Noise is drawn from `seed`; the first epoch and the last picture of a run tell what was learnt
    between them."""

    def __init__(self, noise: int, every: int = 1, rows: int = 8, seed: int = 0) -> None:
        self._every, self._rows = every, rows
        self._noise = torch.randn(rows * rows, noise, generator=torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def on_epoch_end(self, view: View) -> None:
        """Draw them."""
        if view.epoch % self._every:
            return
        generator = view.model.get_submodule("generator")
        device = next(generator.parameters()).device
        images = generator(self._noise.to(device))
        channels, height, width = images.shape[1:]
        tiles = images.view(self._rows, self._rows, channels, height, width).permute(2, 0, 3, 1, 4)
        view.picture(
            "generated/images", tiles.reshape(channels, self._rows * height, self._rows * width)
        )
