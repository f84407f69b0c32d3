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
    """Return what makes a loader of the samples at given indices.

    A sample is (inputs, targets), anything else is inputs only. Samples are stacked as torch's
    default_collate does, unless the dataset has a method `collate`, which makes a batch of a list.
    """

    def load(indices: Tensor, options: LoaderOptions) -> Loader:
        own = getattr(dataset, "collate", None)
        collate: Callable[[list[Any]], tuple[Any, Any]] = functools.partial(collated, own=own)
        if labelled and own:
            mixes = options.mixing is not None
            collate = functools.partial(_labelled, own=own, kind=labelled, mixes=mixes)
        how: Any = {"collate": collate, "num_workers": num_workers}
        how |= labelled.finish(options) if labelled else {}
        if isinstance(dataset, IterableDataset):
            return IterableLoader(dataset, indices, options, check=check, **how)
        how["sample_s"] = sample_s
        return SampleLoader(CheckedSamples(dataset, check), indices, options, **how)

    return load


def collated(samples: list[Any], own: Callable[[list[Any]], Any] | None = None) -> tuple[Any, Any]:
    """Return inputs and targets of a batch, float64 as float32. Raise DataError."""
    try:
        batch = (own or default_collate)(samples)
    except DataError:
        raise
    except Exception as error:
        frame = own_frame(error)
        where = f" ({frame.filename}, line {frame.lineno})" if frame else ""
        fix = f"fix the dataset's method collate{where}" if own else "give the dataset a collate"
        raise DataError(f"samples cannot be made a batch: {secrets.said(error)}; {fix}") from error
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2
    inputs, targets = batch if is_pair else (batch, None)
    tensors = [*leaves((targets, inputs))]
    if not tensors or any(tensor.dim() == 0 for tensor in tensors):
        raise DataError(
            f"a batch, a {type(batch).__name__}, must hold tensors [samples, ...], and no other"
        )
    if own and (size := len(tensors[0])) != len(samples):
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
    tensor = tensor.detach()  # one that requires grad can't be sent to another process
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def first(dataset: Dataset[Any]) -> Any:
    """Return the first sample. Raise DataError where there is none."""
    return first_of(dataset) if isinstance(dataset, IterableDataset) else read(dataset, 0)


def example(dataset: Dataset[Any], sample: Any, check: Check) -> tuple[Any, Any]:
    """Return zeros like the inputs and targets of the first `sample`. Raise DataError."""
    batch = collated([checked(check, 0, sample)], getattr(dataset, "collate", None))
    found: tuple[Any, Any] = mapped(lambda tensor: torch.zeros_like(tensor[0]), batch)
    return found


def shapes(dataset: Dataset[Any], inputs: Any, targets: Any) -> Mapping[str, Any]:
    """Return what a model may ask for.

    It is `channels` and `image_size` of inputs that are one tensor (a row [features] is an image of
    one row), and `num_classes` outputs; of a dataset of tokens its `vocab_size` and `context`.
    """
    found: dict[str, Any] = {}
    if hasattr(dataset, "vocab_size"):
        if not hasattr(dataset, "context"):
            raise DataError(
                f"{type(dataset).__name__} has a vocab_size, but no context; let that be the most"
                " tokens that a sample has"
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
    """Samples of one class each, which a `collate` makes, or whose inputs are no images."""

    num_classes: int
    classifies: bool
    """whether the targets are classes, and not what a custom task takes"""
    channels: int | None = None
    """of images [C, H, W], which are normalised and augmented; None: inputs of another kind"""

    def of(self, example: tuple[Any, Any]) -> Labelled:
        """Return the same, with the channels of the inputs where these are images."""
        inputs = example[0]
        is_image = isinstance(inputs, Tensor) and inputs.dim() == 3 and _has_pixels(inputs)
        return dataclasses.replace(self, channels=inputs.shape[0] if is_image else None)

    def finish(self, options: LoaderOptions) -> dict[str, Any]:
        """Return how a loader is to finish their inputs, as its keyword."""
        return {} if self.channels is None else {"finish": Finish(options, channels=self.channels)}

    def checked(self, batch: tuple[Any, Any], *, mixes: bool) -> tuple[Any, Any]:
        """Return a batch of `collate`. Raise DataError for one that makes no sense.

        Only class numbers can be drawn, and mixed.
        """
        inputs, targets = batch
        if self.channels is not None:
            is_batch = isinstance(inputs, Tensor) and inputs.dim() == 4 and _has_pixels(inputs)
            if not is_batch or inputs.shape[1] != self.channels:
                raise DataError(
                    f"collate makes inputs of {_told(inputs)}; let them be images [samples,"
                    f" {self.channels}, height, width] as the first, uint8, or float in [0, 1]"
                )
            inputs = inputs.clone()  # it may be the dataset's own, and is normalised in place
        return inputs, self._classes(targets, mixes) if self.classifies else targets

    def _classes(self, targets: Any, mixes: bool) -> Tensor:
        if isinstance(targets, Tensor) and targets.dim() == 1 and not _is_real(targets):
            wrong = (targets < 0) | (targets >= self.num_classes)
            if wrong.any():
                raise DataError(
                    f"collate makes the label {int(targets[wrong][0])}, expected 0 to"
                    f" {self.num_classes - 1}; fix it, or dataset.num_classes"
                )
            return targets.long()
        takes_shares = self.channels is None and not mixes
        is_share = isinstance(targets, Tensor) and targets.shape[1:] == (self.num_classes,)
        if takes_shares and is_share:
            return targets.float()  # type: ignore[no-any-return]
        also = f", or shares of the classes, [samples, {self.num_classes}]" if takes_shares else ""
        raise DataError(
            f"collate makes targets of {_told(targets)}; let them be class numbers, int64"
            f" [samples]{also}"
        )


def _has_pixels(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8 or tensor.is_floating_point()


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool


def _told(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"{value.dtype} {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
