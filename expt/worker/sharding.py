"""From a run's configuration to a sharded model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from expt.config import constraints
from expt.config.schema import RunConfig
from expt.data.build import Data
from expt.errors import ConfigError
from expt.training import batch_norm, sharding
from expt.training.collectives import Worker
from expt.training.learner import ema_of
from expt.training.precision import Precision
from expt.training.sharding import gathered
from expt.worker import random_state

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": None}


def shards_of(config: RunConfig, worker: Worker) -> int:
    """Return how many workers share one replica of the weights; 1 if each has them all."""
    if not config.is_sharded:
        return 1
    if config.strategy == "fsdp" or worker.world_size == 1:
        return worker.world_size
    wanted = config.sharding.shards
    shards = worker.local_world_size if wanted == "auto" else wanted
    if shards < 2 or shards == worker.world_size or worker.world_size % shards:
        raise ConfigError(  # hosts may have unequal numbers
            f"sharding.shards={shards}: {worker.world_size} workers must make several whole groups"
            " that share a replica; give a number that divides them"
        )
    return shards


def build(make: Callable[[], nn.Module], worker: Worker) -> nn.Module:
    """Return what `make` builds: on rank 0 in the host's memory, elsewhere with meta tensors.

    A model that needs numbers while it is built, or keeps tensors outside of parameters and
    buffers, is built whole by each worker."""
    if worker.rank == 0:
        return make()
    before = random_state.state_dict(worker.device)
    try:
        with torch.device("meta"):
            module = make()
        if not any(map(_has_meta, _attributes(module))):
            return module
    except Exception:  # of many kinds: its constructor asks a meta tensor for numbers
        pass
    random_state.load_state_dict(before, worker.device)
    return make()


def _attributes(module: nn.Module) -> Iterator[object]:
    """Yield what modules and parameters keep beside parameters, buffers and modules."""
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield value
    for parameter in module.parameters():
        yield from vars(parameter).values()


def _has_meta(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, dict):
        return any(map(_has_meta, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_meta, value))


def shard(
    config: RunConfig, module: nn.Module, worker: Worker, precision: Precision
) -> AveragedModel | None:
    """Shard `module`, and its moving average, which is returned if there is one.

    Raises ConfigError where it can't be sharded as wanted."""
    wanted, param_dtype = config.sharding, _param_dtype(config, module, precision)
    # Before a parameter is on the device, which is not to have two whole models.
    ema = ema_of(module, config.ema, before=sharding.outline) if config.ema else None
    for model in filter(None, (module, ema and ema.module)):
        sharding.shard(
            model,
            worker,
            shards=shards_of(config, worker),
            units=sharding.choose_units(model, wanted.wrap),
            reshard_after_forward=wanted.reshard_after_forward,
            param_dtype=param_dtype,
            reduce_dtype=_DTYPES[wanted.reduce_dtype] or torch.float32,
        )
    if ema is not None:
        sharding.copy_shards(module, ema.module)
    return ema


def _param_dtype(config: RunConfig, module: nn.Module, precision: Precision) -> torch.dtype | None:
    """Return the dtype in which parameters are gathered; None is their own, with autocast."""
    wanted = config.sharding.param_dtype
    if wanted == "auto":
        return sharding.gathered_dtype(module, precision.dtype)
    dtype = _DTYPES[wanted]
    if dtype and batch_norm.is_in(module):
        raise ConfigError(
            f"sharding.param_dtype={wanted}: the model has batch norms, which need float32; use"
            " auto"
        )
    if dtype and dtype != precision.dtype:
        raise ConfigError(
            f"sharding.param_dtype={wanted}: amp={config.amp} computes in another type here; use"
            " auto"
        )
    return dtype


def of_learner(
    config: RunConfig,
    data: Data,
    module: nn.Module,
    evaluated: nn.Module,
    outline: nn.Module | None,
    worker: Worker,
) -> dict[str, Any]:
    """Return what a Learner needs besides where workers train and evaluate a sharded model.

    `outline` is that of the model before it was sharded, where callbacks get copies of it."""
    if not config.is_sharded:
        return {}
    fields: dict[str, Any] = {
        "in_step": functools.partial(
            sharding.in_step, module=evaluated, blank=data.blank, device=worker.device
        ),
        "shards": shards_of(config, worker),
        "reduces_each_part": config.sharding.reduce_each_part,
    }
    if isinstance(config.model, constraints.Target) or config.task.TARGETS == "any":
        unused = sharding.Unused(module, worker.device, compiled=bool(config.compile))
        fields["drop_unused"] = unused.drop  # all other models use all parameters
    if outline is not None:
        fields["copy_evaluated"] = functools.partial(copy_whole, outline, evaluated, worker)
    return fields


def copy_whole(outline: nn.Module, evaluated: nn.Module, worker: Worker) -> nn.Module:
    """Return the whole of `evaluated` on rank 0's device, its `outline` elsewhere; a collective."""
    state = gathered(evaluated.state_dict(), keep=worker.rank == 0)
    if worker.rank:
        return outline
    whole = sharding.outline(outline)
    whole.load_state_dict(state, assign=True)
    return whole.to(worker.device)
