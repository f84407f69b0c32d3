"""The space of a search, from Hydra's grammar: interval, range, choice and tag(log, ...), and from `search.when`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from expt.command.conf_files import groups
from expt.command.overrides import parsed
from expt.command.sweep_values import why_empty
from expt.config.parse import wrong_values
from expt.errors import ConfigError, did_you_mean
from expt.machine import Machine
from expt.search.space import Parameter, Space

SettingsOf = Callable[[Sequence[str]], Mapping[str, Any]]
"""The settings of a run with these words."""


def space_of(
    words: Sequence[str], when: Sequence[str], loader: ConfigLoader, settings_of: SettingsOf, machine: Machine
) -> Space:
    """The axes among `words`, and those of some points alone. Raises ConfigError with a line for what cannot be."""
    parser = OverridesParser.create(config_loader=loader)
    axes = [_parameter(override) for override in parser.parse_overrides(list(words)) if override.is_sweep_override()]
    if not axes:
        raise ConfigError("search: nothing to search; type an axis, as in 'optimizer.lr=tag(log,interval(1e-4,1))'")
    fixed = [each.word(each.choices[0]) for each in axes if each.kind == "categorical"]
    space = [_typed(each, settings_of(fixed), machine) for each in axes]
    for text in when:
        name, choice, word = _condition(text, axes)
        parameter = dataclasses.replace(_parameter(_parsed(parser, text, word)), when=(name, choice))
        above = next(each for each in axes if each.name == name)
        others = [each for each in fixed if each.partition("=")[0] != above.typed]
        space.append(_typed(parameter, settings_of([*others, above.word(choice)]), machine))
    names = [each.name for each in space]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{twice[0]}: is searched twice; name it once")
    return Space(tuple(space))


def _condition(text: str, axes: Sequence[Parameter]) -> tuple[str, str, str]:
    """The name and the choice that a conditional word depends on, and the word."""
    condition, colon, word = text.partition(":")
    name, equals, choice = condition.strip().partition("=")
    key = f"search.when={text}"
    if not colon or not equals:
        raise ConfigError(f"{key}: write 'KEY=CHOICE: AXIS', as in 'model=mlp: model.hidden=[32],[64]'")
    above = next((each for each in axes if each.name == name), None)
    if above is None or above.kind != "categorical":
        hint = did_you_mean(name, [each.name for each in axes if each.kind == "categorical"])
        raise ConfigError(f"{key}: {name} is no axis with choices in this search.{hint}")
    if choice not in above.choices:
        hint = did_you_mean(choice, above.choices)
        raise ConfigError(f"{key}: {choice} is none of {name}={','.join(above.choices)}.{hint}")
    return name, choice, word.strip()


def _parsed(parser: OverridesParser, text: str, word: str) -> Override:
    (override,) = parser.parse_overrides([word])
    if not override.is_sweep_override():
        raise ConfigError(f"search.when={text}: {word} has one value alone; give several, or an interval")
    return override


def _parameter(override: Override) -> Parameter:
    """An axis as it was typed; an interval may still turn out to be one of integers."""
    sweep, name, typed = override.value(), override.key_or_group, override.get_key_element()
    tags: set[str] = getattr(sweep, "tags", set())
    if unknown := tags - {"log"}:
        raise ConfigError(f"{name}: the tag {sorted(unknown)[0]} says nothing here; use tag(log, ...) or none")
    log = "log" in tags
    if isinstance(sweep, IntervalSweep | RangeSweep) and name in groups():
        raise ConfigError(f"{override.input_line}: a {name} has a name, and no number; give several, as in {name}=A,B")
    if isinstance(sweep, IntervalSweep):
        low, high = sweep.start, sweep.end
        assert low is not None
        assert high is not None
        is_int = isinstance(low, int) and isinstance(high, int)
        return _checked(override, Parameter(name, "int" if is_int else "float", low, high, log, typed=typed))
    if isinstance(sweep, RangeSweep):
        return _checked(override, _range(name, sweep, log, typed))
    if isinstance(sweep, ChoiceSweep):
        sweep.shuffle = False
    if problem := why_empty(override):
        raise ConfigError(problem)
    texts = list(dict.fromkeys(str(text) for text in override.sweep_string_iterator()))
    meant = [each.value() for each in parsed([f"{name}={text}" for text in texts])]
    if log:
        raise ConfigError(f"{override.input_line}: choices have no scale; leave tag(log, ...) out")
    return Parameter(name, "categorical", choices=tuple(texts), meant=tuple(map(_listed, meant)), typed=typed)


def _range(name: str, sweep: RangeSweep, log: bool, typed: str) -> Parameter:
    start, stop, step = sweep.start, sweep.stop, sweep.step
    assert start is not None
    assert stop is not None
    assert step
    values = math.ceil((stop - start) / step - 1e-9)
    if values < 1:
        raise ConfigError(
            f"{name}: its range is empty; the end, which is not part of it, must lie behind the first value"
        )
    low, high = sorted((start, start + (values - 1) * step))
    is_int = all(isinstance(each, int) for each in (start, stop, step))
    if log and not (is_int and abs(step) == 1):
        raise ConfigError(f"{name}: tag(log, range(...)) is of whole numbers with a step of 1; use an interval")
    return Parameter(name, "int" if is_int else "float", low, high, log, None if log else abs(step), typed=typed)


def _checked(override: Override, parameter: Parameter) -> Parameter:
    word, low, high = override.input_line, parameter.low, parameter.high
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"{word}: an interval needs two finite ends")
    if low >= high if parameter.step is None else low > high:
        raise ConfigError(f"{word}: is empty; the first end must be below the second")
    if parameter.log and low <= 0:
        raise ConfigError(f"{word}: on a scale of logarithms all values are above 0; begin at one, as in 1e-5")
    return parameter


def _typed(parameter: Parameter, settings: Mapping[str, Any], machine: Machine) -> Parameter:
    """The parameter, of integers where its key takes no other number. Raises ConfigError for what its key can't be."""

    def wrong(*values: Any) -> list[str]:
        return wrong_values(settings, {parameter.name: values}, machine)

    problems = wrong(*parameter.meant) if parameter.kind == "categorical" else wrong(parameter.low, parameter.high)
    if parameter.kind == "float" and parameter.step is None:
        between = parameter.low + (parameter.high - parameter.low) * 0.41421
        whole = dataclasses.replace(
            parameter, kind="int", low=math.ceil(parameter.low), high=math.floor(parameter.high)
        )
        if whole.low <= whole.high and wrong(between) and not wrong(max(int(whole.low), round(between))):
            parameter, problems = whole, wrong(int(whole.low), int(whole.high))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return parameter


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, list | tuple) else value
