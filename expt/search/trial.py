"""The goals and limits of a search, and its trials, which are read from run folders."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from expt.config.constraints import Target
from expt.config.identity import REPEATED
from expt.config.kinds import added_by, metrics_of
from expt.config.schema import RunConfig
from expt.errors import BAD_TRIALS, ConfigError, OutOfMemory, did_you_mean, warn
from expt.runs import tags
from expt.runs.found import FoundRun, results
from expt.runs.metrics_file import MetricsReader
from expt.runs.result import COMPLETED, DAMAGED, FAILED, PRUNED, Record
from expt.search.space import Space, Values

EXCEEDED = 1.0
"""The violation by a run that ran out of memory, or that measured nan."""
_LIMIT = re.compile(r"\s*([^<>=\s]+)\s*(<=|>=|<|>)\s*(\S+)\s*")


@dataclass(frozen=True)
class Goal:
    """A tag, and which way it is better."""

    tag: str
    highest: bool

    def cost(self, value: float | None) -> float:
        """Return the value as a cost, where lower is better; a cost becomes the value again."""
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
    """True if the bound itself violates it."""

    def violation(self, run: FoundRun) -> float:
        """Return by how much the run violates it, above 0; a tag that is not measured does not."""
        value = run.value_of(self.tag)
        if run.record.get("error_kind") == OutOfMemory.__name__:
            return EXCEEDED
        if value is None:
            return 0.0
        found = value - self.bound if self.is_upper else self.bound - value
        if math.isnan(found):
            return EXCEEDED
        return math.ulp(self.bound) if self.is_strict and found == 0 else found


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
    is_custom = any(isinstance(each, Target) for each in (config.task, config.dataset))
    if config.callbacks or is_custom:
        return
    known = [tags.metric(name, split) for name in metrics_of(config.task) for split in tags.SPLITS]
    known += [*tags.COMPARABLE, tags.RUNNING_LOSS]
    if tag not in known:
        near = did_you_mean(tag, known) or added_by(config.task, tag)
        raise ConfigError(f"{key}: no run has a tag {tag}.{near}")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run as the search sees it."""

    values: Values
    status: str
    """The status in result.json."""
    number: int | None = None
    """Its number in this search, or None for a run that this search did not choose."""
    objectives: tuple[float | None, ...] = ()
    """The value of each goal; None where it was not measured."""
    violations: Mapping[str, float] = field(default_factory=dict)
    """The amount by which it violates each limit; 0 or less is within."""
    costs: Mapping[int, float] = field(default_factory=dict)
    """The first goal after each epoch, where lower is better."""
    error_kind: str = ""
    folder: Path | None = None

    @property
    def epochs(self) -> int:
        """How many epochs it was trained and evaluated."""
        return max(self.costs, default=0)

    @property
    def has_values(self) -> bool:
        """True if all goals are finite numbers."""
        return all(value is not None and math.isfinite(value) for value in self.objectives)

    @property
    def is_bad(self) -> bool:
        """True if it diverged, ran out of memory or measured no number."""
        if self.status == FAILED:
            return self.error_kind in BAD_TRIALS
        return self.status == COMPLETED and not self.has_values

    @property
    def is_allowed(self) -> bool:
        """True if it keeps all limits."""
        return all(value <= 0 for value in self.violations.values())

    @property
    def may_be_best(self) -> bool:
        """True if it is completed or pruned, has all goals, and keeps all limits."""
        return self.status in (COMPLETED, PRUNED) and self.has_values and self.is_allowed


@dataclass(frozen=True)
class Reader:
    """A reader of runs as trials of a search."""

    space: Space
    goals: Sequence[Goal]
    limits: Sequence[Limit] = ()
    differences: Callable[[Values, Record], Mapping[str, str]] = lambda *_: {}
    """A function to the settings, apart from the space, in which a run differs, in words."""

    def trial(self, run: FoundRun) -> Trial | None:
        """Return the trial of a run, or None where it has no record or is outside the space."""
        if not run.record or run.status == DAMAGED:
            return None
        # As typed, else as its configuration has them.
        values = self.space.read(
            lambda key: run.typed[key] if key in run.typed else run.settings.get(key)
        )
        if values is None:
            return None
        goal = self.goals[0]
        return Trial(
            values=values,
            status=run.status,
            number=run.record.get("search", {}).get("number"),
            objectives=tuple(run.value_of(goal.tag) for goal in self.goals),
            violations={limit.text: limit.violation(run) for limit in self.limits},
            costs={
                point.epoch: goal.cost(point.value)
                for point in MetricsReader(run.paths).read()
                if point.tag == goal.tag
            },
            error_kind=run.record.get("error_kind", ""),
            folder=run.folder,
        )

    def own(self, folder: Path) -> tuple[list[Trial], dict[str, Collection[str]]]:
        """Return the trials of this search in its folder, and the names of the other runs there.

        With each of the others come the settings in which it differs; none if it is outside the
        space. Of several runs of one number the first that has settings counts.
        """
        trials, others = list[Trial](), dict[str, Collection[str]]()
        numbers = set[int | None]()
        for run in sorted(results(folder), key=lambda run: "identity" not in run.record):
            if run.status == DAMAGED:
                continue
            trial = self.trial(run)
            differing = self.differences(trial.values, run.record) if trial else ()
            if trial is None or differing:
                others[run.folder.name] = differing
            elif trial.number is None or trial.number not in numbers:
                trials.append(trial)
                numbers.add(trial.number)
        return trials, others

    def of_another(self, source: Path) -> list[Trial]:
        """Return the runs of another sweep that lie in the space, for a warm start."""
        key = f"search.warm_start={source}"
        if not source.is_dir():
            raise ConfigError(f"{key}: there is no such folder; give that of a sweep")
        runs = [*results(source)]
        found = [(run, trial) for run in runs if (trial := self.trial(run)) is not None]
        if not found:
            raise ConfigError(f"{key}: has no run in this space")
        others = [*filter(None, (self._other_question(*each) for each in found))]
        if others:
            number = f"{len(others)} of its {len(found)} runs"
            warn(f"{key}: {number} answer another question than this search: {others[0]}")
        return [replace(trial, number=None) for _, trial in found]

    def _other_question(self, run: FoundRun, trial: Trial) -> str:
        """Return the first difference of a run of another sweep: in goal, data or settings."""
        goal = next((each for each in self.goals if each.tag == run.objective), None)
        if run.objective and goal is None:  # else it was refused
            return f"objective={run.objective} there, {self.goals[0].tag} here"
        if goal and run.is_higher_better(goal.tag) != goal.highest:
            here, there = ("highest", "lowest") if goal.highest else ("lowest", "highest")
            return f"the {there} {goal.tag} is best there, the {here} here"
        differences = self.differences(trial.values, run.record)
        return next((text for key, text in differences.items() if key not in REPEATED), "")


def in_order(trials: Sequence[Trial]) -> list[Trial]:
    """Sort by number, after those without one."""
    return sorted(trials, key=lambda trial: -1 if trial.number is None else trial.number)


def best(trials: Sequence[Trial], goals: Sequence[Goal]) -> Trial | None:
    """Return the best trial, the first of equal ones."""
    reached = [trial for trial in in_order(trials) if trial.may_be_best]
    return min(reached, key=lambda trial: costs_of(goals, trial.objectives), default=None)
