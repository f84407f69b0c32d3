"""What a person's own code is told of a run, and what it may do about it: look on, and draw."""

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
    """A run as it is at that moment, to be read and drawn into."""

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
    """`view.scalar("mine/norm", 0.3)` adds a point to a curve of one's own, in TensorBoard and in
    metrics.jsonl.

    Raises ValueError for a tag of expt's own.
    """
    picture: Callable[[str, Tensor], None]
    """`view.picture("mine/samples", image)` adds a picture to TensorBoard.

    It is [channels, height, width] of 1 or 3 channels, floats from 0 to 1 or uint8. Raises
    ValueError for another. """

    @functools.cached_property
    def model(self) -> nn.Module:
        """A copy of the model whose numbers count (with `ema` the average), in evaluation mode;
        made when asked for.

        Whatever is done to it does not reach the run.
        """
        return self.copy_model().eval()


class Callback:
    """What is told when a run has come somewhere.

    One's own is a subclass, named in YAML or as typed:

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

    It lives on rank 0 alone, where all numbers and weights are known, while the others wait, for
    `timeout_s` at most: files are written once, and its state is one whatever the number of
    workers. To it torch.distributed is not initialised, and a collective raises. No number of the
    run depends on it: random numbers that it draws are put back. What it raises fails the run."""

    def on_epoch_end(self, view: View) -> None:
        """An epoch has been trained on and evaluated; its checkpoint, if one is due, is written
        next.
        """

    def on_evaluation_end(self, view: View) -> None:
        """`view.split` has been evaluated: val, before each `on_epoch_end`, and test once, at the
        end of the run.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """What a resumed run needs of it: tensors, numbers, strings, None, and lists and dicts of
        those.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Called once, before training, in a run that resumes.
        """


class Observer:
    """One worker's; this one sees nothing, and a run needs no more.

    Whoever sees something overrides the moments.
    """

    spent_s = 0.0
    """Seconds that all this has taken."""

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """An epoch begins, or goes on, with these batches."""
        return batches

    def before_update(self) -> None:
        """A step's gradients are there; the optimiser is about to use and drop them."""

    def wants_review(self) -> bool:
        """An epoch's last step is done: whether this rank wants to look at the evaluation that
        follows.
        """
        return False

    def end_epoch(self, *, review: bool) -> None:
        """The epoch is summed and logged; `review`, alike on all ranks: rank 0 wants to look at
        evaluations.
        """

    def review(self) -> Callable[[Batch, Tensor], None] | None:
        """An evaluation begins: what is to get each batch and its logits, on all ranks or on none."""
        return None

    def end_evaluation(self, split: str) -> None:
        """It has ended, on every rank."""

    def values(self, values: Mapping[str, float]) -> None:
        """The values of some tags after the steps that are done."""

    def picture(self, tag: str, image: Tensor) -> None:
        """A picture of a person's own code, uint8 [height, width, channels] on the CPU."""

    def close(self, *, complete: bool) -> None:
        """The run ends: as it should, or in order to be resumed."""


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
