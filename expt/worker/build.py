"""From a run's configuration to what a worker trains, and on what."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from expt.config import groups
from expt.config.identity import hyperparameters, shown
from expt.config.schema import RunConfig
from expt.data import build as data_build
from expt.data.build import Data
from expt.data.files import refuse_missing
from expt.data.loading import Shard
from expt.errors import ConfigError, warn
from expt.models import build as model_build
from expt.runs import tags
from expt.runs.paths import RunPaths
from expt.tensorboard.dashboard import Dashboard
from expt.tensorboard.events import Writer, writer
from expt.tensorboard.run_pictures import RunPictures
from expt.training import batch_norm, collectives, optim, shared_memory
from expt.training.collectives import Worker
from expt.training.learner import Learner, Position
from expt.training.observer import Observer
from expt.training.patches import ddp_times, onednn_linear, unguarded
from expt.training.precision import Precision
from expt.training.shared_memory import SharedMemory, average_gradients
from expt.worker.profiling import StepProfiler
from expt.worker.save_times import SaveTimes
from expt.worker.steps import Steps


def build_data(config: RunConfig, worker: Worker) -> Data:
    """The loaders of `worker`'s share of each batch."""
    num_workers: int | str = getattr(config.dataset, "num_workers", "auto")
    data = data_build.build(
        config.dataset,
        batch_size=config.batch_size,
        shard=Shard(worker.rank, worker.world_size),
        device=worker.device,
        seed=config.seed,
        drop_last=config.drop_last,
        channels_last=config.channels_last,
        num_workers=num_workers if isinstance(num_workers, int) else config.threads,
        batch_parts=config.world_size * config.gradient_accumulation,
    )
    refuse_missing(config, val=data.val is not None, test=data.test is not None)
    return data


def build_learner(config: RunConfig, data: Data, worker: Worker) -> Learner:
    """The model on `worker`'s device, and all that trains it; weights come from torch's global generator."""
    info = data.info
    module = model_build.build(
        config.model, config.init, channels=info.channels, image_size=info.image_size, num_classes=info.num_classes
    )
    if isinstance(config.model, groups.Target) and not config.compile:
        _check_first_output(module, config.model.target, info.num_classes, warns=worker.rank == 0)
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    module.to(worker.device, memory_format=memory_format)  # type: ignore[call-overload]
    memory = _shared_memory(config, module, worker)
    _refuse_uneven_last_batch(config, data.train.size)
    module, average_statistics = _with_batch_norm(config, module, worker, memory)
    if config.onednn and worker.device.type == "cpu":
        onednn_linear.use_for_linear(module)
    if config.compile:
        module.compile(mode="default" if config.compile is True else config.compile)
    optimizer = optim.build_optimizer(config.optimizer, module.parameters(), unguarded=config.patches.unguarded)
    parallel, all_reduce_s = _parallelise(module, config, worker, memory)
    optim.scale_lr(optimizer, config.lr_scaling, config.batch_size / (config.base_batch_size or config.batch_size))
    return Learner(
        module=module,
        parallel=parallel,
        average_statistics=average_statistics,
        all_reduce_s=all_reduce_s,
        optimizer=optimizer,
        scheduler=optim.build_scheduler(
            config.scheduler,
            optimizer,
            steps_per_epoch=len(data.train),
            total_steps=total_steps(config, data),
        ),
        scheduler_interval=getattr(config.scheduler, "interval", "step"),
        precision=Precision(
            config.amp,
            worker.device,
            gradient_clip=config.gradient_clip,
            skip_non_finite=config.on_nan == "skip",
            short_backward=config.patches.backward,
        ),
        world_size=worker.world_size,
        compiled=bool(config.compile),
        overwrites=bool(config.compile) or config.model.name == "_target_",
        label_smoothing=config.label_smoothing,
        gradient_accumulation=config.gradient_accumulation,
    )


def _check_first_output(module: nn.Module, target: str, num_classes: int, *, warns: bool) -> None:
    """Have the first output of a person's own model looked at: what torch says of a wrong one is a riddle."""

    def check(_: nn.Module, __: object, output: object) -> None:
        hook.remove()
        shape = f"a tensor of shape {list(output.shape)}" if isinstance(output, torch.Tensor) else None
        if not isinstance(output, torch.Tensor) or output.dim() != 2:
            what = shape or f"a {type(output).__name__}"
            raise ConfigError(f"model._target_={target}: gives {what}; return one tensor, [images, num_classes]")
        gives = f"gives {output.shape[1]} outputs for each image, and there are {num_classes} classes"
        mend = "let its last layer have num_classes, which it is given"
        if output.shape[1] < num_classes:
            raise ConfigError(f"model._target_={target}: {gives}; {mend}")
        if output.shape[1] > num_classes and warns:
            warn(f"model._target_={target}: {gives}: the others are never right; {mend}")

    hook = module.register_forward_hook(check)


def build_position(config: RunConfig, data: Data) -> Position:
    """The beginning of the run, and how far it is to go."""
    return Position(steps_per_epoch=len(data.train), total_steps=total_steps(config, data))


def build_save_times(config: RunConfig, worker: Worker) -> SaveTimes:
    """When checkpoints are due; it is rank 0's clock that counts."""
    due = config.checkpoint
    minutes = due.every_minutes if worker.rank == 0 else None
    return SaveTimes(every_steps=due.every_steps, every_epochs=due.every_epochs, every_minutes=minutes)


def build_steps(
    config: RunConfig,
    paths: RunPaths,
    learner: Learner,
    worker: Worker,
    *,
    typed_at: float,
    beat: Callable[[], None],
) -> Steps:
    """What is done after each step; rank 0 traces some, where that is asked for."""
    profiler = None
    if config.profile and worker.rank == 0:
        profiler = StepProfiler(paths.trace, paths.operators, worker.device)
    return Steps(learner, worker.device, typed_at=typed_at, beat=beat, profiler=profiler)


def build_observer(
    config: RunConfig,
    paths: RunPaths,
    data: Data,
    learner: Learner,
    position: Position,
    worker: Worker,
    resumed_at: int | None,
) -> Observer:
    """What TensorBoard shows of the run, which was resumed after the step `resumed_at`; rank 0 has its file."""
    events = None
    if worker.rank == 0:
        charts = tags.layout(config.eval_split, worker.world_size)
        events = writer(paths, hyperparameters(shown(config)), charts, resumed_at=resumed_at)
    return build_dashboard(config, events, data, learner, position)


def build_dashboard(
    config: RunConfig, events: Writer | None, data: Data, learner: Learner, position: Position
) -> Dashboard:
    """What is drawn into `events`, and what on other ranks helps."""
    wanted, dataset, channels = config.tensorboard, config.dataset, data.info.channels
    mean, std = dataset.mean or [0.0] * channels, dataset.std or [1.0] * channels
    return Dashboard(
        events,
        learner,
        position,
        RunPictures(data.info.class_names, mean=mean, std=std),
        image_shape=data.info.image_shape,
        images=wanted.images,
        graph=False if config.compile and wanted.graph == "auto" else wanted.graph,
        norms=wanted.norms,
        histograms=wanted.histograms,
    )


def total_steps(config: RunConfig, data: Data) -> int:
    """Optimiser steps of the whole run."""
    steps = config.epochs * len(data.train)
    return min(steps, config.max_steps or steps)


def _refuse_uneven_last_batch(config: RunConfig, images: int) -> None:
    """Raise ConfigError where a worker has no image of an epoch's last batch, or fewer parts, and sync needs all alike.

    What it would compute in place of an image would count in the statistics of all.
    """
    left, parts = images % config.batch_size, config.world_size * config.gradient_accumulation
    if config.batch_norm != "sync" or config.world_size == 1 or config.drop_last or left % parts == 0:
        return
    if config.gradient_accumulation > 1 or left < config.world_size:
        each = f" in {config.gradient_accumulation} parts each" if config.gradient_accumulation > 1 else ""
        raise ConfigError(
            f"batch_norm=sync: an epoch's last batch has {left} of {images} images, which {config.world_size} workers"
            f"{each} cannot share alike; use drop_last=true, or another batch_size"
        )


def _with_batch_norm(
    config: RunConfig, module: nn.Module, worker: Worker, memory: SharedMemory | None
) -> tuple[nn.Module, Callable[[], None]]:
    """The model with the batch norms that are wanted, and what ends a step for them; see Learner."""
    if config.batch_norm != "per_worker" and worker.rank == 0 and not batch_norm.is_in(module):
        warn(f"batch_norm={config.batch_norm}: the model has no batch norm, so that this changes nothing")
    # A function, which copies of the model share: the memory itself can't be copied.
    gather = (lambda values: memory.gather(values)) if memory else collectives.stack_across_workers
    if config.batch_norm == "groups":
        batch_norm.group(module, config.batch_norm_group)
        if worker.world_size > 1:
            return module, batch_norm.averaging_of_statistics(module, gather)
    if config.batch_norm == "sync" and worker.device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module), lambda: None
    if config.batch_norm == "sync" and worker.world_size > 1:
        batch_norm.synchronise(module, gather)
    return module, lambda: None


def _parallelise(
    module: nn.Module, config: RunConfig, worker: Worker, memory: SharedMemory | None
) -> tuple[nn.Module, Callable[[int], float]]:
    """The model that is trained, and what tells how long its gradients' averaging has taken; see Learner."""
    if config.strategy == "dp":
        if worker.world_size > 1:  # torchrun has started it, and says so
            raise ConfigError("strategy=dp: has one process for all GPUs; start it with python -m expt")
        return nn.DataParallel(module), lambda _: 0.0
    if worker.world_size == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
        return module, lambda _: 0.0
    data_parallel = unguarded.data_parallel if config.patches.unguarded else DistributedDataParallel
    parallel = data_parallel(
        module,
        device_ids=[worker.device.index] if worker.device.type == "cuda" else None,
        find_unused_parameters=config.ddp.find_unused_parameters,
        static_graph=config.ddp.static_graph,
        gradient_as_bucket_view=config.ddp.gradient_as_bucket_view,
        bucket_cap_mb=config.ddp.bucket_cap_mb,
    )
    if config.ddp.comm_hook:
        _compress(parallel, config.ddp.comm_hook)
    elif memory:
        parallel.register_comm_hook(memory, average_gradients)
        return parallel, lambda _: memory.spent_s
    return parallel, functools.partial(ddp_times.all_reduce_s, parallel)


def _shared_memory(config: RunConfig, module: nn.Module, worker: Worker) -> SharedMemory | None:
    """What the workers exchange gradients and statistics by, where they can and are to; a collective."""
    one_machine = worker.local_world_size == worker.world_size > 1
    plain = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in module.parameters() if p.requires_grad)
    wanted = config.ddp.shared_memory and not config.ddp.comm_hook
    if not (wanted and one_machine and plain and shared_memory.is_supported()):
        return None
    return SharedMemory(rank=worker.rank, world_size=worker.world_size, timeout_s=config.timeout_s)


def _compress(parallel: DistributedDataParallel, hook: str) -> None:
    """Let gradients travel in fewer bytes; torch's own hooks, imported only here."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "powersgd":
        # Rank 1 from the tenth step on, as the hook's documentation advises: before, it needs the exact gradients.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=10)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        compress = default_hooks.bf16_compress_hook if hook == "bf16" else default_hooks.fp16_compress_hook
        parallel.register_comm_hook(None, compress)
