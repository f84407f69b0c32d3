"""The space of a search, from axes and conditions in Hydra's grammar."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from expt.command.compose import Composer
from expt.command.grammar import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    RangeSweep,
    key_of,
    numbers_of,
    parse,
    parse_one,
    readable,
    words_of,
)
from expt.config import keys
from expt.config.identity import REPEATED, digest
from expt.config.parse import wrong_values
from expt.config.schema import RunConfig
from expt.errors import ConfigError, did_you_mean
from expt.machine import Machine
from expt.runs.overrides import unquoted
from expt.search.space import Parameter, Space, Values

_WHOLE = r"interval\((?:\w+=)?\s*[-+]?\d+\s*,\s*(?:\w+=)?\s*[-+]?\d+\s*\)"


SettingsOf = Callable[[Sequence[str]], Mapping[str, Any]]
"""Return the settings of a trial with these overrides."""


def space_of(
    words: Sequence[str],
    when: Sequence[str],
    composer: Composer,
    settings_of: SettingsOf,
    machine: Machine,
) -> Space:
    """Return the space of the axes among `words`, and of those that conditions of `when` give.

    Raises ConfigError for an axis that can't be searched.
    """
    reader = _Reader(composer, settings_of, machine)
    axes = [reader.axis(each) for each in parse(words) if each.is_sweep_override()]
    space = Space(tuple(reader.check(each, Space(tuple(axes))) for each in axes))
    for condition in _in_order(map(_condition, when)):
        space = Space((*space.parameters, *reader.conditional(condition, space)))
    if not space.parameters:
        raise ConfigError(
            "search: nothing to search; type an axis, such as"
            " 'optimizer.lr=tag(log,interval(1e-4,1))'"
        )
    _refuse_twice(space)
    return space


def refuse_repetitions(space: Space, config_of: Callable[[Values], RunConfig]) -> None:
    """Raise ConfigError for an axis of seeds or folds, which are no hyperparameters.

    Choices of a group, or values that others refer to, may differ by nothing else either.
    """
    for each in space.parameters:
        is_repeated = keys.meaning(each.name).varies == "repetition"
        if not is_repeated and each.name not in keys.all_keys():
            found = list[RunConfig]()
            for values in space.variants(each):
                with contextlib.suppress(ConfigError):  # of values that do not fit these others
                    found.append(config_of(values))
            whole = {digest(config, {}) for config in found}
            is_repeated = len({digest(x, {}, but=REPEATED) for x in found}) < len(whole)
        if is_repeated:
            raise ConfigError(
                f"{each.name}: repeats a trial, and a search would choose the luckiest; give it one"
                f" value, and repeat the best settings without search: -m {each.name}=..."
            )


def _refuse_twice(space: Space) -> None:
    for one, other in itertools.combinations(space.parameters, 2):
        by, of_other = space.requires(one), space.requires(other)
        if one.name == other.name and all(by[key] == of_other[key] for key in by.keys() & of_other):
            raise ConfigError(
                f"{one.name}: is searched twice in one trial; name it once, or for different"
                " choices of one key, by search.when"
            )


class Condition(NamedTuple):
    """A text of `search.when`: an axis of those trials in which a key has the choice."""

    word: str
    """The setting with the text, for errors."""
    name: str
    choice: str
    axis: Override


def _condition(text: str) -> Condition:
    word, (condition, colon, axis) = f"search.when={text}", text.partition(":")
    name, equals, choice = condition.strip().partition("=")
    if not colon or not equals:
        example = "'model=mlp: model.hidden=[32],[64]'"
        raise ConfigError(f"{word}: write 'KEY=CHOICE: AXIS', such as {example}")
    if not (override := parse_one(readable(axis.strip()))).is_sweep_override():
        raise ConfigError(
            f"{word}: {axis.strip()} has only one value; give several, or an interval"
        )
    return Condition(word, name, choice.strip(), override)


def _in_order(conditions: Iterable[Condition]) -> Iterator[Condition]:
    """Yield each condition after those that give values to its key; else in the order typed."""
    left = list(conditions)
    while left:
        given = {key_of(each.axis) for each in left}
        free = next((each for each in left if each.name not in given), None)
        if free is None:
            raise ConfigError(f"{left[0].word}: {key_of(left[0].axis)} would depend on itself")
        left.remove(free)
        yield free


class _Reader:
    """Reads axes as parameters, and checks them by the settings of a trial."""

    def __init__(self, composer: Composer, settings_of: SettingsOf, machine: Machine) -> None:
        self._composer, self._settings_of, self._machine = composer, settings_of, machine

    def axis(self, override: Override) -> Parameter:
        """Return an axis as it was typed; an interval may still turn out to be of integers."""
        override = copy.deepcopy(override)  # it is shared
        sweep, name, word = override.value(), key_of(override), str(override.input_line)
        log = "log" in getattr(sweep, "tags", ())
        if isinstance(sweep, IntervalSweep | RangeSweep):
            if self._composer.is_group(override.key_or_group):
                raise ConfigError(
                    f"{word}: {name} is chosen by name; give several, e.g. {name}=A,B"
                )
            read = _interval if isinstance(sweep, IntervalSweep) else _range
            found = replace(read(name, word, sweep, log), typed=override.get_key_element())
            _refuse_empty(found, word)
            return found
        if log:
            raise ConfigError(f"{word}: choices have no scale; leave tag(log, ...) out")
        if isinstance(sweep, ChoiceSweep):
            sweep.shuffle = False  # the order of the choices decides which trials a seed gives
        words = dict.fromkeys(words_of(override, self._composer.options))
        texts = tuple(each.partition("=")[2] for each in words)
        meant = tuple(_as_recorded(parse_one(f"{name}={text}").value()) for text in texts)
        typed = override.get_key_element()
        return Parameter(name, "categorical", choices=texts, meant=meant, typed=typed)

    def conditional(self, condition: Condition, space: Space) -> Iterator[Parameter]:
        """Yield the axis of a condition, unless all trials have another choice."""
        parameter = self.axis(condition.axis)
        searched = [each for each in space.parameters if each.name == condition.name]
        choices = [*itertools.chain(*(each.choices for each in searched))]
        if searched and not choices:
            why = f"{condition.name} is searched as numbers; list them, {condition.name}=A,B"
            raise ConfigError(f"{condition.word}: {why}")
        if choices:
            choice = next((x for x in choices if unquoted(x) == unquoted(condition.choice)), None)
            if choice is None:
                known, hint = ",".join(choices), did_you_mean(condition.choice, choices)
                why = f"{condition.choice} is none of {condition.name}={known}.{hint}"
                raise ConfigError(f"{condition.word}: {why}")
            yield self.check(replace(parameter, when=(condition.name, choice)), space)
        elif self._is_fixed(condition, space):
            yield self.check(parameter, space)

    def _is_fixed(self, condition: Condition, space: Space) -> bool:
        """Return whether all trials have that choice of a key that is not searched.

        So one list of conditions serves a search of any of the choices.
        """
        name, choice = condition.name, condition.choice
        value: Any = self._settings_of(_choosing(space))
        for part in name.split("."):
            value = value.get(part, ...) if isinstance(value, Mapping) else ...
        if value is ...:
            hint = did_you_mean(name, [each.name for each in space.parameters if each.choices])
            raise ConfigError(f"{condition.word}: {name} has no choices in this search.{hint}")
        options = self._composer.options(name)
        if options:
            value = value.get("name") if isinstance(value, Mapping) else value
            if choice not in (*options, value):
                hint = did_you_mean(choice, options)
                raise ConfigError(f"{condition.word}: {choice} is no {name}.{hint}")
        return bool(_as_recorded(parse_one(f"{name}={choice}").value()) == _as_recorded(value))

    def check(self, parameter: Parameter, space: Space) -> Parameter:
        """Return the parameter, of integers where its key takes no other number.

        So it is for an argument of a custom class that has an integer, with whole ends. Raises
        ConfigError for values that the key can't have.
        """
        if self._composer.is_group(parameter.name):
            return parameter
        words = _choosing(space, space.requires(parameter))
        if "${" in str(parameter.meant):
            resolved = [self._settings_of([*words, parameter.word(x)]) for x in parameter.choices]
            path = parameter.name.split(".")
            parameter = replace(
                parameter, meant=tuple(keys.value_at(each, path) for each in resolved)
            )
        self._settings_of([*words, parameter.word(parameter.at(0))])  # else there is no such key
        settings = self._settings_of(words)

        def wrong(*values: Any) -> list[str]:
            return wrong_values(settings, {parameter.name: values}, self._machine)

        low, high = parameter.low, parameter.high
        if parameter.kind == "float" and parameter.step is None:
            between, first, last = low + (high - low) * 0.41421, math.ceil(low), math.floor(high)
            is_whole = wrong(between) and not wrong(max(first, round(between)))
            if first <= last and (is_whole or _is_integer_of_custom(parameter, settings)):
                parameter = replace(parameter, kind="int", low=first, high=last)
            else:
                parameter = replace(parameter, low=float(low), high=float(high))
        if problems := wrong(*(parameter.meant or (parameter.low, parameter.high))):
            raise ConfigError(list(dict.fromkeys(problems)))
        return parameter


def _choosing(space: Space, chosen: Mapping[str, str] = {}) -> list[str]:
    """Return the overrides of a trial with the `chosen` choices, else with each key's first."""
    return [
        each.word(chosen.get(each.name, each.choices[0]))
        for each in space.parameters
        if (chosen[each.name] in each.choices if each.name in chosen else each.when is None)
        and each.choices
    ]


def _refuse_empty(parameter: Parameter, word: str) -> None:
    low, high = parameter.low, parameter.high
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"{word}: needs two finite ends")
    if low > high or (parameter.step is None and low == high):
        raise ConfigError(f"{word}: is empty; the first end must be below the second")
    if parameter.log and low <= 0:
        raise ConfigError(f"{word}: a logarithmic scale begins above 0, such as at 1e-5")


def _interval(name: str, word: str, sweep: Any, log: bool) -> Parameter:
    low, high = sweep.start, sweep.end
    is_int = isinstance(low, int) and isinstance(high, int)  # by int(interval(1,8))
    if re.search(_WHOLE, word):  # whole numbers, which Hydra reads as floats
        low, high = int(low), int(high)
    return Parameter(name, "int" if is_int else "float", low, high, log)


def _range(name: str, word: str, sweep: Any, log: bool) -> Parameter:
    if next(numbers_of(word, sweep), None) is None:
        raise ConfigError(f"{word}: the range is empty; its end is exclusive")
    start, stop, step = sweep.start, sweep.stop, sweep.step
    count = math.ceil((stop - start) / step - 1e-9)
    is_int = all(isinstance(each, int) for each in (start, stop, step))
    low, high = sorted((start, start + (count - 1) * step))
    if not is_int:  # as typed: 0.7 + 2 * 0.1 is a little less than 0.9
        low, high = float(f"{low:.12g}"), float(f"{high:.12g}")
    if log and not (is_int and abs(step) == 1):
        raise ConfigError(f"{word}: tag(log, range(...)) needs a step of 1; use an interval")
    return Parameter(name, "int" if is_int else "float", low, high, log, None if log else abs(step))


def _is_integer_of_custom(parameter: Parameter, settings: Any) -> bool:
    known, ends = keys.flat(settings), {type(parameter.low), type(parameter.high)}
    is_of_custom = f"{parameter.name.partition('.')[0]}._target_" in known
    return is_of_custom and ends == {int} == {type(known.get(parameter.name))}


def _as_recorded(value: Any) -> Any:
    """Return the value with lists in place of tuples."""
    return [*map(_as_recorded, value)] if isinstance(value, list | tuple) else value
