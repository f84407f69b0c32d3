"""What a person's own code is told of a run, and what it may do about it: look on, and draw."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


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
