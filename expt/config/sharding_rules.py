"""What fsdp and hsdp can't do, and nobody else would say in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from expt.machine import Machine

if TYPE_CHECKING:
    from expt.config.schema import RunConfig


def of_sharding(config: RunConfig, machine: Machine) -> list[str]:
    """Return the problems of a sharded run, one line each."""
    return [*_groups(config, machine), *_rest(config)] if config.is_sharded else []


def _groups(config: RunConfig, machine: Machine) -> list[str]:
    name, workers, shards = config.strategy, config.world_size, config.sharding.shards
    if config.debug or workers < 2:
        return [
            f"strategy={name}: needs at least 2 workers, and this run has one; use strategy=ddp"
        ]
    if name == "fsdp":
        if shards in ("auto", workers):
            return []
        return [
            f"sharding.shards={shards}: strategy=fsdp has one shard for each of {workers} workers;"
            " use strategy=hsdp for several replicas, or sharding.shards=auto"
        ]
    group = (machine.local_workers or workers) if shards == "auto" else shards
    if 2 <= group < workers and workers % group == 0:
        return []
    return [
        f"sharding.shards={group}: strategy=hsdp divides {workers} workers into equal groups of 2 or"
        " more; use a number that divides them, or strategy=fsdp"
    ]


def _rest(config: RunConfig) -> list[str]:
    name, problems = config.strategy, []
    if config.tensorboard.graph is True:
        problems.append(
            f"tensorboard.graph=true: one worker would trace a model of which strategy={name} gives"
            " it a part, and wait; use tensorboard.graph=auto, which leaves it out"
        )
    for tracker in config.send:
        if config.checkpoint.sharded is not False and getattr(config, tracker).checkpoints:
            problems.append(
                f"{tracker}.checkpoints=true: sends single files, and strategy={name} may write a"
                " checkpoint in parts; use checkpoint.sharded=false"
            )
    return problems
