"""`prepare_once`: in which type training images are prepared, and for which that can be."""

from __future__ import annotations

import torch

from expt.config.schema import RunConfig
from expt.data.loading import Loader
from expt.data.memory import InMemoryLoader
from expt.errors import ConfigError
from expt.training.precision import autocast_dtype


def dtype(config: RunConfig, device: torch.device) -> torch.dtype | None:
    """Half precision where the model rounds its inputs to that anyway, and nothing is computed with
    them before.
    """
    if not config.prepare_once:
        return None
    return torch.float32 if config.mixup else autocast_dtype(config.amp, device) or torch.float32


def refuse_others(config: RunConfig, loader: Loader) -> None:
    """Raise ConfigError for samples that are read one by one, or are no images."""
    if config.prepare_once and not isinstance(loader, InMemoryLoader):
        raise ConfigError(
            "prepare_once=true: is of images that are held in memory and not changed by"
            f" dataset.transforms, and those of dataset={config.dataset.name} are read in each"
            " epoch, or are none; use prepare_once=false"
        )
