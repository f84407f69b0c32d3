"""What a search is for: tags that are to become high or low, and limits on others."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expt.config.constraints import Target
from expt.config.schema import RunConfig
from expt.config.tasks import metrics_of
from expt.errors import ConfigError, did_you_mean
from expt.runs import tags
from expt.runs.metrics_file import of_epochs
from expt.runs.paths import RunPaths
from expt.runs.result import Record

EXCEEDED = 1.0
"""By how much a run that had too little memory exceeds each limit, and one that measured nan the
limit of that.
"""
SPLITS = ("train", "val", "test")
_LIMIT = re.compile(r"\s*([^<>=\s]+)\s*(<=|>=|<|>)\s*(\S+)\s*")


@dataclass(frozen=True)
class Goal:
    """A tag, and which way it is better."""

    tag: str
    highest: bool

    def value(self, record: Record, paths: RunPaths) -> float | None:
        """What a run has come to, see `value_of`."""
        return value_of(self.tag, record, paths)

    def cost(self, value: float | None) -> float:
        """Lower is better."""
        assert value is not None
        return -value if self.highest else value


def costs_of(goals: Sequence[Goal], values: Sequence[float | None]) -> list[float]:
    """Of each goal, lower is better.

    Compared as lists they give a best that no other beats in all goals.
    """
    return [goal.cost(value) for goal, value in zip(goals, values, strict=True)]


@dataclass(frozen=True)
class Limit:
    """What a tag must not be."""

    text: str
    tag: str
    is_upper: bool
    bound: float
    is_strict: bool = False
    """Whether the bound itself exceeds it."""

    def violation(self, record: Record, paths: RunPaths, *, had_no_memory: bool = False) -> float:
        """By how much the run exceeds it; not at all where it has not measured the tag."""
        if had_no_memory:
            return EXCEEDED
        value = value_of(self.tag, record, paths)
        if value is None:
            return 0.0
        return self._excess(value)

    def _excess(self, value: float) -> float:
        """Above 0 where the value exceeds it, as what is no number does."""
        found = value - self.bound if self.is_upper else self.bound - value
        if math.isnan(found):
            return EXCEEDED
        return math.ulp(self.bound) if self.is_strict and found == 0 else found


def value_of(tag: str, record: Record, paths: RunPaths) -> float | None:
    """A tag of the checkpoint that a run keeps as its best: its value in that epoch.

    What is of a whole run, as its memory, or was measured once, at its end, has one value.
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
    """Memory at its highest, speed and times by their mean; `last` where no epoch of the run itself
    says more.
    """
    since = record["forked_from"]["step"] if "forked_from" in record else 0
    values = of_epochs(paths, tag, since_step=since)
    if tag.startswith("memory/"):
        return max(values.values(), default=last)
    seconds = of_epochs(paths, tags.EPOCH_S, since_step=since)
    # Of a speed the mean by time: all samples by all seconds.
    weights = {
        epoch: seconds.get(epoch, 0.0) if tag == tags.SAMPLES_PER_S else 1.0 for epoch in values
    }
    total = sum(weights.values())
    return sum(values[epoch] * weights[epoch] for epoch in values) / total if total else last


def goals_of(objective: str | Sequence[str], config: RunConfig) -> list[Goal]:
    """The goals of a search whose runs are like `config`.

    Raises ConfigError for a tag that no run has.
    """
    found = [objective] if isinstance(objective, str) else list(objective)
    found = [config.objective if tag == "auto" else tag for tag in found]
    shown = found[0] if len(found) == 1 else f"[{','.join(found)}]"
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"objective={shown}: give one tag, or several different ones")
    for tag in found:
        check_tag(f"objective={shown}", tag, config)
    return goals_for(found, config.task)


def goals_for(found: Sequence[str], task: Any) -> list[Goal]:
    """The goals of these tags; `task` is one of a configuration, or as a record has it."""
    better = metrics_of(task)
    return [Goal(tag, tags.is_higher_better(tag, better)) for tag in found]


def limits_of(constraints: Sequence[str], config: RunConfig) -> list[Limit]:
    """The limits that `search.constraints` names.

    Raises ConfigError for one that is none, or of an unknown tag.
    """
    found = [limit for limit in limits_for(constraints) if not math.isnan(limit.bound)]
    if len(found) < len(constraints):
        wrong = next(text for text in constraints if text not in [limit.text for limit in found])
        raise ConfigError(
            f"search.constraints={wrong}: write TAG<NUMBER or TAG>NUMBER, as in"
            " 'memory/gpu_mib<20000'"
        )
    for limit in found:
        check_tag(f"search.constraints={limit.text}", limit.tag, config)
    return found


def limits_for(constraints: Sequence[str]) -> list[Limit]:
    """Those that can be read."""
    found = []
    for text in constraints:
        match = _LIMIT.fullmatch(text)
        with contextlib.suppress(ValueError):
            if match:
                found.append(
                    Limit(text, match[1], match[2][0] == "<", float(match[3]), "=" not in match[2])
                )
    return found


def check_tag(key: str, tag: str, config: RunConfig) -> None:
    """Raise ConfigError where no run like `config` will have the tag; code of a person's own may
    log any.
    """
    if config.callbacks or config.task.TARGETS == "any" or isinstance(config.dataset, Target):
        return
    known = [tags.metric(name, split) for name in metrics_of(config.task) for split in SPLITS]
    known += [*tags.COMPARABLE, "running/loss"]
    if tag not in known:
        raise ConfigError(f"{key}: no run has a tag {tag}.{did_you_mean(tag, known)}")
