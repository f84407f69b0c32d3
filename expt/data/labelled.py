"""Batches of samples of one class each that a person's own `collate` makes, or whose inputs are no
images.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expt.data.loading import Finish, LoaderOptions
from expt.errors import DataError


@dataclass(frozen=True)
class Labelled:
    """What is known of all of them."""

    num_classes: int
    classifies: bool
    """whether the targets are to be classes, and not what a task of a person's own takes"""
    channels: int | None = None
    """of images [C, H, W], which are normalised and augmented; None: inputs of another kind"""

    def of(self, example: tuple[Any, Any]) -> Labelled:
        """The same, with the channels of the inputs where these are images."""
        inputs = example[0]
        is_image = isinstance(inputs, Tensor) and inputs.dim() == 3 and _has_pixels(inputs)
        return dataclasses.replace(self, channels=inputs.shape[0] if is_image else None)

    def finish(self, options: LoaderOptions) -> dict[str, Any]:
        """How a loader is to finish their inputs, as its keyword."""
        return {} if self.channels is None else {"finish": Finish(options, channels=self.channels)}

    def checked(self, batch: tuple[Any, Any], *, mixes: bool) -> tuple[Any, Any]:
        """A batch of `collate`.

        Raises DataError for one of which the model or the task could make no sense.

        Only class numbers can be drawn, and mixed.
        """
        inputs, targets = batch
        if self.channels is not None:
            if (
                not isinstance(inputs, Tensor)
                or inputs.dim() != 4
                or inputs.shape[1] != self.channels
            ):
                raise DataError(
                    f"collate makes inputs of {_told(inputs)}, and of the first sample images of"
                    f" {self.channels} channels; let them be [samples, channels, height, width]"
                )
            if not _has_pixels(inputs):
                raise DataError(
                    f"collate makes images of {inputs.dtype}; let them be uint8, or float in [0, 1]"
                )
            inputs = inputs.clone()  # it may be the dataset's own, and is normalised in place
        return inputs, self._classes(targets, mixes) if self.classifies else targets

    def _classes(self, targets: Any, mixes: bool) -> Tensor:
        if isinstance(targets, Tensor) and targets.dim() == 1 and not _is_real(targets):
            wrong = (targets < 0) | (targets >= self.num_classes)
            if wrong.any():
                raise DataError(
                    f"collate makes the label {int(targets[wrong][0])}, expected 0 to"
                    f" {self.num_classes - 1}; mend it, or dataset.num_classes"
                )
            return targets.long()
        takes_shares = self.channels is None and not mixes
        if (
            takes_shares
            and isinstance(targets, Tensor)
            and targets.shape[1:] == (self.num_classes,)
        ):
            return targets.float()
        also = (
            f", or the share of each class, [samples, {self.num_classes}]" if takes_shares else ""
        )
        raise DataError(
            f"collate makes targets of {_told(targets)}; let them be class numbers, int64"
            f" [samples]{also}"
        )


def _has_pixels(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8 or tensor.is_floating_point()


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool


def _told(value: Any) -> str:
    return (
        f"{value.dtype} {list(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )
