"""A sweep whose runs are jobs of a cluster, by Hydra's launchers `submitit_slurm` and
`submitit_local`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from expt import machine
from expt.command.sweep import Multirun
from expt.errors import ConfigError
from expt.launch.job import Observer
from expt.launch.submitit_jobs import Queue, executor_of
from expt.machine import Machine


def cluster_sweep(
    context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
    options: Mapping[str, Any],
) -> Multirun:
    """The sweep of one command, as jobs that `options` (see conf/hydra/launcher) describe."""

    def machine() -> Machine:
        return _node(options, _tasks_per_node(options))

    def runner(observer: Observer) -> Queue:
        return Queue(executor_of(options, _tasks_per_node(options)), observer)

    return Multirun(context, task_function, config, options, machine=machine, runner=runner)


def _tasks_per_node(options: Mapping[str, Any]) -> int:
    """One task starts the workers of its node; where there are several nodes, each worker is a
    task.
    """
    given, gpus, nodes = options["tasks_per_node"], options["gpus_per_node"], options["nodes"]
    if nodes > 1 and not given and not gpus:
        raise ConfigError(
            f"hydra.launcher.nodes={nodes}: needs gpus_per_node, or tasks_per_node on the CPU"
        )
    return int(given or (gpus if nodes > 1 else 1))


def _node(options: Mapping[str, Any], tasks: int) -> Machine:
    """What a job will find, so that a wrong configuration is refused before it waits in the queue."""
    here = machine.detect()
    workers = tasks * options["nodes"]
    return dataclasses.replace(
        here,
        gpus=tuple(map(str, range(options["gpus_per_node"] or 0))),
        cpus=options.get("cpus_per_task") or here.cpus,
        workers=workers if workers > 1 else None,
        local_workers=tasks if workers > 1 else None,
    )
