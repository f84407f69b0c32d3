"""Models of several workers: batch norms, buffers, averaged gradients, and sharding."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from expt.config import constraints
from expt.config.schema import RunConfig
from expt.data import changes
from expt.data.build import Data
from expt.data.loading import Batch, named_leaves
from expt.errors import ConfigError, first_line, is_out_of_memory, listed, warn
from expt.tasks.task import Task
from expt.training import batch_norm, collectives, patches, sharding, shared_memory
from expt.training.collectives import Worker
from expt.training.learner import ema_of
from expt.training.loop import in_parts, refuse_unused
from expt.training.parameter_groups import members
from expt.training.precision import Precision
from expt.training.sharding import gathered
from expt.training.shared_memory import SharedMemory, average_gradients
from expt.training.task_state import task_state
from expt.worker import random_state
from expt.worker.rank_health import UNEQUAL

T = TypeVar("T")
CPU = torch.device("cpu")


def refuse_uneven_last_batch(config: RunConfig, samples: int) -> None:
    """Raise ConfigError where batch_norm=sync would count padding of an epoch's last batch."""
    left, parts = samples % config.batch_size, config.world_size * config.micro_batches
    if config.batch_norm != "sync" or config.world_size == 1 or config.drop_last:
        return
    if left % parts and (config.micro_batches > 1 or left < config.world_size):
        raise ConfigError(
            f"batch_norm=sync: an epoch's last batch has {left} of {samples} samples, which can't"
            f" be cut into {parts} equal micro-batches of {config.world_size} workers; use"
            " drop_last=true, or another batch_size"
        )


def with_batch_norm(
    config: RunConfig, module: nn.Module, worker: Worker, memory: SharedMemory | None
) -> tuple[nn.Module, Callable[[], None]]:
    """Return the model with the wanted batch norms, and what ends a step for them; see Learner."""
    if config.batch_norm != "per_worker" and worker.rank == 0 and not batch_norm.is_in(module):
        warn(f"batch_norm={config.batch_norm}: has no effect, for the model has no batch norm")
    # A function, which copies of the model share: the memory itself can't be copied.
    gather = (lambda values: memory.gather(values)) if memory else collectives.stack_across_workers
    if config.batch_norm == "groups":
        batch_norm.group(module, config.batch_norm_group)
        if worker.world_size > 1:
            return module, batch_norm.averaging_of_statistics(module, gather)
    if config.batch_norm == "sync" and worker.device.type == "cuda":
        batch_norm.of_torch(module)  # refuses others, such as those of timm, with an activation
        return nn.SyncBatchNorm.convert_sync_batchnorm(module), lambda: None
    if config.batch_norm == "sync" and worker.world_size > 1:
        batch_norm.synchronise(module, gather)
    return module, lambda: None


def with_buffers(
    config: RunConfig, module: nn.Module, average: Callable[[], None], worker: Worker
) -> Callable[[], None]:
    """Return what ends a step: `average`, then a broadcast of buffers that training may read.

    DistributedDataParallel would broadcast before each forward pass, and so change what an earlier
    one of the same step has saved for its backward pass.
    """
    if worker.world_size == 1 or config.strategy == "dp":
        return average
    _lay_out_buffers(module, worker)
    if not _trains_by_buffers(config, module):
        return average
    built = [*module.buffers()]  # one that a forward pass puts in place of these is the worker's
    steps, known = itertools.count(1), set[str]()
    # One that a forward pass makes is refused after the step.
    trained = {} if config.is_sharded else dict(module.named_parameters())

    def end_step() -> None:
        average()
        number = next(steps)
        if not number & (number - 1):  # the first, second, fourth, eighth, ...
            _compare_workers(module, trained, worker, known)
        collectives.broadcast(module.buffers() if config.is_sharded else built)

    return end_step


@torch.no_grad()
def _lay_out_buffers(module: nn.Module, worker: Worker) -> None:
    """Give expanded buffers memory that can be written to; a collective.

    Raises ConfigError for sparse ones, and for types that the backend does not send.
    """
    kinds = {(each.dtype, each.layout): name for name, each in module.named_buffers()}
    for (dtype, layout), name in kinds.items():
        try:
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


_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _compare_workers(
    module: nn.Module, parameters: Mapping[str, Tensor], worker: Worker, known: set[str]
) -> None:
    """Refuse parameters, and warn of buffers not `known`, that differ by worker; a collective."""
    norms = (*batch_norm.KINDS, nn.SyncBatchNorm, *_INSTANCE_NORMS)
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
    if (buffers := [name for name in names if name not in trained]) and worker.rank == 0:
        warn(
            f"model: {listed(buffers)}: has other values on other workers after a step; the next"
            " step and checkpoints use rank 0's; make it equal on all, or keep each worker's own in"
            " a custom task (state_dict)"
        )


def parallelise(
    module: nn.Module,
    config: RunConfig,
    worker: Worker,
    memory: SharedMemory | None,
    precision: Precision,
    *,
    phases: bool = False,
    begins: bool = True,
) -> tuple[nn.Module, Callable[[int], float | None]]:
    """Return the model that is trained, and what measures the averaging of gradients; see Learner.

    With `phases` each averages its own, see collectives. `begins` is that of build_learner.
    """
    if config.strategy == "dp":
        if worker.world_size > 1:  # as torchrun starts it
            raise ConfigError(
                "strategy=dp: has one process for all GPUs; start it with python -m expt"
            )
        within = Autocast(module, precision.autocast)
        return nn.DataParallel(within, list(worker.gpus) or None), lambda _: None
    if config.is_sharded or config.gradient_accumulation == "auto":
        return module, lambda _: None  # it waits within the passes, or averages in Fitting
    if worker.world_size == 1 or not any(
        parameter.requires_grad for parameter in module.parameters()
    ):
        return module, lambda _: 0.0
    if phases:
        collectives.broadcast_parameters(module)
        return module, lambda _: memory.spent_s if memory else None
    data_parallel = patches.data_parallel if config.patches.unguarded else DistributedDataParallel
    parallel = data_parallel(
        module,
        device_ids=[worker.device.index] if worker.device.type == "cuda" else None,
        find_unused_parameters=config.ddp.find_unused_parameters,
        static_graph=config.ddp.static_graph,
        gradient_as_bucket_view=config.ddp.gradient_as_bucket_view,
        bucket_cap_mb=config.ddp.bucket_cap_mb,
        **without_broadcasts(module, begins=begins),
    )
    if config.ddp.comm_hook:
        _compress(parallel, config.ddp.comm_hook)
    elif memory:
        parallel.register_comm_hook(memory, average_gradients)
        return parallel, lambda _: memory.spent_s
    return parallel, lambda _: None


def _trains_by_buffers(config: RunConfig, module: nn.Module) -> bool:
    """Return whether training may read a buffer, which each step then broadcasts from rank 0.

    Only evaluations read those of batch norms, and `worker.run` broadcasts them before.
    """
    if isinstance(config.model, constraints.Target) or config.task.TARGETS == "any":
        return True
    norms = (layer for layer in module.modules() if type(layer) in batch_norm.ALL_KINDS)
    statistics = _buffers_in(norms)
    return any(id(buffer) not in statistics for buffer in module.buffers())


def _buffers_in(layers: Iterable[nn.Module]) -> set[int]:
    return {id(buffer) for layer in layers for buffer in layer.buffers(recurse=False)}


def without_broadcasts(module: nn.Module, *, begins: bool = True) -> dict[str, Any]:
    """Return settings by which DistributedDataParallel broadcasts once, parameters if `begins`."""
    collectives.broadcast(module.buffers())  # which the settings may drop, too
    since_2_15 = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if since_2_15 else "broadcast_buffers"
    lacks = dict(module.named_parameters()).keys() - module.state_dict().keys()
    return {name: False, "init_sync": begins or bool(lacks)}  # else each worker loads all


class Autocast(nn.Module):
    """A model whose forward pass is within the run's autocast, in the threads of copies too."""

    def __init__(
        self, module: nn.Module, autocast: Callable[[], AbstractContextManager[object]]
    ) -> None:
        super().__init__()
        self.module, self._autocast = module, autocast

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, within autocast."""
        with self._autocast():
            return self.module(*args, **kwargs)


def build_shared_memory(
    config: RunConfig, module: nn.Module, worker: Worker
) -> SharedMemory | None:
    """Return the shared memory for gradients, if the run uses it; a collective."""
    one_machine = worker.local_world_size == worker.world_size > 1
    plain = all(
        p.dtype == torch.float32 and p.device.type == "cpu"
        for p in module.parameters()
        if p.requires_grad
    )
    wanted = config.ddp.shared_memory and not config.ddp.comm_hook and not config.is_sharded
    wanted &= config.gradient_accumulation != "auto"
    if not (wanted and one_machine and plain and shared_memory.is_supported()):
        return None
    return SharedMemory(rank=worker.rank, world_size=worker.world_size, timeout_s=config.timeout_s)


def _compress(parallel: DistributedDataParallel, hook: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "powersgd":
        # Rank 1 from the tenth step on, as the hook's documentation advises.
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=10
        )
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        parallel.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))


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


def build_sharded(make: Callable[[], nn.Module], worker: Worker) -> nn.Module:
    """Return what `make` builds: on rank 0 on the CPU, elsewhere with meta tensors.

    A model that can't be built with meta tensors is built whole by each worker.
    """
    if worker.rank == 0:
        return make()
    before = random_state.state_dict(worker.device)
    try:
        with torch.device("meta"):
            module = make()
        if not any(tensor.is_meta for tensor in _plain_tensors(module)):
            return module
    except Exception:  # many classes: its constructor reads a meta tensor
        pass
    random_state.load_state_dict(before, worker.device)
    return make()


def _plain_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield what attributes of modules and parameters hold that torch does not know of."""
    for part in (*module.modules(), *module.parameters()):
        own = {name: value for name, value in vars(part).items() if name not in _KNOWN}
        yield from (tensor for _, tensor in named_leaves(own, ""))


_KNOWN = ("_parameters", "_buffers", "_modules")


def shard_model(
    config: RunConfig, module: nn.Module, worker: Worker, precision: Precision
) -> AveragedModel | None:
    """Shard `module` and its moving average, and return the latter.

    Raises ConfigError where it can't be sharded as configured.
    """
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


def sharded_fields(
    config: RunConfig,
    data: Data,
    module: nn.Module,
    evaluated: nn.Module,
    outline: nn.Module | None,
    worker: Worker,
) -> dict[str, Any]:
    """Return the arguments of Learner for a sharded model.

    `outline` is that of the model before it was sharded, for copies that callbacks get.
    """
    if not config.is_sharded:
        return {}
    fields: dict[str, Any] = {
        "in_step": functools.partial(
            sharding.in_step, module=evaluated, blank=data.blank, device=worker.device
        ),
        "shards": shards_of(config, worker),
        "reduces_each_micro_batch": config.sharding.reduce_each_part,
    }
    if isinstance(config.model, constraints.Target) or config.task.TARGETS == "any":
        unused = sharding.Unused(module, worker.device, compiled=bool(config.compile))
        fields["drop_unused"] = unused.drop
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


def accumulation(
    config: RunConfig, module: nn.Module, optimizer: Optimizer, task: Task, worker: Worker
) -> dict[str, Any]:
    """Return the fields of a Learner that say how it accumulates gradients; a collective.

    Raises ConfigError for a task with a state, which would go from micro-batch to micro-batch.
    """
    number = config.gradient_accumulation
    if number != 1 and task_state(task):
        raise ConfigError(
            f"gradient_accumulation={number}: {type(task).__name__}.state_dict carries a state from"
            " batch to batch, and a micro-batch has other samples; use gradient_accumulation=1,"
            " with a smaller batch_size or more workers to save memory"
        )
    fit = Fitting(config, module, optimizer, worker) if number == "auto" else None
    return {"gradient_accumulation": config.micro_batches, "fit": fit}


class Fitting:
    """Runs a step's passes for gradient_accumulation=auto, and averages their gradients.

    Where one worker lacks memory all halve what they train on at a time, and begin the step again.
    None waits for another before all are known to have their gradients.
    """

    def __init__(
        self, config: RunConfig, module: nn.Module, optimizer: Optimizer, worker: Worker
    ) -> None:
        """Give all workers rank 0's weights; a collective."""
        self._module, self._optimizer = module, optimizer
        self._worker, is_alone = worker, worker.world_size == 1
        self._allows_unused = config.ddp.find_unused_parameters or is_alone
        self.at_a_time: int | None = None
        """The samples that a worker trains on at a time; None is its share of a batch."""
        norms = any(isinstance(one, nn.SyncBatchNorm) for one in module.modules())
        if norms and not is_alone:
            raise ConfigError(
                "gradient_accumulation=auto: in the model's SyncBatchNorm workers wait for one"
                " that may lack memory; give a number"
            )
        # To ask GPUs would wait for them
        self._group: Any = None if is_alone else dist.new_group(backend="gloo")
        collectives.broadcast_parameters(module)

    def __call__(self, passes: Callable[[int], T], batch: Batch) -> T:
        """Return what `passes` does for a number of micro-batches."""
        share, before = -(-batch.global_size // self._worker.world_size), self.at_a_time
        trained = [p for p in members(self._optimizer.param_groups) if p.requires_grad]
        while True:
            restore, size, found = self._noted(), min(self.at_a_time or share, share), None
            try:
                found = passes(-(-share // size))
                collectives.reserve_bucket(trained)
            except Exception as error:
                is_least = size == 1 or len(in_parts(batch, batch.size / 2)) == 1
                if is_least or not is_out_of_memory(error):
                    raise
                found = None
            (lacks,) = collectives.max_across_workers([found is None], CPU, self._group)
            if found is not None and not lacks:
                break
            # Out of the `except`: its traceback would keep what was allocated
            self.at_a_time = -(-size // 2)
            self._optimizer.zero_grad(set_to_none=True)
            restore()
            gc.collect()
            if self._worker.device.type == "cuda":
                torch.cuda.empty_cache()
        if self.at_a_time != before and self._worker.rank == 0:
            norms = ", over which its batch norms normalise" * batch_norm.is_in(self._module)
            warn(
                f"gradient_accumulation=auto: out of memory with {min(before or share, share)}"
                f" samples at a time; from this step on there are {self.at_a_time}{norms}"
            )
        if not self._allows_unused:
            refuse_unused(self._module, {p for p in trained if p.grad is None})
        collectives.average_gradients(None, trained)
        return found

    def _noted(self) -> Callable[[], None]:
        """Copy what a forward pass may change, as checkpoints have it; return what restores it."""
        random = random_state.state_dict(self._worker.device)
        parameters = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        model = {
            name: copy.deepcopy(one)
            for name, one in self._module.state_dict().items()
            if name not in parameters
        }

        def restore() -> None:
            random_state.load_state_dict(random, self._worker.device)
            self._module.load_state_dict(model, strict=False)

        return restore
