"""What fsdp and hsdp cannot do, and what only they can."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any

from expt.config.groups import Muon
from expt.machine import Machine

if TYPE_CHECKING:
    from expt.config.schema import RunConfig, Sharding


def of_sharding(config: RunConfig, machine: Machine) -> list[str]:
    """Problems of the keys of `sharding`, one line each, with the mend."""
    if not config.is_sharded:
        return [*_idle_keys(config), *_idle_checkpoint(config)]
    return [*_groups(config, machine), *_patterns(config), *beside_sharding(config)]


def _idle_keys(config: RunConfig) -> list[str]:
    given = config.sharding
    kind: Any = type(given)
    at_first = _at_first(kind)
    return [
        f"sharding.{field.name}={_typed(getattr(given, field.name))}: strategy={config.strategy}"
        " gives each worker the whole model; use strategy=fsdp, or leave it out"
        for field in dataclasses.fields(given)
        if getattr(given, field.name) != getattr(at_first, field.name)
    ]


@functools.cache
def _at_first(kind: type[Sharding]) -> Sharding:
    """Made once: to check it takes longer than to compare it."""
    return kind()


def _idle_checkpoint(config: RunConfig) -> list[str]:
    if config.checkpoint.sharded is not True:
        return []
    return [
        f"checkpoint.sharded=true: strategy={config.strategy} gives each worker the whole model,"
        " which one writes; use strategy=fsdp, or checkpoint.sharded=auto"
    ]


def _groups(config: RunConfig, machine: Machine) -> list[str]:
    name, workers, shards = config.strategy, config.world_size, config.sharding.shards
    if config.debug:  # which has one worker, and is to have no other
        return [
            f"strategy={name}: shares the model out among workers, and debug=true runs one; use"
            " strategy=ddp"
        ]
    if workers < 2:
        return [
            f"strategy={name}: shares the model out among at least 2 workers, and this run has one;"
            f" use strategy=ddp, or {'gpus' if config.num_gpus else 'world_size'}=2"
        ]
    if name == "fsdp":
        if shards in ("auto", workers):
            return []
        return [
            f"sharding.shards={shards}: strategy=fsdp cuts the model into a part for each of"
            f" {workers} workers; use "
            + ("strategy=hsdp for several replicas, or " if shards in _divisors(workers) else "")
            + "sharding.shards=auto"
        ]
    group = (machine.local_workers or workers) if shards == "auto" else shards
    if group == workers:
        return [
            f"strategy=hsdp: replicas of {group} workers each, and the run has no more; use"
            f" {_instead(workers, shards)}"
        ]
    if group < 2 or workers % group:
        return [
            f"sharding.shards={group}: {workers} workers must make whole groups of at least 2 that"
            f" share a replica; use {_instead(workers, shards)}"
        ]
    return []


def _divisors(workers: int) -> list[int]:
    """How many workers may share a replica, where there are to be several."""
    return [number for number in range(2, workers) if workers % number == 0]


def _instead(workers: int, shards: int | str) -> str:
    """What to type for so many workers in place of groups that do not come out even."""
    fsdp = (
        "strategy=fsdp"
        if shards in ("auto", workers)
        else "strategy=fsdp with sharding.shards=auto"
    )
    found = " or ".join(map(str, _divisors(workers)))
    return f"{fsdp}, or sharding.shards={found}" if found else fsdp


def _patterns(config: RunConfig) -> list[str]:
    wrap = config.sharding.wrap
    problems = []
    for pattern in wrap if isinstance(wrap, tuple) else ():
        try:
            re.compile(pattern)
        except re.error as error:
            problems.append(f"sharding.wrap=[{pattern}]: is no regular expression: {error}")
    if wrap == ():
        problems.append("sharding.wrap=[]: names no module; use sharding.wrap=auto")
    return problems


def beside_sharding(config: RunConfig) -> list[str]:
    """What else a sharded run asks for, and can't have."""
    name, problems = config.strategy, []
    if config.compile in ("reduce-overhead", "max-autotune"):
        problems.append(
            f"compile={config.compile}: CUDA graphs need weights that stay where they are, and"
            f" strategy={name} gathers them anew; use compile=true"
        )
    if isinstance(config.optimizer, Muon):
        problems.append(
            f"optimizer=muon: looks at whole matrices, of which strategy={name} gives each worker a"
            " part; use optimizer=adamw"
        )
    if config.ddp.comm_hook:
        problems.append(
            f"ddp.comm_hook={config.ddp.comm_hook}: is of strategy=ddp; use ddp.comm_hook=null "
            f"(strategy={name} has sharding.reduce_dtype=bf16)"
        )
    for key in ("find_unused_parameters", "static_graph"):
        if getattr(config.ddp, key):
            problems.append(
                f"ddp.{key}=true: strategy={name} has no need of it; use ddp.{key}=false"
            )
    if config.tensorboard.graph is True:
        problems.append(
            f"tensorboard.graph=true: one worker would trace a model that strategy={name} gives it"
            " a part of; use tensorboard.graph=auto, which leaves it out"
        )
    if config.sharding.param_dtype in ("bf16", "fp16") and config.amp is False:
        problems.append(
            f"sharding.param_dtype={config.sharding.param_dtype}: is of mixed precision; use it"
            f" with amp={config.sharding.param_dtype}"
        )
    for tracker in config.send:
        if config.checkpoint.sharded is not False and getattr(config, tracker).checkpoints:
            problems.append(
                f"{tracker}.checkpoints=true: sends single files, and strategy={name} may write a"
                " checkpoint in parts; use checkpoint.sharded=false"
            )
    return problems


def _typed(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
