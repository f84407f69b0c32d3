"""The space of a search in Hydra's grammar: interval, range, choice, tag(log, ...), search.when."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from expt.command.compose import (
    ChoiceSweep,
    Composer,
    IntervalSweep,
    Override,
    RangeSweep,
    key_of,
    parse,
    parse_one,
)
from expt.config.parse import wrong_values
from expt.errors import ConfigError, did_you_mean
from expt.machine import Machine
from expt.runs.request import unquoted
from expt.search.space import Parameter, Space

SettingsOf = Callable[[Sequence[str]], Mapping[str, Any]]
"""Return the settings of a run with these overrides."""
_WHOLE = r"interval\((?:\w+=)?\s*[-+]?\d+\s*,\s*(?:\w+=)?\s*[-+]?\d+\s*\)"


def space_of(
    words: Sequence[str],
    when: Sequence[str],
    composer: Composer,
    settings_of: SettingsOf,
    machine: Machine,
) -> Space:
    """Return the space of the axes among `words`, and of those that conditions of `when` give.

    Raises ConfigError for what can't be searched.
    """
    axes = [_parameter(each, composer) for each in parse(words) if each.is_sweep_override()]
    first = [each.word(each.choices[0]) for each in axes if each.choices]

    def typed(each: Parameter, words: Sequence[str]) -> Parameter:
        is_choice = composer.is_group(each.name)
        return each if is_choice else _typed(each, words, settings_of, machine)

    space = [typed(each, first) for each in axes]
    fixed = set[str]()
    for text in when:
        name, choice, word = _parted(text)
        key = f"search.when={text}"
        override = parse_one(word)
        if not override.is_sweep_override():
            raise ConfigError(f"{key}: {word} has only one value; give several, or an interval")
        parameter = _parameter(override, composer)
        choices = [each for above in space if above.name == name for each in above.choices]
        if choices:
            same = [each for each in choices if unquoted(each) == unquoted(choice)]
            if not same:
                hint = did_you_mean(choice, choices)
                raise ConfigError(f"{key}: {choice} is none of {name}={','.join(choices)}.{hint}")
            parameter = replace(parameter, when=(name, same[0]))
        else:
            fixed.add(name)
            if not _is_fixed(key, name, choice, settings_of(first), composer, space):
                continue
        if parameter.name == name or parameter.name in fixed:
            raise ConfigError(f"{key}: {parameter.name} would depend on itself")
        chosen = Space((*space, parameter)).requires(parameter)
        others = [each for each in first if each.partition("=")[0] not in chosen]
        conditions = [
            next(p for p in space if p.name == name and choice in p.choices).word(choice)
            for name, choice in chosen.items()
        ]
        space.append(typed(parameter, [*others, *conditions]))
    if not space:
        raise ConfigError(
            "search: nothing to search; type an axis, such as"
            " 'optimizer.lr=tag(log,interval(1e-4,1))'"
        )
    found = Space(tuple(space))
    for one, other in itertools.combinations(space, 2):
        by, of_other = found.requires(one), found.requires(other)
        if one.name == other.name and all(by[key] == of_other[key] for key in by.keys() & of_other):
            raise ConfigError(
                f"{one.name}: is searched twice in one trial; name it once, or for different"
                " choices of one key, by search.when"
            )
    return found


def _parted(text: str) -> tuple[str, str, str]:
    """Return the key and the choice of a condition, and the override."""
    condition, colon, word = text.partition(":")
    name, equals, choice = condition.strip().partition("=")
    if not colon or not equals:
        example = "'model=mlp: model.hidden=[32],[64]'"
        raise ConfigError(f"search.when={text}: write 'KEY=CHOICE: AXIS', such as {example}")
    return name, choice.strip(), word.strip()


def _is_fixed(
    key: str,
    name: str,
    choice: str,
    settings: Any,
    composer: Composer,
    space: Sequence[Parameter],
) -> bool:
    """Return whether all trials have that choice of a key that is not searched.

    So one list of conditions serves a search of any of the choices.
    """
    if not _has(settings, name):
        hint = did_you_mean(name, [each.name for each in space if each.choices])
        raise ConfigError(f"{key}: {name} has no choices in this search.{hint}")
    for part in name.split("."):
        settings = settings[part]
    options = composer.options(name)
    value = settings.get("name") if options and isinstance(settings, Mapping) else settings
    if options and choice not in (*options, value):
        raise ConfigError(f"{key}: {choice} is no {name}.{did_you_mean(choice, options)}")
    return bool(_listed(parse_one(f"{name}={choice}").value()) == _listed(value))


def _parameter(override: Override, composer: Composer) -> Parameter:
    """Return an axis as it was typed; an interval may still turn out to be of integers."""
    override = copy.deepcopy(override)  # it is shared
    sweep, name, typed = override.value(), key_of(override), override.get_key_element()
    word = override.input_line
    log = "log" in getattr(sweep, "tags", ())
    if isinstance(sweep, IntervalSweep | RangeSweep):
        if composer.is_group(override.key_or_group):
            raise ConfigError(f"{word}: {name} is chosen by name; give several, as in {name}=A,B")
        if isinstance(sweep, IntervalSweep):
            found = _interval(name, str(word), sweep, log, typed)
        else:
            found = _range(name, str(word), sweep, log, typed)
        if not (math.isfinite(found.low) and math.isfinite(found.high)):
            raise ConfigError(f"{word}: needs two finite ends")
        if found.low > found.high or (found.step is None and found.low == found.high):
            raise ConfigError(f"{word}: is empty; the first end must be below the second")
        if log and found.low <= 0:
            raise ConfigError(f"{word}: a logarithmic scale begins above 0, such as at 1e-5")
        return found
    if log:
        raise ConfigError(f"{word}: choices have no scale; leave tag(log, ...) out")
    if isinstance(sweep, ChoiceSweep):
        sweep.shuffle = False
    words = dict.fromkeys(composer.values(override))
    texts = [each.partition("=")[2] for each in words]
    meant = [_listed(parse_one(f"{name}={text}").value()) for text in texts]
    return Parameter(name, "categorical", choices=tuple(texts), meant=tuple(meant), typed=typed)


def _interval(name: str, word: str, sweep: IntervalSweep, log: bool, typed: str) -> Parameter:
    low, high = sweep.start, sweep.end
    assert low is not None
    assert high is not None
    is_int = isinstance(low, int) and isinstance(high, int)  # by int(interval(1,8))
    if re.search(_WHOLE, word):  # whole numbers, of which Hydra makes floats
        low, high = int(low), int(high)
    return Parameter(name, "int" if is_int else "float", low, high, log, typed=typed)


def _range(name: str, word: str, sweep: RangeSweep, log: bool, typed: str) -> Parameter:
    start, stop, step = sweep.start, sweep.stop, sweep.step
    assert start is not None
    assert stop is not None
    assert step
    count = math.ceil((stop - start) / step - 1e-9)
    if count < 1:
        raise ConfigError(f"{word}: the range is empty; its end is exclusive")
    is_int = all(isinstance(each, int) for each in (start, stop, step))
    low, high = sorted((start, start + (count - 1) * step))
    if not is_int:  # as typed: 0.7 + 2 * 0.1 is a little less than 0.9
        low, high = float(f"{low:.12g}"), float(f"{high:.12g}")
    if log and not (is_int and abs(step) == 1):
        raise ConfigError(f"{word}: tag(log, range(...)) needs a step of 1; use an interval")
    scale = None if log else abs(step)
    return Parameter(name, "int" if is_int else "float", low, high, log, scale, typed=typed)


def _typed(
    parameter: Parameter, words: Sequence[str], settings_of: SettingsOf, machine: Machine
) -> Parameter:
    """Return the parameter, of integers where its key takes no other number.

    So it is for an argument of a custom class that has an integer, with whole ends. Raises
    ConfigError for values that the key can't have, and what Hydra does where there is no such key.
    """
    settings = settings_of(words)
    if not _has(settings, parameter.name):
        settings_of([*words, parameter.word(parameter.at(0))])

    def wrong(*values: Any) -> list[str]:
        return wrong_values(settings, {parameter.name: values}, machine)

    if parameter.choices:
        problems = wrong(*parameter.meant)
    elif parameter.kind == "float" and parameter.step is None:
        between = parameter.low + (parameter.high - parameter.low) * 0.41421
        low, high = math.ceil(parameter.low), math.floor(parameter.high)
        is_whole = wrong(between) and not wrong(max(low, round(between)))
        if low <= high and (is_whole or _is_integer_of_custom(parameter, settings)):
            parameter = replace(parameter, kind="int", low=low, high=high)
        else:
            parameter = replace(parameter, low=float(parameter.low), high=float(parameter.high))
        problems = wrong(parameter.low, parameter.high)
    else:
        problems = wrong(parameter.low, parameter.high)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return parameter


def _is_integer_of_custom(parameter: Parameter, settings: Any) -> bool:
    above, is_custom = settings, False
    for part in parameter.name.split("."):
        is_custom |= isinstance(above, Mapping) and "_target_" in above
        above = above.get(part) if isinstance(above, Mapping) else None
    return is_custom and all(type(each) is int for each in (above, parameter.low, parameter.high))


def _has(settings: Any, name: str) -> bool:
    for part in name.split("."):
        if not isinstance(settings, Mapping) or part not in settings:
            return False
        settings = settings[part]
    return True


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, list | tuple) else value
