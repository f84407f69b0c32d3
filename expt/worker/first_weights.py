"""A run's first weights from another run, or from a file, as far as they fit its model."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from expt.errors import ConfigError, warn
from expt.models.partial_load import load_what_fits, plain_weights
from expt.runs import checkpoint
from expt.runs.weights_file import weights_file
from expt.training import collectives
from expt.training.collectives import Worker

_MEND = "save it by torch.save(model.state_dict(), FILE)"


def load(module: nn.Module, given: str, worker: Worker) -> None:
    """Load into `module` what fits of `given`, on every worker what rank 0 reads; it tells what did not fit.

    Raises ConfigError where no parameter fits, or the file holds no weights.
    """
    if worker.rank == 0:
        file = weights_file(given)
        fit = load_what_fits(module, _weights_in(file, given, module.state_dict().keys()))
        misfits = fit.misfits()
        if not {name for name, _ in module.named_parameters()} & {*fit.loaded}:
            raise ConfigError(f"weights={given}: {file} fits this model nowhere ({misfits}); give weights of its like")
        if misfits:
            warn(f"weights={given}: {len(fit.loaded)} tensors are loaded; {misfits}")
    collectives.broadcast_parameters(module)


def _weights_in(file: Path, given: str, names: Collection[str]) -> dict[str, Tensor]:
    try:
        content: Any = checkpoint.load(file)
    except Exception as error:  # RuntimeError, UnpicklingError, EOFError, ...: damaged, or with code in it
        raise ConfigError(
            f"weights={given}: {file} can't be read as weights ({type(error).__name__}: it is damaged, or holds more "
            f"than tensors); {_MEND}"
        ) from error
    state = plain_weights(content, names)
    if not (state and all(isinstance(value, Tensor) for value in state.values())):
        raise ConfigError(f"weights={given}: {file} holds no state_dict; {_MEND}")
    return state
