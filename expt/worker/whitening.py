"""First weights that whiten the images that are trained on, alike on all workers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from expt.config.schema import Whitening
from expt.data.build import Data
from expt.data.loading import Loader, ShardedLoader
from expt.errors import ConfigError
from expt.models import whitening
from expt.training import collectives
from expt.training.collectives import Worker


def whiten(wanted: Whitening, module: nn.Module, data: Data, worker: Worker) -> None:
    """Set the weights of the layer that is to be whitened as rank 0 finds them; a collective.

    Raises ConfigError for another layer than whitening can be done with, and where there are no
    images."""
    layer = whitening.convolution(module, wanted.layer)
    inputs = data.blank(1).inputs
    if not isinstance(inputs, Tensor) or inputs.dim() != 4 or not inputs.is_floating_point():
        raise ConfigError(
            f"whitening.layer={wanted.layer}: is of images, and the samples are none; use"
            " whitening=null"
        )
    if worker.rank == 0:
        whitening.whiten(layer, _first(data.train, wanted), eps=wanted.eps)
    collectives.broadcast([layer.weight])


def _first(loader: Loader, wanted: Whitening) -> Iterator[Tensor]:
    if not isinstance(loader, ShardedLoader):
        raise ConfigError(
            f"whitening.layer={wanted.layer}: needs images that can be read twice, and an"
            " IterableDataset's can't; use whitening=null"
        )
    return (batch.inputs for batch in loader.first(wanted.samples))
