"""A part of the run's own dataset, a batch at a time, as its evaluations had it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import cast

import torch

from expt import machine
from expt.config.schema import RunConfig
from expt.data import evaluation
from expt.data.loading import LoaderOptions, ShardedLoader
from expt.data.tree import mapped
from expt.errors import DataError, warn
from expt.inference.reading import Chunk
from expt.runs.request import Split
from expt.runs.result import Record


def chunks(
    config: RunConfig, record: Record, split: str, device: torch.device, size: int | None
) -> Iterator[Chunk]:
    """Up to `size` samples at a time, with their targets; None leaves the batches of an evaluation.

    Raises DataError for data that is missing, and warns where it is other than it was for the run.
    """
    dataset = config.dataset
    if hasattr(dataset, "transforms"):
        dataset = dataclasses.replace(dataset, transforms=None)  # of training
    dataset.prepare(config.task, learns=False)
    _warn_of_other_data(config, record)
    loader = _loader(dataclasses.replace(config, dataset=dataset), record, split, device)
    about = dataset.origin(config.task, split)
    numbers: list[int] = loader.samples.tolist()
    done = 0
    for batch in loader.evaluation():
        number = batch.size
        for start in range(0, number, size or number):
            piece = slice(start, min(start + (size or number), number))
            inputs, targets = mapped(operator.itemgetter(piece), (batch.inputs, batch.targets))
            here = numbers[done + piece.start : done + piece.stop]
            yield Chunk([about(index) for index in here], inputs, targets)
        done += number


def _loader(config: RunConfig, record: Record, split: str, device: torch.device) -> ShardedLoader:
    dataset = config.dataset
    options = LoaderOptions(
        batch_size=config.batch_size,
        device=device,
        mean=dataset.mean,
        std=dataset.std,
        channels_last=config.channels_last,
    )
    workers, part = min(machine.usable_cpus(), 8), cast("Split", split)
    data = evaluation.load(
        dataset, config.task, part, record["data"], options, own=True, num_workers=workers
    )
    (loader,) = data.loaders
    if not isinstance(loader, ShardedLoader):
        raise DataError(
            f"--split {split}: the dataset has no such part any more; put back what the run was"
            " trained on"
        )
    return loader


def _warn_of_other_data(config: RunConfig, record: Record) -> None:
    then, now = record.get("content"), config.dataset.fingerprint()
    if then is not None and now is not None and then.get("data") not in (None, now):
        warn("the dataset's files are other than those of the run")
