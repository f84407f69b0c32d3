"""From a run's configuration to a model of which each worker has a part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from expt.config import constraints
from expt.config.schema import RunConfig
from expt.data.build import Data
from expt.errors import ConfigError, warn
from expt.training import batch_norm, collectives, sharding
from expt.training.attributes import attributes_of, hand_on
from expt.training.collectives import Worker
from expt.training.ema import ema_of
from expt.training.patches import first_pass, late_values, whole_numbers, whole_tensors
from expt.training.patches.first_pass import Span
from expt.training.patches.late_values import Values
from expt.training.precision import Precision
from expt.training.shardable import Originals, Refusal, refusal, shared_memory
from expt.training.unused import Unused
from expt.training.whole_state import gathered

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": None}


def shards_of(config: RunConfig, worker: Worker) -> int:
    """How many workers share one replica of the weights; 1: each has them all."""
    if not config.is_sharded:
        return 1
    if config.strategy == "fsdp" or worker.world_size == 1:
        return worker.world_size
    shards = worker.local_world_size if config.sharding.shards == "auto" else config.sharding.shards
    if (
        shards < 2 or shards == worker.world_size or worker.world_size % shards
    ):  # hosts may have unequal numbers
        raise ConfigError(
            f"sharding.shards={shards}: {worker.world_size} workers must make several whole groups"
            " that share a replica; give a number that divides them"
        )
    return shards


def shard(
    config: RunConfig, module: nn.Module, worker: Worker, precision: Precision, values: Values
) -> AveragedModel | None:
    """Cut `module` into parts, and its moving average, which is returned where there is one.

    `values` gives those of its parameters that have none yet; all workers get rank 0's. Raises
    ConfigError where the model can't be cut as is wanted."""
    wanted = config.sharding
    _refuse(config, refusal(module, sharding.choose_units(module, wanted.wrap)))
    _refuse(config, shared_memory(module) if _is_own(config) else None)
    param_dtype = _param_dtype(config, module, precision)
    whole_numbers.read_whole_numbers()
    whole_tensors.treat_whole()
    # Before a parameter has memory, which no worker is to have for two whole models.
    ema = ema_of(module, config.ema, before=sharding.outline) if config.ema else None

    def cut(model: nn.Module, values: sharding.Fill) -> None:
        sharding.shard(
            model,
            worker,
            shards=shards_of(config, worker),
            units=sharding.choose_units(model, wanted.wrap),
            values=values,
            reshard_after_forward=wanted.reshard_after_forward,
            param_dtype=param_dtype,
            reduce_dtype=_DTYPES[wanted.reduce_dtype] or torch.float32,
        )

    originals, attributes = Originals(module) if _is_own(config) else None, attributes_of(module)
    cut(module, lambda tensors: _of_rank_0(map(values, tensors), worker.device))
    hand_on(module, attributes)
    if originals:
        _watch_first_pass(config, module, originals.kept(), worker.rank)
    if ema is not None:
        cut(
            ema.module,
            lambda tensors: [torch.empty_like(each, device=worker.device) for each in tensors],
        )
        sharding.copy_shares(module, ema.module)
    return ema


def _refuse(config: RunConfig, problem: Refusal | None) -> None:
    if problem:
        mend = ", or ".join(filter(None, [problem.mend, "use strategy=ddp"]))
        raise ConfigError(f"strategy={config.strategy}: {problem.why}; {mend}")


def _watch_first_pass(
    config: RunConfig, module: nn.Module, kept: Mapping[str, Span], rank: int
) -> None:
    """Have an own model refused that reads first weights which it has `kept`, or writes to weights
    that are dropped.
    """
    where = f"strategy={config.strategy}: the model"

    def of_read(name: str) -> ConfigError:
        return ConfigError(
            f"{where} has kept {name} in a list, a buffer or the like, where it is not trained;"
            " take it from its module where it is used, as self.layer.weight, or use strategy=ddp"
        )

    def of_write(name: str) -> ConfigError:
        return ConfigError(
            f"{where} writes to {name} in its forward pass, where it has a copy that is dropped;"
            " compute with another tensor made of it, as torch.nn.utils.parametrize does, or use"
            " strategy=ddp"
        )

    if not config.compile:
        first_pass.refuse_lost_writes(sharding.units_of(module), of_write)
    if kept and not config.compile:
        first_pass.refuse_stale_reads(module, kept, of_read)
    elif kept and rank == 0:  # a graph's operations are not seen one by one
        warn(
            f"{where} has kept {next(iter(kept))}, as a list of it would, and with compile nobody"
            " sees whether it computes with that, which is not trained; try it with compile=false,"
            " which refuses it then"
        )


def _of_rank_0(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Rank 0's, on `device`; a collective."""
    mine = [tensor.to(device, memory_format=torch.contiguous_format) for tensor in tensors]
    collectives.broadcast(mine)
    return mine


def _param_dtype(config: RunConfig, module: nn.Module, precision: Precision) -> torch.dtype | None:
    """None is that of the parameters, with autocast for the products where there is mixed
    precision.
    """
    wanted = config.sharding.param_dtype
    if wanted == "auto":
        return sharding.gathered_dtype(module, precision.dtype)
    dtype = _DTYPES[wanted]
    if dtype and batch_norm.is_in(
        module
    ):  # its statistics are float32, and it takes no others beside them
        raise ConfigError(
            f"sharding.param_dtype={wanted}: the model has batch norms, which need float32; use"
            " auto"
        )
    if dtype and dtype != precision.dtype:
        of_amp = str(precision.dtype).removeprefix("torch.")
        raise ConfigError(
            f"sharding.param_dtype={wanted}: amp={config.amp} computes in {of_amp} here; use auto"
        )
    return dtype


def build_late(config: RunConfig, make: Callable[[], nn.Module]) -> tuple[nn.Module, Values]:
    """The model that `make` makes, without memory for its parameters where it can be, and what
    gives their values.
    """
    if _is_own(config):  # who knows what else it keeps its tensors for
        return make(), lambda tensor: tensor
    return late_values.build(make)


def _is_own(config: RunConfig) -> bool:
    return isinstance(config.model, constraints.Target)


def outline(config: RunConfig, module: nn.Module) -> nn.Module | None:
    """What `copies` needs of `module`, before it is sharded, where somebody asks for copies."""
    return sharding.outline(module) if config.is_sharded and config.callbacks else None


def of_learner(
    config: RunConfig,
    data: Data,
    module: nn.Module,
    evaluated: nn.Module,
    outline: nn.Module | None,
    worker: Worker,
) -> dict[str, Any]:
    """What a Learner needs besides, for the workers to train and evaluate together what each has a
    part of.
    """
    if not config.is_sharded:
        return {}
    own = _is_own(config) or config.task.TARGETS == "any"  # the others use all
    return {
        **(
            {"drop_unused": Unused(module, worker.device, compiled=bool(config.compile)).drop}
            if own
            else {}
        ),
        **({"copy_evaluated": copies(outline, evaluated, worker)} if outline else {}),
        "in_step": functools.partial(
            sharding.in_step, module=evaluated, blank=data.blank, device=worker.device
        ),
        "shards": shards_of(config, worker),
        "reduces_each_part": config.sharding.reduce_each_part,
    }


def copies(outline: nn.Module, evaluated: nn.Module, worker: Worker) -> Callable[[], nn.Module]:
    """What gives rank 0 the whole model that is evaluated, on its device, by the `outline` of it; a
    collective.
    """

    def copy() -> nn.Module:
        state = gathered(evaluated.state_dict(), keep=worker.rank == 0)
        if worker.rank:
            return outline
        whole = sharding.outline(outline)
        whole.load_state_dict(state, assign=True)
        return whole.to(worker.device)

    return copy
