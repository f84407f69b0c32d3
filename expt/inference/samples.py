"""A few samples as a run's model gets them: of its dataset where that is there, else drawn at
random.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from expt.config.schema import RunConfig
from expt.data import evaluation
from expt.data.loading import Batch, LoaderOptions
from expt.data.tree import mapped
from expt.errors import ConfigError, DataError, ExptError


class Samples(NamedTuple):
    """A batch, and where it comes from."""

    batch: Batch
    source: str
    """The split, or "at random"."""


def samples(
    config: RunConfig, trained_on: Mapping[str, Any], number: int, *, normalised: bool = True
) -> Samples:
    """Up to `number` samples of the test set, or of another part; nothing is downloaded for them.

    Not `normalised` images are pixels in [0, 1], and rows [N, F] as they stand in the table. Raises
    ConfigError where there are none, and what they are like is not known either."""
    try:
        return _real(config, trained_on, number, normalised=normalised)
    except (ExptError, OSError, ImportError) as error:
        return Samples(
            _random(config, trained_on, number, error, normalised=normalised), "at random"
        )


def _real(
    config: RunConfig, trained_on: Mapping[str, Any], number: int, *, normalised: bool
) -> Samples:
    dataset = config.dataset
    if hasattr(dataset, "download"):
        dataset = dataclasses.replace(dataset, download=False)
    if hasattr(dataset, "cache"):  # nothing is decoded into it for a few images
        dataset = dataclasses.replace(dataset, cache=False)
    dataset.prepare(config.task, learns=False)
    mean, std = (dataset.mean, dataset.std) if normalised else (None, None)
    options = LoaderOptions(
        batch_size=number, device=torch.device("cpu"), mean=mean, std=std, eval_batch_size=number
    )
    known = trained_on if normalised else {**trained_on, "standardised": {}}
    split = (
        "test" if trained_on.get("test_size") else "val" if trained_on.get("val_size") else "train"
    )
    data = evaluation.load(dataset, config.task, split, known, options, own=True)  # type: ignore[arg-type]
    parts = [*itertools.islice(data.batches(), 1)]
    if not parts:
        raise DataError(f"dataset={dataset.name}: has no samples")
    inputs, targets = mapped(lambda tensor: tensor[:number], (parts[0].inputs, parts[0].targets))
    return Samples(Batch(inputs, targets, number), split)


def _random(
    config: RunConfig,
    trained_on: Mapping[str, Any],
    number: int,
    error: Exception,
    *,
    normalised: bool,
) -> Batch:
    drawn = torch.Generator().manual_seed(0)
    if config.dataset.has_rows and "image_size" in trained_on:
        rows = torch.randn((number, trained_on["image_size"][1]), generator=drawn)
        known, names = trained_on.get("standardised", {}), trained_on.get("feature_names", ())
        if names and not normalised:
            means, deviations = torch.tensor([known.get(name, (0.0, 1.0)) for name in names]).T
            rows = means + deviations * rows
        return Batch(rows, None, number)
    if "vocab_size" in trained_on:
        shape = (number, trained_on["context"])
        return Batch(torch.randint(trained_on["vocab_size"], shape, generator=drawn), None, number)
    if "image_size" in trained_on:
        shape = (number, trained_on["channels"], *trained_on["image_size"])
        return Batch(torch.rand(shape, generator=drawn), None, number)
    raise ConfigError(
        f"what the model takes is not known without the run's dataset: {error}"
    ) from error
