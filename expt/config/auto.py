"""The values that `auto` stands for on a machine.

Nothing is checked yet: a value of the wrong type is reported later, the others still get theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from expt.config.constraints import kind
from expt.config.groups import GROUPS, TRANSFORMER_SIZES
from expt.config.keys import meaning
from expt.config.kinds import every_of, objective_of
from expt.gpus import is_slice, note_unused
from expt.machine import Machine

CPU_WORKERS = 2

Node = Mapping[str, Any]


def fill_auto(node: Node, machine: Machine) -> dict[str, Any]:
    """Return `node` with a value for each `auto`, and a global batch for `N per worker`."""
    filled = dict(node)
    for key, value_of in _VALUES.items():
        if filled.get(key) == "auto":
            filled[key] = value_of(filled, machine)
    filled["batch_size"] = batch_size(filled)
    scheduler = {"metric": f"loss/{filled.get('eval_split') or 'train'}"}
    filled = _filled_below(
        filled, "scheduler", scheduler if kind(node.get("scheduler")) == "plateau" else {}
    )
    model = node.get("model")
    own = model.get("path") if isinstance(model, Mapping) and "_target_" not in model else None
    if own and (revision := node["model"].get("revision")):
        own = f"{own}@{revision}"
    filled = _filled_below(filled, "dataset", {"tokenizer": own})
    return _filled_below(_with_size(filled), "tensorboard", {"images": "end"})


def fill_auto_of_a_sweep(node: Node) -> dict[str, Any]:
    """Return `node` with the values of `auto` in a sweep, the same on every machine.

    Runs share a CPU's cores, so each takes one: their numbers are then equal. Pictures are drawn in
    the time to spare.
    """
    threads = {"threads": 1} if node.get("threads") == "auto" else {}
    return _filled_below({**node, **threads}, "tensorboard", {"images": "spare"})


def gpus(node: Node, machine: Machine) -> int:
    """Return a GPU for each worker, or all that the run may use here.

    One under a debugger, or where CUDA shows one.
    """
    one = node.get("debug") is True or machine.own_gpus or any(map(is_slice, machine.gpus))
    have = 1 if one and machine.gpus else len(machine.gpus)
    if not have or machine.misnamed:
        why = f"is {have or 'the CPU'}, since {machine.hidden}"
        note_unused(why if machine.misnamed else "")
    workers = None if node.get("strategy") == "dp" else node.get("world_size")
    asked = [
        size for size in (machine.local_workers, workers) if isinstance(size, int) and size > 0
    ]
    return min([have, *asked])


def world_size(node: Node, machine: Machine) -> int:
    """Return one for each GPU, or two on a CPU, or as many as a launcher has started."""
    one = node.get("debug") is True or node.get("strategy") == "dp"
    return machine.workers or (1 if one else _num_gpus(node) or CPU_WORKERS)


def backend(node: Node, machine: Machine) -> str:
    """Return nccl on GPUs, gloo on a CPU."""
    return "nccl" if _num_gpus(node) and not machine.simulated else "gloo"


def threads(node: Node, machine: Machine) -> int:
    """Return this machine's cores, shared among its workers."""
    local = 1 if machine.own_cpus else machine.local_workers or node.get("world_size")
    return max(1, machine.cpus // max(1, local if isinstance(local, int) else 1))


def eval_split(node: Node, machine: Machine) -> object:
    """Return val; None where the dataset says itself that it has nothing to evaluate."""
    dataset = node.get("dataset")
    if not isinstance(dataset, Mapping) or dataset.get("test", True):
        return "val"
    cls = GROUPS["dataset"].get("_target_" if "_target_" in dataset else str(kind(dataset)))
    held_out = dataset.get("val_fraction", getattr(cls, "val_fraction", True))
    return "val" if held_out or dataset.get("val") or dataset.get("folds") else None


def objective(node: Node, machine: Machine) -> object:
    """Return the task's own metric on the split that is evaluated, or of training without one."""
    task, split = node.get("task"), node.get("eval_split")
    metric = objective_of(task)
    return f"{'loss' if split is None and metric in every_of(task) else metric}/{split or 'train'}"


def channels_last(node: Node, machine: Machine) -> bool:
    """Return whether the model is faster so."""
    return getattr(GROUPS["model"].get(str(kind(node.get("model")))), "CHANNELS_LAST_PAYS", False)


def compiled(node: Node, machine: Machine) -> object:
    """Return `auto` on GPUs, where training.compiling looks at the run's length, else False."""
    on_gpus = _num_gpus(node) and not machine.simulated and node.get("strategy") != "dp"
    return "auto" if on_gpus else False


def batch_size(node: Node) -> Any:
    """Return the global batch of `N per worker`, and any other value as it is."""
    size, workers = node.get("batch_size"), node.get("world_size")
    per_worker = re.fullmatch(r"(\d+) per worker", str(size).strip())
    return int(per_worker[1]) * workers if per_worker and isinstance(workers, int) else size


_VALUES: dict[str, Callable[[Node, Machine], object]] = {  # each sees the values of those above
    "gpus": gpus,
    "world_size": world_size,
    "backend": backend,
    "threads": threads,
    "eval_split": eval_split,
    "objective": objective,
    "channels_last": channels_last,
    "compile": compiled,
}


KEYS = frozenset(_VALUES)
"""The keys of a run that can be `auto`."""


def agreed() -> tuple[str, ...]:
    """Return the keys whose `auto` one of several machines decides for all."""
    return tuple(key for key in _VALUES if not meaning(key).own_machine)


def _num_gpus(node: Node) -> int:
    chosen = node.get("gpus")
    if isinstance(chosen, list):
        return len(chosen)
    return max(0, chosen) if isinstance(chosen, int) else 0


def _with_size(node: dict[str, Any]) -> dict[str, Any]:
    """Return `node` with the depth and width of a transformer of a named size."""
    model = node.get("model")
    if not isinstance(model, Mapping) or kind(model) != "transformer":
        return node
    size = model.get("size")
    known = TRANSFORMER_SIZES.get(size if isinstance(size, str) else None)
    return _filled_below(node, "model", known or TRANSFORMER_SIZES[None])


def _filled_below(node: Node, key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `node` with `values` for the keys below `key` that are `auto`."""
    below = node.get(key)
    if not isinstance(below, Mapping):
        return dict(node)
    found = {name: value for name, value in values.items() if below.get(name) == "auto"}
    return {**node, key: {**below, **found}}
