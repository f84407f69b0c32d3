"""Settings that count steps, epochs, evaluations or minutes, compared with the length of a run.

The length is known once the data is. Free of torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from expt.config import conf_dir, keys, read_yaml
from expt.config.constraints import Key, Unit, typed
from expt.config.kinds import every_of
from expt.config.schema import RunConfig
from expt.errors import ConfigError, listed


class Length(NamedTuple):
    """The length of a run, in all units in which settings count."""

    steps: int
    per_epoch: int
    per_evaluation: int
    """The steps between two evaluations; 0 if a clock tells when to evaluate."""
    minutes: float
    evaluations: float
    done: int = 0
    """The steps that were done before this attempt."""
    offset: int = 0
    """The steps that a fork has done more than its epochs take at their present length."""
    forked: int = 0
    """The steps that were done before the fork."""

    @classmethod
    def of(cls, config: RunConfig, per_epoch: int, offset: int = 0, **begun: int) -> Length:
        """Return the length of a run with these settings; `begun` has `done` and `forked`."""
        steps, minutes = config.total_steps(per_epoch, offset), config.max_minutes or math.inf
        each = config.eval_every_steps or per_epoch
        evaluations = steps / each
        if config.eval_every_minutes is not None:
            each, evaluations = 0, minutes / config.eval_every_minutes
        whole = math.inf if math.isinf(evaluations) else math.ceil(evaluations)
        return cls(steps, per_epoch, each, minutes, whole, offset=offset, **begun)

    def until(self, step: int) -> Length:
        """Return the length of the run up to a step; counts of a clock stay the whole run's."""
        each = self.per_evaluation
        evaluations = math.ceil(step / each) if each else self.evaluations
        return self._replace(steps=step, evaluations=evaluations)

    def has(self, unit: Unit) -> float:
        """Return the run's length in a unit, as it is shown."""
        return {
            "steps": self.steps,
            "further steps": self.steps - self.done,
            "epochs": round((self.steps - self.offset) / self.per_epoch, 2),
            "evaluations": self.evaluations,
            "own evaluations": self.evaluations - self.forked // (self.per_evaluation or math.inf),
            "minutes": self.minutes,
        }[unit]

    def least(self, unit: Unit, count: float, *, later: bool) -> float:
        """Return the steps of the shortest run that gets to a count, or `later` beyond it.

        0 for counts of something else than steps.
        """
        each = self.per_evaluation
        size, begin = {
            "steps": (1, 0),
            "further steps": (1, self.done),
            "epochs": (self.per_epoch, self.offset),
            "evaluations": (each, 0),
            "own evaluations": (each, self.forked // each * each if each else 0),
        }.get(unit, (0, 0))
        return math.floor(count * size + 1e-9) + begin + later if size else 0

    def reaches(self, unit: Unit, count: float, *, later: bool) -> bool:
        """Return whether the run gets to a count, or `later` beyond it."""
        if unit in ("evaluations", "own evaluations", "minutes"):
            return count + later <= self.has(unit)
        return self.least(unit, count, later=later) <= self.steps


Unreached: TypeAlias = Mapping[str, tuple[Unit, Any]]
"""The unit and the value of settings without effect in so short a run."""
NONE: Unreached = MappingProxyType({})


def beyond_the_end(config: RunConfig, length: Length, of_classes: Unreached = NONE) -> str | None:
    """Return a line that names the settings without effect in so short a run; None without any.

    Those `of_classes` are settings of custom classes. Those that nobody chose are left out.
    """
    found = [f"{key}={typed(value)}" for key, (_, value) in of_classes.items()]
    need, units = 0.0, dict.fromkeys(unit for unit, _ in of_classes.values())
    for key, meant, here, value, count in _counting(config):
        assert meant.counts is not None
        if length.reaches(meant.counts, count, later=meant.later) or value == defaults().get(key):
            continue
        found.append(f"{here}={typed(value)}")
        units[meant.counts] = None
        need = max(need, length.least(meant.counts, count, later=meant.later))
    if not found:
        return None
    has = listed([_amount(length.has(unit), unit) for unit in units])
    fix = _fix(config, need, length)
    return f"the run has {has}, too few to reach {listed(found)}{fix}"


def never_measured(config: RunConfig, length: Length) -> Unreached:
    """Return metrics that no evaluation gets to. Raise ConfigError for the objective."""
    earlier = length.forked // (length.per_evaluation or math.inf)
    every = every_of(config.task).items()
    found = {name: n for name, n in every if length.evaluations // n <= earlier // n}
    name, _, split = config.objective.partition("/")
    if name in found and split == config.eval_split:
        raise ConfigError(
            f"task.metrics.{name}.every={found[name]}: objective={config.objective} is never"
            f" measured in {_amount(length.has('own evaluations'), 'evaluations')}; use less, or"
            " another objective"
        )
    return {f"task.metrics.{name}.every": ("evaluations", n) for name, n in found.items()}


def effective(
    config: RunConfig, steps_per_epoch: int, until: int | None = None, offset: int = 0
) -> dict[str, float]:
    """Return the settings that count and that a resume may change, as far as they are reached.

    That is by the end of the run, or `until` a step of it; others are inf. `offset` is a fork's.
    Two runs of one length that differ in others of these settings only are the same. A metric that
    is nan is no better than none, so patience may end one evaluation sooner than it should.
    """
    length, found = Length.of(config, steps_per_epoch, offset), dict[str, float]()
    length = length if until is None else length.until(until)
    for key, meant, here, value, count in _counting(config):
        assert meant.counts is not None
        if key in resumable():
            count -= meant.counts.endswith("evaluations")
            found[here] = value if length.reaches(meant.counts, count, later=False) else math.inf
    return found


def _amount(number: float, unit: Unit) -> str:
    unit_s = unit.removeprefix("own ")
    return f"{number:g} {unit_s.removesuffix('s') if number == 1 else unit_s}"


def _fix(config: RunConfig, need: float, length: Length) -> str:
    """Return the settings of a run of at least `need` steps."""
    if need <= length.steps:
        return ""
    epochs = math.ceil((need - length.offset) / length.per_epoch)
    if epochs <= config.epochs:
        return f"; use less, or max_steps={math.ceil(need)}"
    is_limited = config.max_steps is not None and config.max_steps < need
    return f"; use less, or epochs={epochs}{' max_steps=null' if is_limited else ''}"


def _counting(config: RunConfig) -> Iterator[tuple[str, Key, str, Any, float]]:
    """Yield each setting that counts: key and meaning, key in a list, value, when it acts."""
    for key, meant in keys.all_keys().items():
        if meant.counts is not None:
            *path, name = key.split(".")
            for at, holder in _holders(config, path):
                value = getattr(holder, name, None)
                if value is not None:
                    here = ".".join([*at, name])
                    yield key, meant, here, value, meant.at(holder) if meant.at else value


def _holders(holder: Any, path: list[str], at: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the path of each dataclass, and it, at a path in one; of a list each element."""
    if isinstance(holder, tuple):
        for place, each in enumerate(holder):
            yield from _holders(each, path, (*at, str(place)))
    elif not path:
        yield at, holder
    elif hasattr(holder, path[0]):
        yield from _holders(getattr(holder, path[0]), path[1:], (*at, path[0]))


@functools.cache
def resumable() -> frozenset[str]:
    """Return the keys other than those of the length in which runs may differ and prove equal.

    One is the other, resumed at its end.
    """
    every = keys.all_keys().items()
    changing = {key: each for key, each in every if each.counts and each.result == "changes"}
    return frozenset(key for key, each in changing.items() if each.resume and not each.varies)


@functools.cache  # the parser of YAML takes 20 ms to import
def defaults() -> Mapping[str, Any]:
    """Return the values of expt's own config.yaml, without those of the choices of groups."""
    return keys.flat(read_yaml(conf_dir() / "config.yaml"))
