"""Samples of any kind, of a custom Dataset: tensors, numbers, tuples, dicts, nested."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from expt.config import secrets
from expt.config.user_code import own_frame
from expt.data.checked_samples import Check, CheckedSamples, checked, read
from expt.data.iterable import IterableLoader, first_of
from expt.data.loading import Finish, Load, Loader, LoaderOptions
from expt.data.stream import SampleLoader
from expt.data.tree import leaves, mapped
from expt.errors import DataError


def loading(
    dataset: Dataset[Any],
    num_workers: int,
    check: Check,
    labelled: Labelled | None = None,
    sample_s: float = math.inf,
) -> Load:
    """What makes a loader of the samples at given indices.

    A sample (inputs, targets) is taken for that, all else for inputs alone. Samples are stacked as
    torch's default_collate does, unless the dataset has a method `collate`, which makes a batch of
    a list of samples."""

    def load(indices: Tensor, options: LoaderOptions) -> Loader:
        own = getattr(dataset, "collate", None)
        collate: Callable[[list[Any]], tuple[Any, Any]] = functools.partial(collated, own=own)
        if labelled and own:
            collate = functools.partial(
                _labelled, own=own, kind=labelled, mixes=options.mixing is not None
            )
        how: Any = {"collate": collate, "num_workers": num_workers} | (
            labelled.finish(options) if labelled else {}
        )
        if isinstance(dataset, IterableDataset):
            return IterableLoader(dataset, indices, options, check=check, **how)
        how["sample_s"] = sample_s
        return SampleLoader(CheckedSamples(dataset, check), indices, options, **how)

    return load


def collated(samples: list[Any], own: Callable[[list[Any]], Any] | None = None) -> tuple[Any, Any]:
    """Inputs and targets of a batch, numbers in float32 where they were in float64.

    Raises DataError.
    """
    try:
        batch = (own or default_collate)(samples)
    except DataError:
        raise
    except Exception as error:
        frame = own_frame(error)
        mend = "give the dataset a method collate(samples) -> batch"
        if own:
            where = f" ({frame.filename}, line {frame.lineno})" if frame else ""
            mend = f"mend the dataset's method collate{where}"
        raise DataError(f"samples cannot be made a batch: {secrets.said(error)}; {mend}") from error
    inputs, targets = (
        batch if isinstance(batch, list | tuple) and len(batch) == 2 else (batch, None)
    )
    if next(leaves((inputs, targets)), None) is None:
        raise DataError(
            f"a batch holds no tensor, it is a {type(batch).__name__}; return tensors from collate"
        )
    lengths = {len(tensor) if tensor.dim() else None for tensor in leaves((targets, inputs))}
    if None in lengths:
        raise DataError(
            "a batch holds a tensor without a dimension for its samples; let its first be [samples,"
            " ...]"
        )
    if own and (size := len(next(leaves((targets, inputs))))) != len(samples):
        raise DataError(
            f"collate makes a batch of {size} of {len(samples)} samples, and each is to count once;"
            " let it keep them, and leave others out of the dataset"
        )
    found: tuple[Any, Any] = mapped(_single, (inputs, targets))
    return found


def _labelled(
    samples: list[Any], own: Callable[[list[Any]], Any], kind: Labelled, *, mixes: bool
) -> tuple[Any, Any]:
    return kind.checked(collated(samples, own), mixes=mixes)


def _single(tensor: Tensor) -> Tensor:
    tensor = (
        tensor.detach()
    )  # no process hands on what hangs on others, as of a model that `collate` asks
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def first(dataset: Dataset[Any]) -> Any:
    """The first sample. Raises DataError where there is none."""
    return first_of(dataset) if isinstance(dataset, IterableDataset) else read(dataset, 0)


def example(dataset: Dataset[Any], sample: Any, check: Check) -> tuple[Any, Any]:
    """Inputs and targets of the first `sample`, zeros. Raises DataError."""
    batch = collated([checked(check, 0, sample)], getattr(dataset, "collate", None))
    found: tuple[Any, Any] = mapped(lambda tensor: torch.zeros_like(tensor[0]), batch)
    return found


def shapes(dataset: Dataset[Any], inputs: Any, targets: Any) -> Mapping[str, Any]:
    """What a model may ask for: `channels` and `image_size` of inputs that are one tensor,
    `num_classes` outputs.

    A table's row [features] is an image of one row. Of a dataset of tokens, which has an attribute
    `vocab_size`, that and its `context`, the most tokens of a sample. Raises DataError where it has
    the first alone."""
    found: dict[str, Any] = {}
    if hasattr(dataset, "vocab_size"):
        if not hasattr(dataset, "context"):
            name = type(dataset).__name__
            raise DataError(
                f"{name} has a vocab_size, but no context; let that be the most tokens that a"
                " sample has"
            )
        return {"vocab_size": dataset.vocab_size, "context": dataset.context}
    if isinstance(inputs, Tensor) and 1 <= inputs.dim() <= 3:
        channels, height, width = (1,) * (3 - inputs.dim()) + tuple(inputs.shape)
        found = {"channels": channels, "image_size": (height, width)}
    if isinstance(targets, Tensor):
        found["num_classes"] = math.prod(targets.shape)
    return found


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
