"""Settings that count steps, epochs, evaluations or minutes, compared with the length of a run.

The length is known once the data is. Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from expt.config import keys
from expt.config.constraints import kind
from expt.config.groups import GROUPS
from expt.config.kinds import conf_dir
from expt.config.schema import RunConfig
from expt.errors import listed


def beyond_the_end(config: RunConfig, steps_per_epoch: int, offset: int = 0) -> str | None:
    """Return a line that names the settings which the run never reaches; None if there are none.

    Settings at expt's own defaults are left out. A fork may have `offset` more steps.
    """
    steps = config.total_steps(steps_per_epoch, offset)
    every = config.eval_every_steps or steps_per_epoch
    has: dict[str, float] = {
        "steps": steps,
        "epochs": round(steps / steps_per_epoch, 2),
        "evaluations": math.inf if config.eval_every_minutes else math.ceil(steps / every),
        "minutes": config.max_minutes or math.inf,
        "batches": steps_per_epoch,
    }
    size = {"steps": 1, "epochs": steps_per_epoch, "evaluations": every}
    found, need, units = list[str](), 0.0, dict[str, None]()
    for key, unit, value in _counting(config):
        least = value + (unit == "evaluations")  # the others are compared with the first
        if least > has[unit] and value != _default(config, key):
            found.append(f"{key}={keys.typed(value)}")
            units[unit] = None
            need = max(need, least * size.get(unit, 0))
    if not found:
        return None
    length = listed([_amount(has[unit], unit) for unit in units])
    return f"the run has {length}, and never reaches {listed(found)}{_fix(config, need, has)}"


def _amount(number: float, unit: str) -> str:
    words = f"{number:g} {unit.removesuffix('s') if number == 1 and unit != 'batches' else unit}"
    return f"{words} an epoch" if unit == "batches" else words


def _fix(config: RunConfig, need: float, has: dict[str, float]) -> str:
    """Return the settings of a run of at least `need` steps."""
    if need <= has["steps"]:
        return ""
    epochs = math.ceil(need / has["batches"])
    if epochs <= config.epochs:
        return f"; use less, or max_steps={math.ceil(need)}"
    is_limited = config.max_steps is not None and config.max_steps < need
    return f"; use less, or epochs={epochs}{' max_steps=null' * is_limited}"


def _counting(config: RunConfig) -> Iterator[tuple[str, str, float]]:
    """Yield each setting that counts from the run's start: its key, unit and value."""
    for key, meant in keys.all_keys().items():
        if meant.counts is not None:
            for value in _values(config, key.split(".")):
                yield key, meant.counts, value


def _values(holder: Any, path: list[str]) -> Iterator[float]:
    if isinstance(holder, tuple):
        for each in holder:
            yield from _values(each, path)
    elif not path:
        yield from () if holder is None else (holder,)
    elif hasattr(holder, path[0]):
        yield from _values(getattr(holder, path[0]), path[1:])


def _default(config: RunConfig, key: str) -> Any:
    """Return the value in expt's own YAML; None where it has none."""
    import yaml  # late: most runs reach all their settings

    group, _, below = key.partition(".")
    name, path = "config", key
    if group in GROUPS:
        name, path = f"{group}/{kind(getattr(config, group))}", below
    file = conf_dir() / f"{name}.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 15 times as fast
    node = yaml.load(file.read_bytes(), loader) if file.exists() else None
    for part in path.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node
