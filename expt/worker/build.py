"""Build a worker's data, model and learner from the configuration."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from expt import machine, progress, signals
from expt.config import constraints, groups
from expt.config.identity import shown, typed_hyperparameters
from expt.config.kinds import metrics_of, only_in_evaluations
from expt.config.rules import refuse_missing
from expt.config.schema import RunConfig
from expt.dashboards.events import Writer, writer
from expt.dashboards.pictures import MOST_CLASSES, RunPictures
from expt.dashboards.tensorboard import Dashboard
from expt.data import build as data_build
from expt.data.build import Data, DataInfo
from expt.data.cache import cache_dir, digest
from expt.data.loader import Loader, StreamLoader
from expt.data.loading import Batch, Progress, Shard, mapped
from expt.errors import ConfigError, sized_by, warn
from expt.features import Classes, Features
from expt.inference.ensemble import Together
from expt.models import build as model_build
from expt.models.build import freeze
from expt.runs import tags
from expt.runs.paths import RunPaths
from expt.runs.result import read_result
from expt.tasks import extra_metrics
from expt.tasks.task import Facts, Task
from expt.training import collectives, optim, schedules, sharding
from expt.training.collectives import Worker
from expt.training.compiling import checkpoint_activations, compile_module, mode_of
from expt.training.learner import Learner, Phases, Position, ema_of, parameters_of, trained_names
from expt.training.optimizer_state import offload_states, switch
from expt.training.own_state import own_state
from expt.training.precision import Precision
from expt.worker import first_weights, parallel, watchdog
from expt.worker.custom_code import check_first_output, check_metrics

BEAT_S = 0.2
"""Seconds between reports while a dataset is read."""


@progress.phase("reading the data")
@sized_by("data")
def build_data(config: RunConfig, worker: Worker) -> Data:
    """Build the loaders of `worker`'s share of each batch."""
    with in_turn(config, worker):
        data = data_build.build(
            config.dataset,
            config.task,
            batch_size=config.batch_size,
            shard=Shard(worker.rank, worker.world_size),
            device=worker.device,
            seed=config.seed,
            drop_last=config.drop_last,
            channels_last=config.channels_last,
            num_workers=num_readers(config),
            batch_parts=config.world_size * config.micro_batches,
            eval_batch_size=config.samples_per_evaluation,
            epoch_steps=config.steps_of_uncounted,
            mixup=config.mixup,
            cutmix=config.cutmix,
            overfit_batches=config.overfit_batches,
        )
    parallel.refuse_uneven_last_batch(config, data.train.size)
    refuse_missing(config, val=data.val is not None, test=data.test is not None)
    if config.epoch_steps and not isinstance(data.train, StreamLoader):
        raise ConfigError(
            f"epoch_steps={config.epoch_steps}: is of a dataset without __len__; use"
            " epoch_steps=null, or eval_every_steps to evaluate within an epoch"
        )
    return data


def num_readers(config: RunConfig) -> int:
    """Return the number of processes that read for each worker."""
    number = getattr(config.dataset, "num_workers", "auto")
    return config.threads if number == "auto" else int(number)


@contextlib.contextmanager
def in_turn(config: RunConfig, worker: Worker) -> Iterator[None]:
    """Let workers construct a dataset in turn, without a limit in time; a collective.

    One worker of a machine constructs a custom one before all others, and one looks at pictures.
    """
    opening = config.dataset.opening()
    with contextlib.ExitStack() as stack:
        if opening != "at once":
            meet = stack.enter_context(patiently(config, worker))
        if opening == "in turn":
            stack.enter_context(_turn(lock_of(config.dataset.label), worker, meet))
        yield


@contextlib.contextmanager
def patiently(config: RunConfig, worker: Worker) -> Iterator[Callable[[], object]]:
    """Report progress while the body reads a dataset, on any worker; a collective."""
    done, meet = threading.Event(), collectives.patient_barrier()

    def beat_until_done() -> None:
        """Warn once after `timeout_s`."""
        began, patience_s = time.monotonic(), config.timeout_s
        while not (done.wait(BEAT_S) or signals.asked()):  # Ctrl-C waits for a step at most so long
            worker.beat()
            if time.monotonic() - began > patience_s:
                patience_s = math.inf
                warn(
                    f"{config.dataset.label}: rank {worker.rank} is still constructing it or"
                    f" reading its first samples after {config.timeout_s:g} s (timeout_s); it is"
                    f" here\n\n{watchdog.main_stack()}"
                )

    beats = threading.Thread(target=beat_until_done, name="construction", daemon=True)
    beats.start()
    try:
        yield meet
        meet()  # all have it
    finally:
        done.set()
        beats.join()


@contextlib.contextmanager
def _turn(file: Path, worker: Worker, meet: Callable[[], object]) -> Iterator[None]:
    """Let a machine's first worker, which may download, go first; a lock stops other runs."""
    from filelock import FileLock  # late: only for custom datasets

    if worker.local_rank:
        meet()
        yield
        return
    lock = FileLock(file)
    try:
        with contextlib.suppress(OSError, NotImplementedError):  # read-only, or without locks
            file.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        yield
    finally:
        lock.release()
    meet()


def lock_of(label: str) -> Path:
    """Return the lock file of a dataset."""
    return cache_dir() / "locks" / f"dataset-{digest([label])}.lock"


@progress.phase("building the model")
@sized_by("model")
def build_learner(
    config: RunConfig,
    data: Data,
    worker: Worker,
    *,
    begins: bool = True,
    base: Mapping[str, Any] | None = None,
) -> Learner:
    """Build the model on `worker`'s device, and all that trains it.

    Without `begins` weights will be loaded: none are fetched, nor sent by rank 0. `base` is the
    published model in the run's record, if it has begun before.
    """
    built = _build_model(config, data, worker, begins=begins, base=base)
    module, ema = built.module, built.ema
    optimizer = optim.build_optimizer(config.optimizer, module, unguarded=config.patches.unguarded)
    ratio = config.batch_size / (config.base_batch_size or config.batch_size)
    optim.scale_lr(optimizer, config.lr_scaling, ratio)
    switch(optimizer, "eval")  # until it trains: weights may be loaded
    if config.offload and worker.device.type == "cuda":
        offload_states(optimizer)
    task = _build_task(config, data.info)
    first_weights.load_frozen(worker, config)
    phases = _phases(task, module, config)
    strategy = parallel.build_strategy(
        config, built, optimizer, data, worker, phases=bool(phases), begins=begins
    )
    if config.ema and not config.is_sharded:
        ema = ema_of(module, config.ema)
    _check_first_output(config, built, data, worker)
    learner = Learner(
        module=module,
        precision=built.precision,
        task=task,
        strategy=strategy,
        extra_metrics=extra_metrics.build(
            only_in_evaluations(config.task),
            worker.device,
            data.info.features.targets,
            warns=worker.rank == 0,
        ),
        optimizer=optimizer,
        scheduler=schedules.build_scheduler(
            config.scheduler,
            optimizer,
            steps_per_epoch=len(data.train),
            total_steps=config.total_steps(len(data.train)),
            better=metrics_of(config.task),
            own=config.optimizer.groups,
        ),
        scheduler_interval=getattr(config.scheduler, "interval", "step"),
        compiled=built.compiled,
        ema=ema,
        trained=trained_names(module),
        has_closure=_has_closure(optimizer, config, built.precision, phases),
        phases=phases,
    )
    check_metrics(learner, None if config.is_sharded else data.evaluated(config.eval_split))
    return learner


def _check_first_output(
    config: RunConfig, built: parallel.Built, data: Data, worker: Worker
) -> None:
    own = config.model.target if isinstance(config.model, constraints.Target) else None
    if own and not built.compiled and config.task.takes.has_one_class:
        number = data.info.features.shapes["num_classes"]
        check_first_output(built.module, own, number, worker)


def _build_model(
    config: RunConfig, data: Data, worker: Worker, *, begins: bool, base: Mapping[str, Any] | None
) -> parallel.Built:
    """Build the model on its devices; a collective."""
    fetch = begins or getattr(config.model, "needs_base", False)
    make = module_maker(config, data, fetch=fetch, base=base)
    if config.is_sharded:  # no device is to have the whole
        module = sharding.build_empty(make, worker.device) if worker.rank else make()
    else:
        memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        module = make().to(worker.device, memory_format=memory_format)  # type: ignore[call-overload]
    parallel.lay_out_buffers(config, module, worker)
    freeze(module, config.freeze)
    memory = parallel.build_shared_memory(config, module, worker)
    module, after_step = parallel.with_batch_norm(config, module, worker, memory)
    after_step += parallel.with_buffers(config, module, worker)
    compiled = mode_of(config.compile, steps=config.total_steps(len(data.train)))
    if config.activation_checkpointing:
        checkpoint_activations(module, config.activation_checkpointing, compiled=bool(compiled))
    compile_module(module, compiled)
    precision, outline, ema = _precision(config, worker), None, None
    if config.is_sharded:
        outline = sharding.outline(module) if config.callbacks else None
        ema = parallel.shard_model(config, module, worker, precision)
    return parallel.Built(
        module, precision, bool(compiled), after_step, memory=memory, ema=ema, outline=outline
    )


def module_maker(
    config: RunConfig, data: Data, *, fetch: bool, base: Mapping[str, Any] | None = None
) -> Callable[[], nn.Module]:
    """Return a function that builds the model on the CPU."""
    example = mapped(torch.Tensor.cpu, data.blank(1).inputs)
    about = config.model, config.init, data.info.features, example
    return functools.partial(model_build.build, *about, fetch=fetch, base=base)


def _precision(config: RunConfig, worker: Worker) -> Precision:
    on_cpu = worker.device.type == "cpu"
    if on_cpu and config.amp in (True, "bf16") and machine.slow_in_bfloat16():
        worker.warn(
            f"amp={str(config.amp).lower()}: this CPU has no arithmetic in bfloat16, so float32 is"
            " probably faster; use amp=false"
        )
    return Precision(
        config.amp,
        worker.device,
        gradient_clip=config.gradient_clip,
        gradient_clip_value=config.gradient_clip_value,
        skip_non_finite=config.on_nan == "skip",
        skips_on_device=isinstance(config.optimizer, groups.SGD | groups.Adam)
        and len(groups.optimizers(config.optimizer)) == 1,
        short_backward=config.patches.backward,
    )


def _build_task(config: RunConfig, info: DataInfo) -> Task:
    facts = Facts(
        targets=info.features.targets,
        class_counts=info.class_counts,
        label_smoothing=config.label_smoothing,
        trains=True,
    )
    task: Task = config.task.build(facts)
    if (number := config.gradient_accumulation) != 1 and own_state(task):
        raise ConfigError(
            f"gradient_accumulation={number}: {type(task).__name__}.state_dict carries a state from"
            " batch to batch, and micro-batches are others; use 1, with a smaller batch_size or"
            " more workers to save memory"
        )
    return task


def _phases(task: Task, module: torch.nn.Module, config: RunConfig) -> Phases:
    if not task.phases:
        return {}
    name = type(task).__name__
    refused = config.on_nan == "skip" or config.ddp.comm_hook
    if refused or config.strategy != "ddp" or config.gradient_accumulation == "auto":
        raise ConfigError(
            f"{name}.phases: go with strategy=ddp only, and without on_nan=skip, ddp.comm_hook and"
            " gradient_accumulation=auto; leave them out"
        )
    return parameters_of(task.phases, module)


def _has_closure(
    optimizer: Optimizer, config: RunConfig, precision: Precision, phases: Phases
) -> bool:
    """Return whether the optimizer needs a closure; refuse steps that it can't compute again."""
    if not optim.needs_closure(optimizer):
        return False
    if precision.scaler.is_enabled() or config.on_nan == "skip" or config.is_sharded or phases:
        raise ConfigError(
            f"optimizer={constraints.word(config.optimizer)}: computes losses itself, so it goes"
            " with strategy=ddp only, and with neither float16 (use amp=bf16), on_nan=skip nor a"
            " task of several phases; use another optimizer"
        )
    return True


def build_position(config: RunConfig, data: Data) -> Position:
    """Build the position at the begin of the run, with its length."""
    length = len(data.train), config.total_steps(len(data.train))
    return Position(*length, epochs=config.epochs, max_steps=config.max_steps)


def build_events(config: RunConfig, paths: RunPaths, position: Position, is_done: bool) -> Writer:
    """Build the writer of TensorBoard's file, which continues after `position`, or is done."""
    charts = tags.layout(
        config.eval_split, config.world_size, metrics_of(config.task), is_sharded=config.is_sharded
    )
    settings = shown(config) | ({"resume": None} if config.resume == "auto" else {})
    typed = typed_hyperparameters(settings, read_result(paths).get("overrides", {}))
    ends = {"end_pictures": config.tensorboard.images == "end", "is_done": is_done}
    return writer(paths, typed, charts, resumed_at=position.step or None, **ends)


def build_dashboard(
    config: RunConfig, events: Writer | None, data: Data, learner: Learner, position: Position
) -> Dashboard:
    """Build the dashboard in rank 0's `events`; the other ranks take part in its collectives."""
    pictures = build_pictures(config, data.info.features)
    return Dashboard(events, learner, position, pictures, settings=config.tensorboard)


def evaluation_batches(
    loader: Loader | Together, split: str, worker: Worker, now: Progress
) -> Iterator[Batch]:
    """Yield a worker's batches of a split, and report progress before each."""
    with progress.phase(f"evaluating {split}", loader.size) as here:
        for batch in loader.evaluation():
            worker.beat()
            yield batch._replace(progress=now)
            here.done += batch.size * worker.world_size


def build_pictures(config: RunConfig, features: Features) -> RunPictures | None:
    """Build the pictures of a classifier: confusions, of images also mistakes; None for another."""
    targets, is_image = features.targets, features.inputs.is_image
    if not (config.task.takes.has_one_class and isinstance(targets, Classes)):
        return None
    if not is_image and len(targets.names) > MOST_CLASSES:
        return None
    channels, dataset = features.shapes["channels"] if is_image else 0, config.dataset
    mean, std = dataset.mean or [0.0] * channels, dataset.std or [1.0] * channels
    return RunPictures(targets.names, mean=mean, std=std)
