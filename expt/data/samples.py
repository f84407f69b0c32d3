"""Samples of any kind, of a Dataset of a person's own: tensors, numbers, tuples, dicts, nested."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from expt.config import secrets
from expt.config.user_code import own_frame
from expt.data.checked_samples import Check, CheckedSamples, checked, read
from expt.data.iterable import IterableLoader, first_of
from expt.data.labelled import Labelled
from expt.data.loading import Load, Loader, LoaderOptions
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
