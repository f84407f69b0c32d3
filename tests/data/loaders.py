"""Loaders of images that are given as tensors: from memory, and read one by one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from expt.data.images import image_part
from expt.data.loader import Loader, loading
from expt.data.loading import LoaderOptions
from expt.data.memory import InMemory
from expt.features import Classes


def makers(
    images: Tensor, labels: Tensor, options: LoaderOptions
) -> tuple[Callable[..., Loader], Callable[..., Loader], Callable[..., Loader]]:
    """Functions that make a loader with further options: in_memory, streamed, rows."""
    every = torch.arange(len(images))
    classes = Classes(names=tuple(map(str, range(int(labels.max()) + 1))))

    def in_memory(chosen: Tensor = every, **more: Any) -> Loader:
        load = loading(InMemory(images, labels, options.device), channels=images.shape[1])
        return load(chosen, dataclasses.replace(options, **more))

    def streamed(chosen: Tensor = every, **more: Any) -> Loader:
        channels, height, width = images.shape[1:]
        part = image_part(TensorDataset(images, labels), (channels, height, width), 0, classes)
        return part.load(chosen, dataclasses.replace(options, **more))

    def rows(chosen: Tensor = every, **more: Any) -> Loader:
        load = loading(InMemory(images.flatten(1).float(), labels, options.device))
        return load(chosen, dataclasses.replace(options, **more))

    return in_memory, streamed, rows
