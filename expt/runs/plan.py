"""Whether a run may get another end: not where its schedule is planned to the end that it had.

Free of torch.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expt.config.groups import Cosine, TargetScheduler
from expt.config.identity import shown
from expt.config.schedules import planned_steps
from expt.config.schema import RunConfig
from expt.errors import ConfigError

OF_PLAN = ("scheduler.epochs", "scheduler.kwargs.total_steps")
"""Say where a plan ends: what may change where it ends at the same step all the same."""


def refuse_other_plan(
    config: RunConfig, state: Mapping[str, Any], steps_per_epoch: int | None, source: Path
) -> None:
    """Raise ConfigError where the learning rates until `source`, with its `state`, are not those of
    such a run.

    `steps_per_epoch` is of its record: an older version's checkpoint says nothing of it. Unknown,
    epochs are counted."""
    saved: Mapping[str, Any] = state["config"]
    steps_per_epoch = state.get("steps_per_epoch") or steps_per_epoch or 1
    ends = {key: (before, _end(shown(config))[key]) for key, before in _end(saved).items()}
    changed = {key: values for key, values in ends.items() if values[0] != values[1]}
    then = state["plan"] if "plan" in state else _recorded(saved, steps_per_epoch)
    if then is None:
        for key in changed.keys() & {*OF_PLAN}:
            before, given = changed[key]
            raise ConfigError(
                f"{_typed(key)}={_number(given)}: the checkpoint {source} is of a run with"
                f" {_number(before)}; give that"
            )
        return
    if not changed or then == _plan(config, steps_per_epoch):
        return
    key = next(iter(changed))
    folder = shlex.quote(str(source.parent.parent))
    raise ConfigError(
        f"{_typed(key)}={_number(changed[key][1])}: the schedule of {folder} is planned to"
        f" {_what_end(saved)}, and one with another end has had other learning rates until here;"
        f" keep its plan by {_mend(config, then, steps_per_epoch)}, or begin a further run, with a"
        f" schedule of its own, from its weights by weights={folder}@last"
    )


def _recorded(saved: Mapping[str, Any], steps_per_epoch: int) -> int | None:
    """Where the plan ends by a configuration of an older version, which had no choice."""
    if saved["scheduler"].get("name") in ("cosine", "one_cycle"):
        return _total(saved["epochs"], saved["max_steps"], steps_per_epoch)
    given: int | None = _end(saved)[OF_PLAN[1]]
    return given


def _plan(config: RunConfig, steps_per_epoch: int) -> int | None:
    """Where this run's ends: in steps, or as often as a person's own scheduler is advanced."""
    scheduler = config.scheduler
    total = _total(config.epochs, config.max_steps, steps_per_epoch)
    if not isinstance(scheduler, TargetScheduler):
        return planned_steps(scheduler, steps_per_epoch=steps_per_epoch, total_steps=total)
    by_epoch = scheduler.interval == "epoch"
    told: int = scheduler.kwargs.get(
        "total_steps", math.ceil(total / steps_per_epoch) if by_epoch else total
    )
    return told


def _total(epochs: int, max_steps: int | None, steps_per_epoch: int) -> int:
    return min(epochs * steps_per_epoch, max_steps or epochs * steps_per_epoch)


def _end(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say where a run and its schedule end."""
    scheduler = settings["scheduler"]
    given = (scheduler.get("epochs"), (scheduler.get("kwargs") or {}).get("total_steps"))
    return {
        **{key: settings[key] for key in ("epochs", "max_steps")},
        **dict(zip(OF_PLAN, given, strict=True)),
    }


def _number(value: float | None) -> str:
    return "null" if value is None else f"{value:.10g}"


def _typed(key: str) -> str:
    return key.replace(".kwargs", "")


def _what_end(saved: Mapping[str, Any]) -> str:
    epochs, max_steps, planned, given = _end(saved).values()
    if planned is not None:
        return f"the end of scheduler.epochs={planned:g}"
    if given is not None:
        return f"the end of scheduler.total_steps={given}"
    return f"the run's end, epochs={epochs}" + (
        "" if max_steps is None else f" and max_steps={max_steps}"
    )


def _mend(config: RunConfig, then: int, steps_per_epoch: int) -> str:
    """What to type for the plan to stay, and what comes after its end."""
    if isinstance(config.scheduler, TargetScheduler):
        return f"+scheduler.total_steps={then}"
    low = (
        " (0, which trains nothing)"
        if isinstance(config.scheduler, Cosine) and not config.scheduler.min_lr
        else ""
    )
    epochs = f"scheduler.epochs={then / steps_per_epoch:.10g}"
    return f"{epochs}, after which the learning rate stays where it ends{low}"
