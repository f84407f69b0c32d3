"""What a sample of a dataset looks like, without reading it where its settings say so."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from expt.config import datasets
from expt.config.schema import RunConfig
from expt.data import build as data_build
from expt.data.loading import Batch, Shard
from expt.data.text_files import vocab_size
from expt.data.tree import mapped

_KNOWN = {
    "digits": (1, (8, 8), 10),
    "mnist": (1, (28, 28), 10),
    "fashion_mnist": (1, (28, 28), 10),
    "cifar10": (3, (32, 32), 10),
    "cifar100": (3, (32, 32), 100),
}


class Sample(NamedTuple):
    """Of a dataset."""

    shapes: dict[str, Any]
    """As a model may ask for them, see DataInfo."""
    inputs: Any
    targets: Any
    about: dict[str, Any]
    """More that a task wants: counts and names of classes, where targets lie."""

    def batch(self, size: int) -> Batch:
        """So many blank samples."""
        inputs, targets = mapped(
            lambda one: one.new_zeros(size, *one.shape), (self.inputs, self.targets)
        )
        return Batch(inputs, targets, size)


def sample(config: RunConfig, tokens: int | None = None) -> Sample:
    """One of the run's dataset; of a text whose tokenizer is not there `tokens` is the size of the
    vocabulary.

    Raises ConfigError and DataError where it must be read to be known, and can't.
    """
    dataset = config.dataset
    if isinstance(dataset, datasets.Text):
        window = torch.zeros(dataset.context, dtype=torch.int64)
        shapes = {"vocab_size": tokens or vocab_size(dataset), "context": dataset.context}
        return Sample(shapes, window, window, {})
    if isinstance(dataset, datasets.Synthetic):
        return _of_images(dataset.channels, dataset.image_size, dataset.num_classes)
    if known := _KNOWN.get(dataset.name):
        return _of_images(*known)
    data = data_build.build(
        dataset,
        config.task,
        batch_size=config.world_size * config.gradient_accumulation,
        shard=Shard(0, config.world_size),
        device=torch.device("cpu"),
        seed=config.seed,
        drop_last=False,
        channels_last=False,
    )
    names = ("class_counts", "class_names", "target_origin")
    return Sample(
        dict(data.info.shapes), *data.example, {name: getattr(data.info, name) for name in names}
    )


def _of_images(channels: int, size: tuple[int, int], num_classes: int) -> Sample:
    shapes = {"channels": channels, "image_size": size, "num_classes": num_classes}
    about = {"class_counts": (1,) * num_classes, "class_names": tuple(map(str, range(num_classes)))}
    target: Tensor = torch.zeros((), dtype=torch.int64)
    return Sample(shapes, torch.zeros(channels, *size), target, about)
