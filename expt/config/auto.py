"""The value that each `auto` stands for on a given machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from expt.config.constraints import kind
from expt.config.groups import GROUPS, TRANSFORMER_SIZES
from expt.config.keys import meaning
from expt.config.tasks import objective_of
from expt.machine import Machine, is_slice

CPU_WORKERS = 2

Node = Mapping[
    str, Any
]  # not checked yet: a value of the wrong type is reported later, the others still get theirs


def fill_auto(node: Node, machine: Machine) -> dict[str, Any]:
    """`node` with each `auto` replaced, as far as the other values make sense; `N per worker` is a
    number too.
    """
    filled = dict(node)
    for key, value_of in _VALUES.items():
        if filled.get(key) == "auto":
            filled[key] = value_of(filled, machine)
    filled["batch_size"] = batch_size(filled)
    return _with_metric(_with_images(_with_size(filled), "end"))


def fill_auto_of_a_sweep(node: Node) -> dict[str, Any]:
    """`node` with what `auto` means in a sweep on every machine, whoever launches its runs.

    On a CPU runs share the cores, so each takes one: their numbers are then equal. Pictures take
    the time to spare."""
    alone = {"threads": 1} if node.get("threads") == "auto" else {}
    return _with_images({**node, **alone}, "spare")


def gpus(node: Node, machine: Machine) -> int:
    """All that this process's part of the run may use; one where a debugger is to follow, or CUDA
    shows no more.
    """
    one = node.get("debug") is True or machine.own_gpus or any(map(is_slice, machine.gpus))
    have = 1 if one and machine.gpus else len(machine.gpus)
    return min(have, machine.local_workers or have)


def world_size(node: Node, machine: Machine) -> int:
    """One for each GPU, and two on a CPU, unless a launcher has started another number."""
    one = node.get("debug") is True or node.get("strategy") == "dp"
    return machine.workers or (1 if one else _num_gpus(node) or CPU_WORKERS)


def backend(node: Node, machine: Machine) -> str:
    """NCCL where there are real GPUs."""
    return "nccl" if _num_gpus(node) and not machine.simulated else "gloo"


def threads(node: Node, machine: Machine) -> int:
    """This machine's cores, shared out among its workers."""
    local = 1 if machine.own_cpus else machine.local_workers or node.get("world_size")
    return max(1, machine.cpus // max(1, local if isinstance(local, int) else 1))


def objective(node: Node, machine: Machine) -> object:
    """The task's own, on what is evaluated after each epoch."""
    return f"{objective_of(node.get('task'))}/{node.get('eval_split')}"


def channels_last(node: Node, machine: Machine) -> bool:
    """Where the model gains by it."""
    return getattr(GROUPS["model"].get(str(kind(node.get("model")))), "CHANNELS_LAST_PAYS", False)


def compiled(node: Node, machine: Machine) -> object:
    """Never on a CPU, where nothing says that it pays; on GPUs the run's length will tell, see
    training.compiling.
    """
    on_gpus = _num_gpus(node) and not machine.simulated and node.get("strategy") != "dp"
    return "auto" if on_gpus else False


def onednn(node: Node, machine: Machine) -> bool:
    """On AMD's CPUs, where MKL is slow; a compiled model can't take these layers."""
    return machine.cpu_vendor == "AuthenticAMD" and not node.get("compile")


def batch_size(node: Node) -> Any:
    """The global batch, where it is given for one worker."""
    size, workers = node.get("batch_size"), node.get("world_size")
    per_worker = re.fullmatch(r"(\d+) per worker", str(size).strip())
    return int(per_worker[1]) * workers if per_worker and isinstance(workers, int) else size


# Each looks at what those before it have found.
_VALUES: dict[str, Callable[[Node, Machine], object]] = {
    "gpus": gpus,
    "world_size": world_size,
    "backend": backend,
    "threads": threads,
    "objective": objective,
    "channels_last": channels_last,
    "compile": compiled,
    "onednn": onednn,
}


def agreed() -> tuple[str, ...]:
    """Return the keys whose `auto` one of several machines decides for all."""
    return tuple(key for key in _VALUES if not meaning(key).own_machine)


def _num_gpus(node: Node) -> int:
    chosen = node.get("gpus")
    return (
        len(chosen)
        if isinstance(chosen, list)
        else max(0, chosen)
        if isinstance(chosen, int)
        else 0
    )


def _with_size(node: dict[str, Any]) -> dict[str, Any]:
    """How deep and how wide a transformer of a named size is; what is given wins."""
    model = node.get("model")
    if not isinstance(model, Mapping) or kind(model) != "transformer":
        return node
    size = model.get("size")
    of_size = (
        TRANSFORMER_SIZES.get(size if isinstance(size, str) else None) or TRANSFORMER_SIZES[None]
    )
    return {
        **node,
        "model": {**model, **{key: n for key, n in of_size.items() if model.get(key) == "auto"}},
    }


def _with_metric(node: dict[str, Any]) -> dict[str, Any]:
    """What a plateau is a plateau of."""
    scheduler = node.get("scheduler")
    if (
        not isinstance(scheduler, Mapping)
        or scheduler.get("metric") != "auto"
        or kind(scheduler) != "plateau"
    ):
        return node
    return {**node, "scheduler": {**scheduler, "metric": f"loss/{node.get('eval_split')}"}}


def _with_images(node: dict[str, Any], images: str) -> dict[str, Any]:
    shown = node.get("tensorboard")
    if not isinstance(shown, Mapping) or shown.get("images") != "auto":
        return node
    return {**node, "tensorboard": {**shown, "images": images}}
