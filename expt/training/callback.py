"""The view of a run that custom code gets: it may watch and draw."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class View:
    """A run at one moment, to be read and drawn into."""

    epoch: int
    """Epochs begun, from 1."""
    step: int
    """Optimiser steps done."""
    split: str
    """The part that was evaluated last: val, or test."""
    metrics: Mapping[str, float]
    """The newest value of each tag, as in metrics.jsonl: loss/train, accuracy/val, lr, ..."""
    copy_model: Callable[[], nn.Module]
    scalar: Callable[[str, float], None]
    """`view.scalar("mine/norm", 0.3)` adds a point to a custom curve, in TensorBoard and in
    metrics.jsonl. Raises ValueError for a tag that expt writes."""
    picture: Callable[[str, Tensor], None]
    """`view.picture("mine/samples", image)` adds a picture to TensorBoard.

    It is [channels, height, width] of 1 or 3 channels, floats from 0 to 1 or uint8. Raises
    ValueError for another."""

    @functools.cached_property
    def model(self) -> nn.Module:
        """A copy of the model that is evaluated (with `ema` the average), in evaluation mode.

        It is made on first use; whatever is done to it does not reach the run.
        """
        return self.copy_model().eval()


class Callback:
    """Methods that are called at certain moments of a run.

    A custom callback is a subclass, named in YAML or on the command line:

        callbacks: [{_target_: watch.Widths, every: 2}]

    and in watch.py

        class Widths(expt.Callback):
            def __init__(self, every):
                self.every, self.widest = every, 0.0

            def on_epoch_end(self, view):
                if view.epoch % self.every == 0:
                    width = max(weight.std().item() for weight in view.model.parameters())
                    self.widest = max(self.widest, width)
                    view.scalar("mine/widest", self.widest)

            def state_dict(self):
                return {"widest": self.widest}

            def load_state_dict(self, state):
                self.widest = state["widest"]

    It exists on rank 0 only, while the other ranks wait, for `timeout_s` at most: files are written
    once, and its state does not depend on the number of workers. torch.distributed is not
    initialized there, and a collective raises. No number of the run depends on it: random
    generators are restored after it. An exception fails the run.
    """

    every_steps: int | None = None
    """After every how many optimizer steps `on_step_end` is called; `__init__` may set it."""

    def on_step_end(self, view: View) -> None:
        """Be called after each `every_steps`-th step, before a checkpoint of it is written."""

    def on_epoch_end(self, view: View) -> None:
        """Be called after each epoch, and its evaluation, before its checkpoint is written."""

    def on_evaluation_end(self, view: View) -> None:
        """Be called after `view.split` was evaluated: val in or after epochs, test at the end."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return state for a resumed run: tensors, numbers, strings, None, lists and dicts."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned, before a resumed run trains."""


class Generated(Callback):
    """Draw the images of `model.generator` for `rows` x `rows` vectors of fixed noise."""

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
