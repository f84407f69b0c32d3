"""The objectives and limits of a search: tags that are to become high or low, or stay below."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expt.config.constraints import Target
from expt.config.kinds import metrics_of
from expt.config.schema import RunConfig
from expt.errors import ConfigError, did_you_mean
from expt.runs import tags
from expt.runs.metrics_file import of_epochs
from expt.runs.paths import RunPaths
from expt.runs.result import Record

EXCEEDED = 1.0
"""The violation by a run that ran out of memory, or that measured nan."""
SPLITS = ("train", "val", "test")
_LIMIT = re.compile(r"\s*([^<>=\s]+)\s*(<=|>=|<|>)\s*(\S+)\s*")


@dataclass(frozen=True)
class Goal:
    """A tag, and which way it is better."""

    tag: str
    highest: bool

    def value(self, record: Record, paths: RunPaths) -> float | None:
        """Return the run's value, see `value_of`."""
        return value_of(self.tag, record, paths)

    def cost(self, value: float | None) -> float:
        """Return the value as a cost, of which lower is better; a cost becomes the value again."""
        assert value is not None
        return -value if self.highest else value


def costs_of(goals: Sequence[Goal], values: Sequence[float | None]) -> list[float]:
    """Return the cost by each goal; the smallest list is beaten by no other in all goals."""
    return [goal.cost(value) for goal, value in zip(goals, values, strict=True)]


@dataclass(frozen=True)
class Limit:
    """A bound on a tag."""

    text: str
    tag: str
    is_upper: bool
    bound: float
    is_strict: bool = False
    """Whether the bound itself violates it."""

    def violation(self, record: Record, paths: RunPaths, *, out_of_memory: bool = False) -> float:
        """Return by how much the run violates it, above 0; a tag that is not measured does not."""
        value = value_of(self.tag, record, paths)
        if out_of_memory:
            return EXCEEDED
        if value is None:
            return 0.0
        found = value - self.bound if self.is_upper else self.bound - value
        if math.isnan(found):
            return EXCEEDED
        return math.ulp(self.bound) if self.is_strict and found == 0 else found


def value_of(tag: str, record: Record, paths: RunPaths) -> float | None:
    """Return a tag's value in the epoch whose checkpoint the run keeps as its best.

    A tag of the whole run, such as its memory, or one that is measured at the end, has one value.
    """
    objective, best = record.get("objective"), record.get("best")
    if objective and objective["name"] == tag:
        return objective["value"]
    last = (record.get("metrics") or {}).get(tag)
    if last is None or tag in (tags.SKIPPED_STEPS, tags.RUNNING_LOSS):
        return last
    if tag in tags.COMPARABLE:
        return _of_whole_run(tag, last, record, paths)
    return of_epochs(paths, tag).get(best["epoch"], last) if best else last


def _of_whole_run(tag: str, last: float, record: Record, paths: RunPaths) -> float:
    """Return the highest memory, or the mean of a speed or a time over the run's own epochs."""
    since = record["forked_from"]["step"] if "forked_from" in record else 0
    values = of_epochs(paths, tag, since_step=since)
    if tag.startswith("memory/"):
        return max(values.values(), default=last)
    seconds = of_epochs(paths, tags.EPOCH_S, since_step=since)
    # A speed's mean is weighted by time: all samples by all seconds.
    weights = {
        epoch: seconds.get(epoch, 0.0) if tag == tags.SAMPLES_PER_S else 1.0 for epoch in values
    }
    total = sum(weights.values())
    return sum(values[epoch] * weights[epoch] for epoch in values) / total if total else last


def goals_of(objective: str | Sequence[str], config: RunConfig) -> list[Goal]:
    """Return the goals of `objective`; `auto` is the run's own.

    Raises ConfigError for a tag that no run will have.
    """
    found = [objective] if isinstance(objective, str) else list(objective)
    found = [config.objective if tag == "auto" else tag for tag in found]
    shown = found[0] if len(found) == 1 else f"[{','.join(found)}]"
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"objective={shown}: give one tag, or several different ones")
    for tag in found:
        _check_tag(f"objective={shown}", tag, config)
    return goals_for(found, config.task)


def goals_for(found: Sequence[str], task: Any) -> list[Goal]:
    """Return the goals of these tags; `task` is that of a configuration or of a record."""
    better = metrics_of(task)
    return [Goal(tag, tags.is_higher_better(tag, better)) for tag in found]


def limits_of(constraints: Sequence[str], config: RunConfig | None = None) -> list[Limit]:
    """Return the limits of `search.constraints`.

    Raises ConfigError for one that can't be read or, with `config`, whose tag no run will have.
    """
    found = list[Limit]()
    for text in constraints:
        match = _LIMIT.fullmatch(text)
        try:
            bound = float(match[3]) if match else math.nan
        except ValueError:
            bound = math.nan
        if match is None or math.isnan(bound):
            example = "TAG<NUMBER or TAG>NUMBER, such as 'memory/gpu_mib<20000'"
            raise ConfigError(f"search.constraints={text}: write {example}")
        if config is not None:
            _check_tag(f"search.constraints={text}", match[1], config)
        found.append(Limit(text, match[1], match[2][0] == "<", bound, "=" not in match[2]))
    return found


def _check_tag(key: str, tag: str, config: RunConfig) -> None:
    """Raise ConfigError where no such run has the tag; custom code may log any."""
    is_custom = config.task.TARGETS == "any" or isinstance(config.dataset, Target)
    if config.callbacks or is_custom:
        return
    known = [tags.metric(name, split) for name in metrics_of(config.task) for split in SPLITS]
    known += [*tags.COMPARABLE, tags.RUNNING_LOSS]
    if tag not in known:
        raise ConfigError(f"{key}: no run has a tag {tag}.{did_you_mean(tag, known)}")
