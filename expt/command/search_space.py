"""The space of a search, from Hydra's grammar: interval, range, choice and tag(log, ...), and from
`search.when`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from expt.command.conf_files import keys
from expt.command.misplaced import has_a_name
from expt.command.overrides import key_typed, parsed
from expt.command.sweep_values import why_empty
from expt.config.keys import flat
from expt.config.parse import wrong_values
from expt.errors import ConfigError, did_you_mean
from expt.machine import Machine
from expt.runs.typed import unquoted
from expt.search.space import Parameter, Space, Way, ways

SettingsOf = Callable[[Sequence[str]], Mapping[str, Any]]
"""The settings of a run with these words."""


def space_of(
    words: Sequence[str],
    when: Sequence[str],
    loader: ConfigLoader,
    settings_of: SettingsOf,
    machine: Machine,
    is_group: Callable[[str], bool],
) -> Space:
    """The axes among `words`, and those of some points alone.

    Raises ConfigError with a line for what cannot be.
    """
    parser = OverridesParser.create(config_loader=loader)
    overrides = [each for each in parser.parse_overrides(list(words)) if each.is_sweep_override()]
    axes = [_parameter(override, is_group) for override in overrides]
    fixed = [each.word(each.choices[0]) for each in axes if each.kind == "categorical"]

    def typed(each: Parameter, words: Sequence[str]) -> Parameter:
        return (
            each
            if is_group(each.name.partition("@")[0])
            else _typed(each, words, settings_of, machine)
        )

    space = [typed(each, fixed) for each in axes]
    of_all: dict[str, set[str]] = {}
    """By the name of a key that is not searched: what is, since that has the value of a condition.
    """
    for text in when:
        name, choice, word = _parted(text)
        choice = next(
            (each for each in _choices(name, space) if unquoted(each) == unquoted(choice)), choice
        )
        parameter = _parameter(_parsed(parser, text, word), is_group)
        if any(each.name == name for each in space):
            _check_choice(text, name, choice, space)
            parameter = dataclasses.replace(parameter, when=(name, choice))
        elif not _is_fixed(
            text, name, choice, settings_of(fixed), space, loader.get_group_options(name)
        ):
            continue
        else:
            of_all.setdefault(name, set()).add(parameter.name)
        _refuse_circle(text, name, parameter, space, of_all)
        way, *_ = ways(parameter, space)
        chosen = {above.typed: above.word(choice) for above, choice in way}
        others = [each for each in fixed if each.partition("=")[0] not in chosen]
        space.append(typed(parameter, [*others, *chosen.values()]))
    if not space:
        why = ", and no condition of search.when holds" if when else ""
        raise ConfigError(
            f"search: nothing to search{why}; type an axis, as in"
            " 'optimizer.lr=tag(log,interval(1e-4,1))'"
        )
    _refuse_twice(space)
    return Space(tuple(space))


def _refuse_twice(space: Sequence[Parameter]) -> None:
    """Raise ConfigError where a point could have two values of one key."""

    def may_meet(one: Way, other: Way) -> bool:
        return all(a.name != b.name or x == y for a, x in one for b, y in other)

    for one, other in itertools.combinations(space, 2):
        pairs = (
            itertools.product(ways(one, space), ways(other, space))
            if one.name == other.name
            else ()
        )
        if any(may_meet(*pair) for pair in pairs):
            raise ConfigError(
                f"{one.name}: is searched twice in one point; name it once, or below different"
                " choices of one key, as in search.when"
            )


def _refuse_circle(
    text: str,
    name: str,
    parameter: Parameter,
    space: Sequence[Parameter],
    of_all: Mapping[str, Collection[str]],
) -> None:
    """Raise ConfigError where a parameter would be there by a choice of its own; `name` is what it
    depends on.
    """
    above = {name, *(each.name for way in ways(parameter, space) for each, _ in way)}
    if parameter.name in above or above & {*of_all.get(parameter.name, ())}:
        by = "" if name == parameter.name else f", by {name}"
        raise ConfigError(
            f"search.when={text}: {parameter.name} would depend on itself{by}; give its values"
            " once, in an axis of all points or below a key that does not depend on it"
        )


def _parted(text: str) -> tuple[str, str, str]:
    """The name and the choice that a conditional word depends on, and the word."""
    condition, colon, word = text.partition(":")
    name, equals, choice = condition.strip().partition("=")
    key = f"search.when={text}"
    if not colon or not equals:
        raise ConfigError(
            f"{key}: write 'KEY=CHOICE: AXIS', as in 'model=mlp: model.hidden=[32],[64]'"
        )
    return name, choice.strip(), word.strip()


def _choices(name: str, space: Sequence[Parameter]) -> list[str]:
    return list(itertools.chain(*(each.choices for each in space if each.name == name)))


def _check_choice(text: str, name: str, choice: str, space: Sequence[Parameter]) -> None:
    """Raise ConfigError where no point can have that choice."""
    choices = _choices(name, space)
    if not choices:
        _refuse_condition(text, name, space)
    if choice not in choices:
        hint = did_you_mean(choice, choices)
        raise ConfigError(
            f"search.when={text}: {choice} is none of {name}={','.join(choices)}.{hint}"
        )


def _is_fixed(
    text: str,
    name: str,
    choice: str,
    settings: Any,
    space: Sequence[Parameter],
    known: Sequence[str],
) -> bool:
    """Whether all points have that choice, which is not searched.

    Raises ConfigError for what is no key, or no choice.

    A block below another choice is left out: so one list of blocks serves a search of any of the
    choices."""
    if not _has(settings, name):
        _refuse_condition(text, name, space)
    for part in name.split("."):
        settings = settings[part]
    value = settings.get("name") if isinstance(settings, Mapping) and known else settings
    if known and choice not in (*known, value):
        raise ConfigError(
            f"search.when={text}: {choice} is no {name}.{did_you_mean(choice, known)}"
        )
    return bool(_listed(parsed([f"{name}={choice}"])[0].value()) == _listed(value))


def _refuse_condition(text: str, name: str, space: Sequence[Parameter]) -> NoReturn:
    hint = did_you_mean(name, [each.name for each in space if each.choices])
    hint = hint or (did_you_mean(name, keys()) if name not in {*keys()} else "")
    hint = (
        hint
        or " Name a key that has several values, as in model=mlp,convnet, or one for all points."
    )
    raise ConfigError(f"search.when={text}: {name} is no axis with choices in this search.{hint}")


def _parsed(parser: OverridesParser, text: str, word: str) -> Override:
    (override,) = parser.parse_overrides([word])
    if not override.is_sweep_override():
        raise ConfigError(
            f"search.when={text}: {word} has one value alone; give several, or an interval"
        )
    return override


def _parameter(override: Override, is_group: Callable[[str], bool]) -> Parameter:
    """An axis as it was typed; an interval may still turn out to be one of integers."""
    sweep, name, typed = override.value(), key_typed(override), override.get_key_element()
    tags: set[str] = getattr(sweep, "tags", set())
    if unknown := tags - {"log"}:
        raise ConfigError(
            f"{name}: the tag {sorted(unknown)[0]} says nothing here; use tag(log, ...) or none"
        )
    log = "log" in tags
    if isinstance(sweep, IntervalSweep | RangeSweep) and is_group(override.key_or_group):
        raise ConfigError(has_a_name(str(override.input_line)))
    if isinstance(sweep, IntervalSweep):
        is_int = isinstance(sweep.start, int) and isinstance(
            sweep.end, int
        )  # as int(interval(1,8)) makes them
        return _checked(
            override,
            Parameter(
                name, "int" if is_int else "float", *_ends(override, sweep), log, typed=typed
            ),
        )
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
    _refuse_several_at_once(override, [value for value in meant if isinstance(value, dict)])
    return Parameter(
        name, "categorical", choices=tuple(texts), meant=tuple(map(_listed, meant)), typed=typed
    )


def _refuse_several_at_once(override: Override, mappings: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError where a run could be of two choices: a mapping leaves the keys that it
    doesn't name.
    """
    named = [{*flat(mapping)} for mapping in mappings]
    for one, other in itertools.combinations(named, 2):
        if one - other and other - one:
            raise ConfigError(
                f"{override.input_line}: a run may have {min(one - other)} and {min(other - one)},"
                " and be both; name the same keys in each mapping"
            )


def _ends(override: Override, sweep: IntervalSweep) -> tuple[float, float]:
    """Those of an interval; integers where both are typed so, of which Hydra makes floats."""
    assert sweep.start is not None
    assert sweep.end is not None
    whole = re.search(
        r"interval\((?:\w+=)?\s*[-+]?\d+\s*,\s*(?:\w+=)?\s*[-+]?\d+\s*\)", override.input_line or ""
    )
    return (int(sweep.start), int(sweep.end)) if whole else (sweep.start, sweep.end)


def _range(name: str, sweep: RangeSweep, log: bool, typed: str) -> Parameter:
    start, stop, step = sweep.start, sweep.stop, sweep.step
    assert start is not None
    assert stop is not None
    assert step
    values = math.ceil((stop - start) / step - 1e-9)
    if values < 1:
        raise ConfigError(
            f"{name}: its range is empty; the end, which is not part of it, must lie behind the"
            " first value"
        )
    is_int = all(isinstance(each, int) for each in (start, stop, step))
    low, high = sorted((start, start + (values - 1) * step))
    if not is_int:  # as they would be typed: 0.7 + 2 * 0.1 is a little less than 0.9
        low, high = float(f"{low:.12g}"), float(f"{high:.12g}")
    if log and not (is_int and abs(step) == 1):
        raise ConfigError(
            f"{name}: tag(log, range(...)) is of whole numbers with a step of 1; use an interval"
        )
    return Parameter(
        name, "int" if is_int else "float", low, high, log, None if log else abs(step), typed=typed
    )


def _checked(override: Override, parameter: Parameter) -> Parameter:
    word, low, high = override.input_line, parameter.low, parameter.high
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"{word}: an interval needs two finite ends")
    if low >= high if parameter.step is None else low > high:
        raise ConfigError(f"{word}: is empty; the first end must be below the second")
    if parameter.log and low <= 0:
        raise ConfigError(
            f"{word}: on a scale of logarithms all values are above 0; begin at one, as in 1e-5"
        )
    return parameter


def _typed(
    parameter: Parameter, words: Sequence[str], settings_of: SettingsOf, machine: Machine
) -> Parameter:
    """The parameter, of integers where its key takes no other number; beside it the point has these
    `words`.

    So has an argument of an own class, of which nothing is known, whose value is one, where the
    ends are typed as such. Raises ConfigError for what its key can't be, and what Hydra does where
    there is no such key."""
    settings = settings_of(words)
    if not _has(settings, parameter.name):
        settings_of([*words, parameter.word(parameter.at(0))])

    def wrong(*values: Any) -> list[str]:
        return wrong_values(settings, {parameter.name: values}, machine)

    problems = (
        wrong(*parameter.meant)
        if parameter.kind == "categorical"
        else wrong(parameter.low, parameter.high)
    )
    if parameter.kind == "float" and parameter.step is None:
        between = parameter.low + (parameter.high - parameter.low) * 0.41421
        whole = dataclasses.replace(
            parameter, kind="int", low=math.ceil(parameter.low), high=math.floor(parameter.high)
        )
        takes_whole = wrong(between) and not wrong(max(int(whole.low), round(between)))
        if whole.low <= whole.high and (takes_whole or _is_own_integer(parameter, settings)):
            parameter, problems = whole, wrong(int(whole.low), int(whole.high))
        else:
            parameter = dataclasses.replace(
                parameter, low=float(parameter.low), high=float(parameter.high)
            )
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return parameter


def _is_own_integer(parameter: Parameter, settings: Any) -> bool:
    above, is_own = settings, False
    for part in parameter.name.split("."):
        is_own |= isinstance(above, Mapping) and "_target_" in above
        above = above.get(part) if isinstance(above, Mapping) else None
    return is_own and all(type(each) is int for each in (above, parameter.low, parameter.high))


def _has(settings: Any, name: str) -> bool:
    for part in name.split("."):
        if not isinstance(settings, Mapping) or part not in settings:
            return False
        settings = settings[part]
    return True


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, list | tuple) else value
