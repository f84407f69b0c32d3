"""A run's first weights from another run, or from a file, as far as they fit its model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from expt.config.schema import RunConfig
from expt.errors import CheckpointError, ConfigError, warn
from expt.models.partial_load import Fit, load_some, plain_weights, what_fits
from expt.runs import checkpoint, checkpoint_file
from expt.runs.named_checkpoint import weights_file
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.sharding import is_sharded
from expt.training.whole_state import scattered
from expt.worker import other_scale

_MEND = "save it by torch.save(model.state_dict(), FILE)"


class Loaded(NamedTuple):
    """What rank 0 knows of them."""

    about: Mapping[str, Any] = MappingProxyType({})
    """For result.json, see expt.runs.result.Begun."""
    config: Mapping[str, Any] = MappingProxyType({})
    """All settings of the run that wrote them; empty for none."""


def begin_with(
    config: RunConfig,
    module: nn.Module,
    worker: Worker,
    standardised: Mapping[str, Sequence[float]],
) -> Mapping[str, Any]:
    """Load those that the run names, if it does; returns what result.json is to say of them."""
    if config.weights is None:
        if worker.rank == 0:
            other_scale.warn_of_published(config, module)
        return {}
    loaded = load(module, config.weights, worker)
    if worker.rank == 0:
        other_scale.warn_of_runs(config, loaded.config, standardised)
    return loaded.about


def load(module: nn.Module, given: str, worker: Worker) -> Loaded:
    """Load into `module` what fits of `given`, on every worker what rank 0 reads; it tells what did
    not fit.

    Of a module that is sharded each worker gets its part. Raises ConfigError where no parameter
    fits, or the file holds no weights."""
    loaded = Loaded()
    fitting: dict[str, Tensor] | None = None
    if worker.rank == 0:
        file = weights_file(given)
        content = _read(file, given)
        state = _weights_in(content, file, given, module.state_dict().keys())
        fit = what_fits(module, state)
        fitting = {name: state[name] for name in fit.loaded}
        misfits = fit.misfits()
        if not {name for name, _ in module.named_parameters()} & {*fit.loaded}:
            raise ConfigError(
                f"weights={given}: {file} fits this model nowhere ({misfits}); give weights of its"
                " like"
            )
        if misfits:
            warn(f"weights={given}: {len(fit.loaded)} tensors are loaded; {misfits}")
        loaded = _about(content, fit)
    own = module.state_dict()
    if any(map(is_sharded, own.values())):
        load_some(module, scattered(fitting, lambda path: own[path[0]], worker.device))
        return loaded
    load_some(module, fitting or {})
    collectives.broadcast_parameters(module)
    return loaded


def _about(content: Any, fit: Fit) -> Loaded:
    told = content if isinstance(content, Mapping) else {}
    about: dict[str, Any] = {
        "left_out": [*fit.missing, *(each.partition(" ")[0] for each in fit.other_shape)]
    }
    if isinstance(position := told.get("position"), Mapping):
        about |= {"epoch": position.get("epoch"), "average": "ema" in told}
    config = told.get("config")
    return Loaded(about, config if isinstance(config, Mapping) else {})


def _read(file: Path, given: str) -> Any:
    def read() -> Any:
        checkpoint_file.check_sums(file)
        return checkpoint.load(file, without=("optimizer",))

    try:
        return checkpoint_file.read_steady(file, read)
    except CheckpointError as error:
        raise ConfigError(f"weights={given}: {error}") from error
    except (
        Exception
    ) as error:  # RuntimeError, UnpicklingError, EOFError, ...: damaged, or with code in it
        raise ConfigError(
            f"weights={given}: {file} can't be read as weights ({type(error).__name__}: it is"
            f" damaged, or holds more than tensors); {_MEND}"
        ) from error


def _weights_in(content: Any, file: Path, given: str, names: Collection[str]) -> dict[str, Tensor]:
    state = plain_weights(content, names)
    if not (state and all(isinstance(value, Tensor) for value in state.values())):
        raise ConfigError(f"weights={given}: {file} holds no state_dict; {_MEND}")
    return state
