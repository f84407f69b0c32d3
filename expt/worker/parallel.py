"""Build the parts of a model that several workers share: buffers, strategy and shards."""

from __future__ import annotations

import inspect
import itertools
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from expt.config import constraints
from expt.config.schema import POWERSGD_BEGINS, RunConfig
from expt.data import changes
from expt.data.build import Data
from expt.errors import ConfigError, first_line, listed
from expt.training import batch_norm, collectives, patches, sharding
from expt.training.collectives import Worker
from expt.training.learner import ema_of
from expt.training.parameter_groups import sparse_weights
from expt.training.precision import Autocast, Precision
from expt.training.shared_memory import SharedMemory, average_bucket
from expt.training.strategy import DDP, Averaging, Fitting, Sharded, Strategy
from expt.worker.rank_health import UNEQUAL

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": None}


def refuse_uneven_last_batch(config: RunConfig, samples: int) -> None:
    """Raise ConfigError where batch_norm=sync would count padding of an epoch's last batch."""
    left, parts = samples % config.batch_size, config.world_size * config.micro_batches
    is_cut = config.batch_norm == "sync" and config.world_size > 1 and not config.drop_last
    if is_cut and left % parts and (config.micro_batches > 1 or left < config.world_size):
        raise ConfigError(
            f"batch_norm=sync: an epoch's last batch has {left} of {samples} samples, which can't"
            f" be cut into {parts} equal micro-batches of {config.world_size} workers; use"
            " drop_last=true, or another batch_size"
        )


def with_batch_norm(
    config: RunConfig, module: nn.Module, worker: Worker, memory: SharedMemory | None
) -> tuple[nn.Module, list[Callable[[], None]]]:
    """Return the model with the wanted batch norms, and the collectives that end their step."""
    # A function, which copies of the model share: the memory itself can't be copied.
    gather = (lambda values: memory.gather(values)) if memory else collectives.stack_across_workers
    if config.batch_norm == "groups":
        batch_norm.group(module, config.batch_norm_group)
        if worker.world_size > 1:
            return module, [batch_norm.averaging_of_statistics(module, gather)]
    if config.batch_norm == "sync" and worker.device.type == "cuda":
        batch_norm.of_torch(module)  # refuses others, such as those of timm, with an activation
        return nn.SyncBatchNorm.convert_sync_batchnorm(module), []
    if config.batch_norm == "sync" and worker.world_size > 1:
        batch_norm.synchronise(module, gather)
    return module, []


@torch.no_grad()
def lay_out_buffers(config: RunConfig, module: nn.Module, worker: Worker) -> None:
    """Give each worker buffers that can be sent, before anything holds one; a collective.

    Expanded ones get memory that can be written to. Raises ConfigError for sparse ones, and for
    types that the backend does not send.
    """
    if worker.world_size > 1 and config.strategy != "dp":
        kinds = {(each.dtype, each.layout): name for name, each in module.named_buffers()}
        for (dtype, layout), name in kinds.items():
            try:  # not by itself: torch leaves out a collective of a meta tensor
                one = torch.zeros(1, 1, dtype=dtype, layout=layout, device=worker.device)
                collectives.broadcast([one])
            except (RuntimeError, TypeError) as error:
                raise ConfigError(
                    f"model: workers can't send the buffer {name} to each other: it is {dtype},"
                    f" {layout} ({first_line(error)}); use world_size=1, or a dense one of another"
                    " type, such as torch.int32"
                ) from error
        for buffer in module.buffers():
            if 0 in buffer.stride() and not buffer.is_meta:
                buffer.data = buffer.clone(memory_format=torch.contiguous_format)
    if config.is_sharded:
        sharding.fill([*module.buffers()], worker)


def with_buffers(config: RunConfig, module: nn.Module, worker: Worker) -> list[Callable[[], None]]:
    """Return the collective that sends rank 0's buffers after a step, if training may read them.

    DistributedDataParallel would broadcast before each forward pass, and so change tensors that an
    earlier one of the same step has saved for its backward pass.
    """
    is_alone = worker.world_size == 1 or config.strategy == "dp"
    if is_alone or not _trains_by_buffers(config, module):
        return []
    built = [*module.buffers()]  # one that a forward pass puts in place of these is the worker's
    steps, known = itertools.count(1), set[str]()
    # One that a forward pass makes is refused after the step.
    trained = {} if config.is_sharded else dict(module.named_parameters())

    def broadcast() -> None:
        number = next(steps)
        if not number & (number - 1):  # the first, second, fourth, eighth, ...
            _compare_workers(module, trained, worker, known)
        collectives.broadcast(built)

    return [broadcast]


def _compare_workers(
    module: nn.Module, parameters: Mapping[str, Tensor], worker: Worker, known: set[str]
) -> None:
    """Refuse parameters, and warn of buffers not `known`, that differ by worker; a collective."""
    instance_norms = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
    norms = (*batch_norm.KINDS, nn.SyncBatchNorm, *instance_norms)
    statistics = _buffers_in(each for each in module.modules() if isinstance(each, norms))
    mine = {
        name: changes.digest(each)
        for name, each in (*parameters.items(), *module.named_buffers())
        if id(each) not in statistics and name not in known
    }
    every = collectives.gather_across_workers(mine)
    names = [name for name in mine if any(one.get(name) != mine[name] for one in every)]
    trained = [name for name in names if name in parameters]
    if trained and len(collectives.kinds_of_devices(worker.device)) == 1:
        raise ConfigError(f"model: {listed(trained)}: differs between workers: {UNEQUAL}")
    known.update(names)
    if buffers := [name for name in names if name not in trained]:
        worker.warn(
            f"model: {listed(buffers)}: has other values on other workers after a step; the next"
            " step and checkpoints use rank 0's; make it equal on all, or keep each worker's own in"
            " a custom task (state_dict)"
        )


def _buffers_in(layers: Iterable[nn.Module]) -> set[int]:
    return {id(buffer) for layer in layers for buffer in layer.buffers(recurse=False)}


class Built(NamedTuple):
    """A model that lies on its devices, before it has an optimizer."""

    module: nn.Module
    precision: Precision
    compiled: bool
    after_step: Sequence[Callable[[], None]]
    """Collectives that end a step."""
    memory: SharedMemory | None
    ema: AveragedModel | None
    """The moving average of a sharded model."""
    outline: nn.Module | None
    """The model before it was sharded, for callbacks."""


def build_strategy(
    config: RunConfig,
    built: Built,
    optimizer: Optimizer,
    data: Data,
    worker: Worker,
    *,
    phases: bool,
    begins: bool,
) -> Strategy:
    """Choose the strategy of a step, and wrap the model for it; a collective."""
    module, size, interleaved = built.module, worker.world_size, config.batch_norm != "per_worker"
    common = size, config.micro_batches, interleaved, built.after_step, built.memory
    sparse = sparse_weights(module)
    if config.is_sharded:
        unused = None
        if _is_custom(config):
            unused = sharding.Unused(module, worker.device, bool(config.compile))
        return Sharded(
            module,
            *common,
            worker=worker,
            shards=shards_of(config, worker),
            blank=data.blank,
            reduces_each=config.sharding.reduce_each_part,
            unused=unused,
            outline=built.outline,
        )
    if config.gradient_accumulation == "auto":
        may_miss = config.ddp.find_unused_parameters or size == 1
        return Fitting(
            module,
            *common,
            worker=worker,
            optimizer=optimizer,
            allows_unused=may_miss,
            sparse=sparse,
        )
    if config.strategy == "dp":
        if size > 1:  # as torchrun starts it
            raise ConfigError("strategy=dp: has one process for all GPUs; use python -m expt")
        within = Autocast(module, built.precision.autocast)
        return Strategy(nn.DataParallel(within, list(worker.gpus) or None), *common)
    if size == 1 or not any(one.requires_grad for one in module.parameters()):
        return Strategy(module, *common)
    if config.ddp.comm_hook:
        _refuse_sparse(module, f"ddp.comm_hook={config.ddp.comm_hook}", "leave it out")
    if phases or sparse:
        collectives.broadcast_parameters(module)
        return Averaging(module, *common, optimizer=optimizer, sparse=sparse)
    return DDP(_distributed(config, built, worker, begins), *common, optimizer=optimizer)


def _refuse_sparse(module: nn.Module, setting: str, fix: str) -> None:
    sparse = sparse_weights(module)
    if names := [name for name, one in module.named_parameters() if one in sparse]:
        why = f"can't take the sparse gradients of {listed(names)}"
        raise ConfigError(f"{setting}: {why}; {fix}, or give the layer sparse=False")


def _distributed(
    config: RunConfig, built: Built, worker: Worker, begins: bool
) -> DistributedDataParallel:
    wrap = patches.data_parallel if config.patches.unguarded else DistributedDataParallel
    parallel = wrap(
        built.module,
        device_ids=[worker.device.index] if worker.device.type == "cuda" else None,
        find_unused_parameters=config.ddp.find_unused_parameters,
        static_graph=config.ddp.static_graph,
        gradient_as_bucket_view=config.ddp.gradient_as_bucket_view,
        bucket_cap_mb=config.ddp.bucket_cap_mb,
        **without_broadcasts(built.module, begins=begins),
    )
    if hook := config.ddp.comm_hook:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=POWERSGD_BEGINS)
            parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            parallel.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
    elif built.memory:
        parallel.register_comm_hook(built.memory, average_bucket)
    return parallel


def _is_custom(config: RunConfig) -> bool:
    return any(isinstance(each, constraints.Target) for each in (config.model, config.task))


def _trains_by_buffers(config: RunConfig, module: nn.Module) -> bool:
    """Return whether training may read a buffer, which each step then broadcasts from rank 0.

    Only evaluations read those of batch norms, and broadcast them before. Those that are no part of
    the model's state, such as positions, are constants.
    """
    if _is_custom(config):
        return True
    statistics = _buffers_in(filter(batch_norm.is_known, module.modules()))
    state, named = module.state_dict().keys(), module.named_buffers()
    return any(name in state and id(buffer) not in statistics for name, buffer in named)


def without_broadcasts(module: nn.Module, *, begins: bool = True) -> dict[str, Any]:
    """Return settings by which DistributedDataParallel broadcasts once, parameters if `begins`."""
    collectives.broadcast(module.buffers())  # which the settings may drop, too
    since_2_15 = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if since_2_15 else "broadcast_buffers"
    lacks = dict(module.named_parameters()).keys() - module.state_dict().keys()
    return {name: False, "init_sync": begins or bool(lacks)}  # else each worker loads all


def build_shared_memory(
    config: RunConfig, module: nn.Module, worker: Worker
) -> SharedMemory | None:
    """Return the shared memory for gradients, if the run uses it; a collective."""
    one_machine = worker.local_world_size == worker.world_size > 1
    trained = [one for one in module.parameters() if one.requires_grad]
    plain = all(one.dtype == torch.float32 and one.device.type == "cpu" for one in trained)
    wanted = config.ddp.shared_memory and not config.ddp.comm_hook and not config.is_sharded
    wanted &= config.gradient_accumulation != "auto"
    in_order = platform.machine() == "x86_64"  # workers see stores as they were made
    if not (wanted and one_machine and plain and in_order):
        return None
    return SharedMemory(rank=worker.rank, world_size=worker.world_size, timeout_s=config.timeout_s)


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


def shard_model(
    config: RunConfig, module: nn.Module, worker: Worker, precision: Precision
) -> AveragedModel | None:
    """Shard `module` and its moving average, and return the latter."""
    _refuse_sparse(module, f"strategy={config.strategy}", "use strategy=ddp")
    wanted, param_dtype = config.sharding, _param_dtype(config, module, precision)
    # Before a parameter is on the device, which has no room for two whole models.
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
    if ema is not None:  # its shards begin as the model's
        ema.update_parameters(module)
        ema.n_averaged.zero_()
    return ema


def _param_dtype(config: RunConfig, module: nn.Module, precision: Precision) -> torch.dtype | None:
    """Return the dtype in which parameters are gathered; None is their own, with autocast."""
    wanted, has_norms = config.sharding.param_dtype, batch_norm.has_batch_norm(module)
    if wanted == "auto":  # statistics of batch norms are float32
        return None if has_norms else precision.dtype
    dtype = _DTYPES[wanted]
    why = "the model has batch norms, which need float32" if has_norms else ""
    if dtype != precision.dtype:
        why = why or f"amp={config.amp} computes in another type here"
    if dtype and why:
        raise ConfigError(f"sharding.param_dtype={wanted}: {why}; use auto")
    return dtype
