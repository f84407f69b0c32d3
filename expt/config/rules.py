"""Settings that cannot run together, or on a machine, and that nothing else would report in time.

A rule yields the key at fault, the problem with its value, and how to fix it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from expt.config import groups
from expt.config.constraints import Target, typed, word
from expt.config.kinds import added_by, every_of, metrics_of, only_in_evaluations, own_metrics
from expt.errors import ConfigError, DataError, counted, did_you_mean
from expt.features import Anything
from expt.gpus import is_slice
from expt.machine import Machine

if TYPE_CHECKING:
    from expt.config.schema import RunConfig

Problems: TypeAlias = Iterator[tuple[str, str, str]]


def impossible(config: RunConfig, machine: Machine) -> list[str]:
    """Return a line for each setting that cannot run on `machine`, with its fix."""
    return [
        *unmeasurable(config, machine),
        *_lines(config, machine, _TRAINING),
        *config.task.problems(config),
        *(line for each in config.trackers.values() for line in each.problems(config.secrets)),
    ]


def unmeasurable(config: RunConfig, machine: Machine) -> list[str]:
    """Return those of `impossible` that concern an evaluation too."""
    return [*_lines(config, machine, _ALWAYS), *_of_data(config)]


def _lines(
    config: RunConfig, machine: Machine, rules: Iterable[Callable[[RunConfig, Machine], Problems]]
) -> Iterator[str]:
    for rule in rules:
        for key, why, fix in rule(config, machine):
            value = functools.reduce(getattr, key.split("."), config)
            shown = word(value) if hasattr(value, "name") else typed(value)
            yield f"{key}={shown}: {why}; {fix}"


def _gpus(config: RunConfig, machine: Machine) -> Problems:
    have, gpus = len(machine.gpus), config.gpu_indices
    if any(index >= have for index in gpus):
        numbering = "" if isinstance(config.gpus, int) or not have else ", counted from 0"
        why = machine.hidden or f"this machine has {counted(have, 'GPU') if have else 'no GPUs'}"
        fix = "change it, or use" if machine.hidden else "use"
        if have:
            most = f"gpus={have}" if isinstance(config.gpus, int) else f"numbers up to {have - 1}"
            fix = f"use {most}, or"
        yield "gpus", f"{why}{numbering}", f"{fix} gpus=0 to run on the CPU"
    elif len({*gpus}) < len(gpus):
        fix = f"use gpus=[{gpus[0]}] with world_size=2 and backend=gloo for two workers on one"
        yield "gpus", "names a GPU twice", fix
    elif len(gpus) > 1 and any(is_slice(machine.gpus[index]) for index in gpus):
        yield "gpus", "CUDA shows a process only one slice of a GPU (MIG)", "use gpus=1"


def _workers(config: RunConfig, machine: Machine) -> Problems:
    sharing = 1 if machine.own_gpus else machine.local_workers or config.world_size
    if machine.workers not in (None, config.world_size):
        yield "world_size", f"{machine.workers} workers were started", "leave world_size out"
    elif config.debug and config.world_size > 1:
        yield "world_size", "debug=true runs one worker in this process", "use world_size=1"
    elif config.num_gpus > sharing and config.strategy != "dp":
        debug = " (debug=true has one)" * config.debug
        why = f"{config.num_gpus} GPUs need a worker each, and there are only {sharing}{debug}"
        yield "gpus", why, f"use gpus={sharing}"
    if config.backend == "nccl" and (machine.simulated or sharing > config.num_gpus):
        yield "backend", "takes one worker for each GPU", "use backend=gloo, or other gpus"


def _on_cpu(config: RunConfig, machine: Machine) -> Problems:
    if config.num_gpus:
        return
    if config.amp == "fp16" and not machine.cpu_fp16:
        yield "amp", "this CPU does not compute in float16", "use amp=bf16 or a GPU"
    if config.compile and config.batch_norm == "sync" and config.world_size > 1:
        why = "torch.compile can't take these layers on a CPU"
        yield "batch_norm", why, "use batch_norm=groups"


def _model(config: RunConfig, machine: Machine) -> Problems:
    model = config.model
    if getattr(model, "pretrained", False) and not isinstance(config.init, groups.DefaultInit):
        yield "init.name", "would replace what model.pretrained=true loads", "use init=default"
    if isinstance(model, groups.Transformer):
        if model.width % model.heads:
            below = max(model.width // model.heads, 1) * model.heads
            near = f"{below} or {below + model.heads}"
            yield "model.width", f"must divide by model.heads={model.heads}", f"use {near}"
        elif model.positions == "rotary" and model.width // model.heads % 2:
            why = f"turns pairs of channels, and each head has {model.width // model.heads}"
            yield "model.positions", why, "use an even number, or model.positions=learned"
    if isinstance(model, groups.ConvNet):
        lengths = {key: len(getattr(model, key)) for key in ("kernels", "strides", "paddings")}
        if {*lengths.values()} != {len(model.widths)}:
            others = ", ".join(f"model.{key} has {length}" for key, length in lengths.items())
            why = f"{counted(len(model.widths), 'convolution')}, but {others}"
            yield "model.widths", why, "give each one"


def _data_parallel(config: RunConfig, machine: Machine) -> Problems:
    if config.strategy != "dp":
        return
    fix = "use strategy=ddp, which is faster too"
    if config.num_gpus < 2:
        yield "strategy", "needs at least 2 GPUs", fix
    for key, possible, why in (
        ("world_size", 1, "strategy=dp has one process for all GPUs"),
        ("compile", False, "the copies that strategy=dp makes can't be compiled"),
        ("batch_norm", "per_worker", "strategy=dp can't share batch statistics"),
        ("activation_checkpointing", (), "the copies that strategy=dp makes can't have it"),
    ):
        if getattr(config, key) != possible:
            yield key, why, fix


def _sharding(config: RunConfig, machine: Machine) -> Problems:
    if not config.is_sharded:
        return
    workers, shards = config.world_size, config.sharding.shards
    group = (machine.local_workers or workers) if shards == "auto" else shards
    if config.debug or workers < 2:
        yield "strategy", "needs at least 2 workers, and this run has one", "use strategy=ddp"
    elif config.strategy == "fsdp" and shards not in ("auto", workers):
        why = f"strategy=fsdp has one shard for each of {workers} workers"
        fix = "use strategy=hsdp for several replicas, or sharding.shards=auto"
        yield "sharding.shards", why, fix
    elif config.strategy == "hsdp" and not (2 <= group < workers and workers % group == 0):
        why = f"strategy=hsdp divides {workers} workers into equal groups of 2 or more"
        sizes = [f"sharding.shards={n}, or " for n in range(2, workers) if workers % n == 0]
        fix = f"use {''.join(sizes[:1])}strategy=fsdp with sharding.shards=auto"
        yield "sharding.shards", why, fix
    for tracker in config.send:
        if config.checkpoint.sharded is not False and getattr(config, tracker).checkpoints:
            why = "sends single files, and a sharded run may write a checkpoint in parts"
            yield f"{tracker}.checkpoints", why, "use checkpoint.sharded=false"


def _optimizer(config: RunConfig, machine: Machine) -> Problems:
    every = groups.optimizers(config.optimizer)
    if config.offload and any(isinstance(each, Target) for each in every):
        yield "offload", "a custom optimiser may not take parameters one by one", "use offload=null"
    if isinstance(config.optimizer, groups.LBFGS):
        why = "optimizer=lbfgs computes losses again within a step, with all weights as one vector"
        instead = {"fp16": "amp=bf16", "skip": "on_nan=stop", "cpu": "offload=null"}
        instead |= dict.fromkeys(("fsdp", "hsdp"), "strategy=ddp")
        for key in ("amp", "on_nan", "strategy", "offload"):
            if fix := instead.get(getattr(config, key)):
                yield key, why, f"use {fix}"
    if config.on_nan == "skip" and config.ddp.comm_hook == "powersgd":
        why = "powersgd would carry a nan into later steps"
        yield "on_nan", why, "use another ddp.comm_hook"
    if any(group.epochs for group in config.optimizer.groups) and isinstance(
        config.scheduler, groups.Plateau | groups.TargetScheduler
    ):
        why = "optimizer.groups stops training some parameters early, which this schedule can't do"
        yield "scheduler.name", why, "use constant, cosine, linear, step or one_cycle"
    own = [group.scheduler for group in config.optimizer.groups if group.scheduler]
    falls: Any = groups.Cosine | groups.Linear
    open_end = next((x for x in own if isinstance(x, falls) and x.epochs is None), None)
    if own and not isinstance(config.scheduler, falls | groups.Constant | groups.Step):
        why = "groups of optimizer.groups have schedules of their own"
        yield "scheduler.name", why, "use cosine, linear, constant or step"
    elif open_end and not isinstance(config.scheduler, falls):
        why = f"sets no end for a group's scheduler.name={open_end.name} in optimizer.groups"
        yield "scheduler.name", why, "give that one epochs, or use cosine or linear"
    if config.lr_scaling != "none" and config.base_batch_size is None:
        why = "needs the batch that optimizer.lr is meant for"
        yield "lr_scaling", why, "give it, e.g. base_batch_size=256"


def _batch(config: RunConfig, machine: Machine) -> Problems:
    parts = config.world_size * config.micro_batches
    share, rest = divmod(config.batch_size, parts)
    if rest or not share:
        by = f"{config.world_size} workers"
        if config.micro_batches > 1:
            by += f" x {config.micro_batches} micro-batches (gradient_accumulation)"
        near = f"{share * parts} or {(share + 1) * parts}" if share else f"{parts}"
        why = f"the global batch must be a multiple of {parts}, for {by}"
        yield "batch_size", why, f"use {near}"
    elif config.batch_norm == "groups" and share % (size := config.batch_norm_group):
        smaller = next((n for n in range(min(size, share), 1, -1) if share % n == 0), None)
        larger = f"batch_size={parts * size * -(-share // size)}"
        why = f"each worker computes {counted(share, 'sample')} at once, which must be whole groups"
        fix = f"batch_norm_group={smaller} or {larger}" if smaller else larger
        yield "batch_norm_group", why, f"use {fix}"


def _printing(config: RunConfig, machine: Machine) -> Problems:
    if config.print_every and config.print_every % config.log_every:
        why = f"prints what is logged, every log_every={config.log_every} steps"
        yield "print_every", why, f"use a multiple of it, or log_every={config.print_every}"


def _fitting(config: RunConfig, machine: Machine) -> Problems:
    """gradient_accumulation=auto averages once all workers know that their micro-batches fit."""
    averages_itself = (
        config.strategy != "ddp"
        or config.batch_norm != "per_worker"
        or config.ddp.comm_hook
        or config.compile in ("reduce-overhead", "max-autotune")
    )
    if config.gradient_accumulation == "auto" and averages_itself:
        why = "needs strategy=ddp, batch_norm=per_worker, ddp.comm_hook=null and no CUDA graphs"
        yield "gradient_accumulation", why, "give a number, such as gradient_accumulation=2"


def _schedule(config: RunConfig, machine: Machine) -> Problems:
    warmup = getattr(config.scheduler, "warmup_epochs", 0.0)
    planned = getattr(config.scheduler, "epochs", None)
    if planned is not None and warmup >= planned:
        yield "scheduler.epochs", f"is all warm-up, scheduler.warmup_epochs={warmup:g}", "use more"
    elif warmup > config.epochs:
        why = f"the run has only epochs={config.epochs}"
        yield "scheduler.warmup_epochs", why, f"use {config.epochs} or less"


def _of_data(config: RunConfig) -> list[str]:
    task, dataset = config.task, config.dataset
    problems: list[str] = dataset.problems(task)
    if not issubclass(task.takes, (*dataset.OFFERS, Anything)):
        tasks = groups.GROUPS["task"].items()
        names = [name for name, cls in tasks if issubclass(cls.takes, dataset.OFFERS)]
        known = f"task={' or '.join(names)}, or for " if names else ""
        problems = [f"task={task.name}: {dataset.label} is for {known}a custom task"]
    if (more := getattr(task, "MORE", None)) is not None:
        known = f"one of {{{', '.join(f'{key}: {value}' for key, value in more.items())}}}, or "
        problems += [
            f"task.metrics.{name}={better}: task={task.name} has no such metric; name"
            f" {known if more else ''}a class of torchmetrics by _target_"
            for name, better in own_metrics(task).items() - more.items()
        ]
    return problems + [
        f"task.metrics.{name}: the task has one of that name; choose another"
        for name in only_in_evaluations(task)
        if name in {"loss", *getattr(task, "METRICS", ())}
    ]


def _of_classes(config: RunConfig, machine: Machine) -> Problems:
    dataset = config.dataset
    settings = {
        "label_smoothing": (config.label_smoothing, 0),
        "mixup": (config.mixup, None),
        "cutmix": (config.cutmix, None),
        "dataset.sampling": (dataset.sampling, None),
    }
    for key, (value, unset) in settings.items():
        if value != unset and not config.task.takes.has_one_class:
            yield key, "works with task=classification only", f"use {key}={typed(unset)}"


def _transforms(config: RunConfig, machine: Machine) -> Problems:
    for name, of in (("transforms", "training"), ("eval_transforms", "evaluated")):
        transforms, key = getattr(config.dataset, name, None), f"dataset.{name}"
        if transforms == ():
            yield key, "is empty", f"use {key}=null"
        for place, node in enumerate(transforms or ()):
            if "_target_" not in node:
                example = "{_target_: torchvision.transforms.v2.RandomResizedCrop, size: 96}"
                yield key, f"{key}.{place} names no class", f"give its _target_, e.g. {example}"
            elif str(node["_target_"]).endswith(".Normalize"):
                why = f"{key}.{place} would normalise {of} images only"
                yield key, why, "give dataset.mean and dataset.std instead"


def _fits_samples(config: RunConfig, machine: Machine) -> Problems:
    """Models of tokens, and of a class for each pixel, go with such targets only."""
    gives, wanted = getattr(config.model, "EACH", ()), config.task.takes.each
    is_offered = issubclass(config.task.takes, config.dataset.OFFERS)
    if gives and wanted and wanted not in gives and is_offered:
        each = " or ".join(gives)
        why = f"gives outputs for each {each}, and task={config.task.name} for each {wanted}"
        models = groups.GROUPS["model"].items()
        names = [name for name, cls in models if wanted in getattr(cls, "EACH", ())]
        yield "model", why, f"use model={' or '.join(names)}, or a custom one"


def _folds(config: RunConfig, machine: Machine) -> Problems:
    folds, fold = config.dataset.folds, config.dataset.fold
    if folds is None and fold is not None:
        yield "dataset.fold", "needs the number of parts", "give it, e.g. dataset.folds=5"
    elif folds is not None and fold is None:
        fix = f"say which one validates, e.g. dataset.fold=0 or -m 'dataset.fold=range({folds})'"
        yield "dataset.folds", "needs dataset.fold", fix
    elif folds is not None and fold is not None and fold >= folds:
        why = f"dataset.folds={folds} are counted from 0"
        yield "dataset.fold", why, f"use 0 to {folds - 1}"
    val_split = getattr(config.dataset, "val_split", "random")
    if folds is not None and val_split != "random":
        yield "dataset.val_split", "folds are drawn at random", "use dataset.folds=null"
    if val_split == "last" and getattr(config.dataset, "group", None):
        yield "dataset.group", "val_split=last cuts groups", "use dataset.val_split=random"


def _sampling(config: RunConfig, machine: Machine) -> Problems:
    if config.dataset.sampling and not config.dataset.shuffle:
        why = f"dataset.sampling={config.dataset.sampling} draws the samples"
        yield "dataset.shuffle", why, "use dataset.sampling=null"


def _evaluated_splits(config: RunConfig, machine: Machine) -> Problems:
    dataset, splits = config.dataset, (config.eval_split, config.objective.partition("/")[2])
    if config.eval_split == "val" and not dataset.may_validate():
        yield "dataset.val_fraction", "leaves nothing to evaluate on", "use eval_split=test or null"
    if "test" in splits and getattr(dataset, "test_fraction", 1) == 0:
        key = "eval_split" if config.eval_split == "test" else "objective"
        yield key, "dataset.test_fraction=0.0 leaves no test set", "use dataset.test_fraction=0.2"
    for key in ("eval_every_steps", "eval_every_minutes"):
        if config.eval_split is None and getattr(config, key) is not None:
            yield key, "nothing is evaluated (eval_split=null)", f"use {key}=null"
    if "test" in splits and config.overfit_batches:
        fix = "use eval_split=val objective=auto"
        yield "overfit_batches", "evaluates on val, which is these batches", fix


def _watched(config: RunConfig, machine: Machine) -> Problems:
    each_time, stop = measured_each_time(config), config.early_stop
    watched = {"objective": (config.objective, [*each_time, *_tags(config, ["test"])])}
    if stop is not None:
        watched["early_stop.metric"] = stop.metric, each_time
        if stop.patience is None and stop.threshold is None:
            yield "early_stop.patience", "nothing ends the run", "give it, or early_stop.threshold"
    if isinstance(config.scheduler, groups.Plateau):
        watched["scheduler.metric"] = config.scheduler.metric, each_time
    moments = "each epoch" if config.evaluates_epochs else "each evaluation"
    for key, (metric, known) in watched.items():
        if metric not in known:
            why = "is not measured" if key == "objective" else f"is not measured after {moments}"
            names, near = ", ".join(dict.fromkeys(known)), did_you_mean(metric, known)
            yield key, why, f"use one of {names}.{near or added_by(config.task, metric)}"


def _tags(config: RunConfig, splits: Iterable[str]) -> list[str]:
    """Return the tags that are measured of these splits."""
    metrics, untrained = metrics_of(config.task), every_of(config.task)
    pairs = itertools.product(metrics, splits)
    return [f"{name}/{split}" for name, split in pairs if split != "train" or name not in untrained]


def refuse_missing_folders(config: RunConfig) -> None:
    """Raise ConfigError where the folder of a dataset has no samples for a split that is used."""
    dataset = config.dataset
    if (parts := dataset.parts()) is not None:
        if "train" not in parts:
            root = getattr(dataset, "root", "")
            raise DataError(f"dataset.root={root}: holds no folder train; add it")
        held_out = dataset.val_fraction > 0 or dataset.folds is not None
        refuse_missing(config, val=held_out or "val" in parts, test="test" in parts)


def refuse_missing(config: RunConfig, *, val: bool, test: bool) -> None:
    """Raise ConfigError where there is no `val` or `test`, and it is to be evaluated."""
    if not val and config.eval_split == "val":
        raise ConfigError(
            f"dataset.val_fraction={config.dataset.val_fraction}: leaves nothing to evaluate on,"
            f" for {config.dataset.label} has no val; hold some of train out (of an"
            " IterableDataset none can be), give a custom dataset one, e.g."
            " '+dataset.val={split: val}', or use eval_split=test, or null to evaluate nothing"
        )
    if not test and "test" in (config.eval_split, config.objective.partition("/")[2]):
        key = "eval_split=test" if config.eval_split == "test" else f"objective={config.objective}"
        raise ConfigError(
            f"{key}: {config.dataset.label} has no test set; use eval_split=val objective=auto"
        )


def measured_each_time(config: RunConfig) -> list[str]:
    """Return the tags of metrics that are new at each evaluation; of train they are an epoch's."""
    splits = ["train"] if config.evaluates_epochs or config.eval_split is None else []
    return _tags(config, [*splits, config.eval_split] if config.eval_split else splits)


_ALWAYS = (_gpus, _workers, _on_cpu, _model, _fits_samples, _folds, _sampling)
_TRAINING = (
    *(_sharding, _data_parallel, _optimizer, _batch, _printing, _fitting, _schedule),
    *(_of_classes, _transforms, _evaluated_splits, _watched),
)
"""Rules in the order in which their problems are listed; an evaluation breaks only the former."""
