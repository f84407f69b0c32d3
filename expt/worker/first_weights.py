"""A run's first weights from another run, or from a file, as far as they fit its model.

Warns where the data is normalised otherwise than for the weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from expt.config.groups import NamedModel
from expt.config.schema import RunConfig
from expt.errors import CheckpointError, ConfigError, warn
from expt.models import named
from expt.models.partial_load import Fit, load_some, plain_weights, what_fits
from expt.runs import checkpoint, checkpoint_file
from expt.runs.named_checkpoint import chosen, weights_file
from expt.runs.paths import RunPaths
from expt.runs.result import read_result
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.sharding import is_sharded, scattered

_FIX = "save it by torch.save(model.state_dict(), FILE)"


class Loaded(NamedTuple):
    """What rank 0 knows of the weights."""

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
    """Load the weights that the run names, if it does; return what result.json says of them."""
    if config.weights is None:
        if worker.rank == 0:
            warn_of_published(config, module)
        return {}
    loaded = load(module, config.weights, worker)
    if worker.rank == 0:
        _warn_of_runs(config, loaded.config, standardised)
    return loaded.about


def load(module: nn.Module, given: str, worker: Worker) -> Loaded:
    """Load into `module` what fits of `given`, which rank 0 reads; warn of what did not fit.

    A collective: each worker gets its shards of a sharded module. Raises ConfigError where no
    parameter fits, or the file holds no weights."""
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
    known = content if isinstance(content, Mapping) else {}
    about: dict[str, Any] = {
        "left_out": [*fit.missing, *(each.partition(" ")[0] for each in fit.other_shape)]
    }
    if isinstance(position := known.get("position"), Mapping):
        about |= {"epoch": position.get("epoch"), "average": "ema" in known}
    config = known.get("config")
    return Loaded(about, config if isinstance(config, Mapping) else {})


def _read(file: Path, given: str) -> Any:
    def read() -> Any:
        checkpoint_file.check_sums(file)
        return checkpoint.load(file, without=("optimizer",))

    try:
        return checkpoint_file.read_steady(file, read)
    except CheckpointError as error:
        raise ConfigError(f"weights={given}: {error}") from error
    except Exception as error:  # of many kinds: damaged, or with code in it
        raise ConfigError(
            f"weights={given}: {file} can't be read as weights ({type(error).__name__}: it is"
            f" damaged, or holds more than tensors); {_FIX}"
        ) from error


def _weights_in(content: Any, file: Path, given: str, names: Collection[str]) -> dict[str, Tensor]:
    state = plain_weights(content, names)
    if not (state and all(isinstance(value, Tensor) for value in state.values())):
        raise ConfigError(f"weights={given}: {file} holds no state_dict; {_FIX}")
    return state


def warn_of_published(config: RunConfig, module: nn.Module) -> None:
    """Warn where a model by name has published weights, and images another normalisation."""
    if isinstance(config.model, NamedModel) and config.model.pretrained and config.weights is None:
        scale = named.normalisation(config.model, module)
        if scale is not None:
            _warn(config, "model.pretrained=true", *scale)


def _warn_of_runs(
    config: RunConfig, trained_by: Mapping[str, Any], standardised: Mapping[str, Sequence[float]]
) -> None:
    """Warn where the run of the weights, with the settings `trained_by`, normalised otherwise.

    `standardised` is what this run does to each column of a table."""
    then = trained_by.get("dataset") or {}
    if "mean" in then:
        _warn(config, f"weights={config.weights}", then.get("mean"), then.get("std"))
    if standardised and then.get("standardise") and config.weights:
        run = chosen(config.weights).run
        data = read_result(RunPaths(run)).get("data") if run else None
        earlier = (data or {}).get("standardised")
        if earlier is not None and earlier != json.loads(json.dumps(standardised)):
            warn(
                f"weights={config.weights}: rows are standardised by those of this run, and not by"
                " those that the weights saw"
            )


def _warn(config: RunConfig, word: str, mean: Any, std: Any) -> None:
    ours = _shown(*(getattr(config.dataset, key, None) for key in ("mean", "std")))
    theirs = _shown(mean, std)
    if ours != theirs:
        warn(f"{word}: the weights were trained with {theirs}, and this run has {ours}")


def _shown(mean: Any, std: Any) -> str:
    if mean is None or std is None:
        return "dataset.mean=null dataset.std=null"
    return " ".join(
        f"dataset.{key}=[{','.join(f'{value:g}' for value in values)}]"
        for key, values in (("mean", mean), ("std", std))
    )
