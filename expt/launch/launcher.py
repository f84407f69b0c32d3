"""The launcher of a run's workers, by the environment: expt itself, or torchrun or Slurm.

Free of torch, and quick, unless this process is one of the workers.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from expt import machine
from expt.errors import ConfigError
from expt.machine import command_alone

if TYPE_CHECKING:
    from expt.launch.local import Launcher
    from expt.launch.torchrun import ExternalWorker


def launcher() -> Launcher | ExternalWorker:
    """Return the launcher of this process."""
    if machine.is_external_worker():
        from expt.launch.torchrun import ExternalWorker  # late: it imports torch

        return ExternalWorker()
    from expt.launch.local import Launcher  # late: displays

    return Launcher()


def refuse_in_torchrun(what: str) -> None:
    """Raise ConfigError where torchrun or Slurm has started this process."""
    if machine.is_external_worker():
        raise ConfigError(f"{what} cannot run inside torchrun or srun; start it without them")


PORTS = range(20_000, 30_000)
"""Below those that Linux gives to clients; a job takes one by its number."""


def adopt(environment: MutableMapping[str, str]) -> None:
    """Set torch's variables in the `environment` of one of a scheduler's several tasks.

    MASTER_ADDR and MASTER_PORT stay if they are set.
    """
    if machine.is_external_worker(environment):
        return
    ways = {
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"): _adopt_slurm,
        ("SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_GLOBALID"): _adopt_submitit_local,
    }
    for (tasks, rank), adopt_all in ways.items():
        try:
            if rank in environment and int(environment.get(tasks, "1")) > 1:
                return adopt_all(environment)
        except (LookupError, ValueError) as error:
            raise ConfigError(
                f"{tasks}={environment[tasks]}: {rank} is set too, but {error} is missing or no"
                f" number; to train here alone: {command_alone(environment)}"
            ) from None


def _adopt_slurm(environment: MutableMapping[str, str]) -> None:
    node = environment["SLURM_NODEID"]
    environment.update(
        RANK=environment["SLURM_PROCID"],
        WORLD_SIZE=environment["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=environment["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=str(tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[int(node)]),
        GROUP_RANK=node,
        TORCHELASTIC_RESTART_COUNT=environment.get("SLURM_RESTART_COUNT", "0"),
    )
    port = _port(environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"])
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", port)


def _adopt_submitit_local(environment: MutableMapping[str, str]) -> None:
    tasks = environment["SUBMITIT_LOCAL_NTASKS"]
    rank, local = environment["SUBMITIT_LOCAL_GLOBALID"], environment["SUBMITIT_LOCAL_LOCALID"]
    environment.update(RANK=rank, WORLD_SIZE=tasks, LOCAL_RANK=local, LOCAL_WORLD_SIZE=tasks)
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    environment.setdefault("MASTER_PORT", _port(environment["SUBMITIT_LOCAL_JOB_ID"], "0"))


def tasks_per_node(text: str) -> list[int]:
    """Return Slurm's `2(x3),1` as [2, 2, 2, 1]."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first of Slurm's `gpu[07-09,12],login1`: gpu07."""
    found = re.match(r"[^,\[]*(\[[^\]]*\])?[^,\[]*", nodes)
    assert found is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found[0])


def _port(job: str, step: str) -> str:
    number = 131 * int(re.sub(r"\D", "", job) or 0) + int(step)
    return str(PORTS[number % len(PORTS)])
