"""What custom code sees of a run, and what it may do: watch, and draw."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from expt.data.loading import Batch


@dataclass(frozen=True, kw_only=True)
class View:
    """A run at one moment, to be read and drawn into."""

    epoch: int
    """Epochs begun, from 1."""
    step: int
    """Optimiser steps done."""
    split: str
    """What was evaluated last: val, or test."""
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

    def on_epoch_end(self, view: View) -> None:
        """Be called after each epoch's evaluation, before its checkpoint is written."""

    def on_evaluation_end(self, view: View) -> None:
        """Be called after `view.split` was evaluated: val in each epoch, test at the end."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a resumed run needs.

        That is tensors, numbers, strings, None, and lists and dicts of those.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; called before training in a resumed run."""


class Observer:
    """What watches a run on one worker, and changes nothing; this one sees nothing."""

    spent_s = 0.0
    """Seconds that all this has taken."""

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches with which an epoch begins or continues."""
        return batches

    def before_update(self) -> None:
        """Look at a step's gradients, which the optimizer is about to use and drop."""

    def wants_review(self) -> bool:
        """Return whether this rank wants to look at the evaluation after an epoch's last step."""
        return False

    def end_epoch(self, *, review: bool, may_end: bool = False) -> None:
        """Note that an epoch was logged; with `review`, alike on all, rank 0 wants evaluations.

        The run `may_end` with the evaluation that comes.
        """

    def review(self) -> Callable[[Batch, Tensor], None] | None:
        """Return what gets each batch of an evaluation and its logits, on all ranks or on none."""
        return None

    def end_evaluation(self, split: str, *, is_last: bool = False) -> None:
        """Note that an evaluation has ended on every rank; if it `is_last` no epoch follows."""

    def values(self, values: Mapping[str, float]) -> None:
        """Note the values of some tags after the steps that are done."""

    def picture(self, tag: str, image: Tensor) -> None:
        """Draw a picture of custom code, uint8 [height, width, channels] on the CPU."""

    def close(self, *, complete: bool) -> None:
        """End with the run, which is complete or is to be resumed."""


class Generated(Callback):
    """Draw what `model.generator` makes of `rows` x `rows` vectors of noise, each `every` epochs.

    Noise is drawn once from `seed`; the pictures of a run's first and last epoch show what was
    learned.
    """

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
