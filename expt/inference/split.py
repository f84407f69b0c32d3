"""A part of the run's own dataset, a batch at a time, as its evaluations had it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import torch

from expt import machine
from expt.config import datasets
from expt.config.schema import RunConfig
from expt.data import evaluation, files, fingerprint, indexing, table
from expt.data.image_folder_files import list_images
from expt.data.loading import LoaderOptions, ShardedLoader
from expt.data.mask_files import list_pairs
from expt.data.tree import mapped
from expt.errors import DataError, warn
from expt.inference.reading import Chunk
from expt.runs.request import Split
from expt.runs.result import Record

About = Callable[[int], dict[str, str | int]]
"""Where a sample of a part is from, by its number there."""


def chunks(
    config: RunConfig, record: Record, split: str, device: torch.device, size: int | None
) -> Iterator[Chunk]:
    """Up to `size` samples at a time, with their targets; None leaves the batches of an evaluation.

    Raises DataError for data that is missing, and warns where it is other than it was for the run.
    """
    dataset = config.dataset
    if isinstance(dataset, datasets.Images):
        dataset = dataclasses.replace(dataset, transforms=None)  # of training
    files.prepare(dataset, config.task, learns=False)
    _warn_of_other_data(config, record)
    loader = _loader(dataclasses.replace(config, dataset=dataset), record, split, device)
    about = _about(config, split)
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
    then, now = record.get("content"), fingerprint.of_data(config.dataset)
    if then is not None and now is not None and then.get("data") not in (None, now):
        warn("the dataset's files are other than those of the run")


def _about(config: RunConfig, split: str) -> About:
    """By the path of its file where each has one, by its row in a table, else by its number alone."""
    dataset = config.dataset
    if isinstance(dataset, datasets.ImageFolder | datasets.SegmentationFolder):
        root, part = Path(dataset.root), split
        if split == "val" and not (root / "val").is_dir():  # held out of train
            part = "train"
        if isinstance(dataset, datasets.ImageFolder):
            paths = list_images(root, part).files  # type: ignore[arg-type]
        else:
            paths = [pair.image for pair in list_pairs(root, part)]  # type: ignore[arg-type]
        return lambda index: {"path": paths[index]}
    if isinstance(dataset, table.TableConfig):
        path, number = (
            str(table.found(dataset)),
            len(table.load(dataset, config.task, learns=False).features),
        )
        train, test = indexing.split(number, dataset.test_fraction, None)
        rows: list[int] = (test if split == "test" else train).tolist()
        return lambda index: {"path": path, "row": rows[index] + 1}
    return lambda index: {"index": index}
