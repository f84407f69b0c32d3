"""What is searched: parameters, each with its values, some of them in some points alone.

Plain data, no Hydra.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from expt.runs.typed import literal

Value: TypeAlias = int | float | str
"""Of a categorical parameter it is the text of a choice."""
Values: TypeAlias = dict[str, Value]
"""A point: the value of each active parameter, by its name."""
DIGITS = 5
"""Significant ones of most floats that are suggested: the name of a folder, and of a setting to be
typed.
"""
ENUMERABLE = 10_000
"""Points of a space that may be looked at one by one."""


@dataclass(frozen=True)
class Parameter:
    """One key that is searched."""

    name: str
    kind: Literal["float", "int", "categorical"]
    low: float = 0.0
    high: float = 0.0
    """The highest value itself."""
    log: bool = False
    step: float | None = None
    choices: tuple[str, ...] = ()
    """Of a categorical parameter, as they are typed."""
    meant: tuple[Any, ...] = ()
    """What each choice is: a record has it as this."""
    typed: str = ""
    """The key with what was typed before it, `+` maybe."""
    when: tuple[str, str] | None = None
    """The name of another parameter and its choice, without which this one is left out."""

    def word(self, value: Value) -> str:
        """What to type for the value, which may be one that a run outside of the space has."""
        text = value if isinstance(value, str) and value in self.choices else literal(value)
        return f"{self.typed or self.name}={text}"

    def is_active(self, values: Mapping[str, Value]) -> bool:
        """Whether a point with these values has this parameter."""
        return self.when is None or str(values.get(self.when[0])) == self.when[1]

    def read(self, found: Any) -> Value | None:
        """The value that a record has, as one of this parameter's; None where it is none."""
        if self.kind == "categorical":
            plain, pairs = _plain(found), zip(self.choices, self.meant, strict=True)
            # Of two mappings that a run agrees with, the one that says more.
            fitting = [(_num_named(meant), text) for text, meant in pairs if _agrees(plain, meant)]
            return max(fitting, key=lambda pair: pair[0], default=(0, None))[1]
        if isinstance(found, bool) or not isinstance(found, int | float):
            return None
        if self.step is not None and self.kind == "float":
            near = self.rounded(min(self.high, max(self.low, float(found))))
            return near if abs(found - float(near)) < 1e-6 * self.step else None
        if not self.low <= found <= self.high:
            return None
        if self.kind == "int":
            return (
                int(found)
                if float(found).is_integer() and (found - self.low) % (self.step or 1) == 0
                else None
            )
        return float(found)

    def rounded(self, value: Value) -> Value:
        """A float with no more digits than anybody reads, within the bounds."""
        if self.kind != "float" or not isinstance(value, float):
            return value
        if self.step is not None:
            steps = round((value - self.low) / self.step)
            return float(f"{min(self.high, self.low + steps * self.step):.12g}")
        return min(self.high, max(self.low, float(f"{value:.{self._digits}g}")))

    @property
    def _digits(self) -> int:
        """More than most have, where all values begin with the same."""
        width = self.high - self.low
        alike = math.log10(max(abs(self.low), abs(self.high)) / width) if width else 0.0
        return DIGITS + max(0, math.floor(alike) - 1)

    def all(self) -> list[Value] | None:
        """Every value; None where they are too many to name."""
        if self.kind == "categorical":
            return list(self.choices)
        if self.kind == "float" and self.step is None:
            return None
        count = int((self.high - self.low) / (self.step or 1) + 1e-9) + 1
        if count > ENUMERABLE:
            return None
        found = [self.low + index * (self.step or 1) for index in range(count)]
        return (
            [int(value) for value in found]
            if self.kind == "int"
            else [self.rounded(value) for value in found]
        )

    def at(self, share: float) -> Value:
        """The value that lies at `share` of the way, in [0, 1)."""
        if self.kind == "categorical":
            return self.choices[int(share * len(self.choices))]
        if self.step is not None or self.kind == "int":
            step = self.step or 1
            count = int((self.high - self.low) / step + 1e-9) + 1
            if not self.log:
                value = self.low + int(share * count) * step
                return int(value) if self.kind == "int" else self.rounded(value)
            low, high = math.log(self.low - 0.5), math.log(self.high + 0.5)
            return min(
                int(self.high), max(int(self.low), round(math.exp(low + share * (high - low))))
            )
        if self.log:
            return self.rounded(
                math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
            )
        return self.rounded(self.low + share * (self.high - self.low))

    @property
    def ends(self) -> list[Value]:
        """The lowest and the highest value, or each choice."""
        return list(self.choices) or [self.at(0), self.at(1 - 1e-9)]

    def share(self, value: Value) -> float:
        """Where a number lies between the bounds, in [0, 1], or the middle of what `at` makes it
        of.
        """
        number = float(value)
        widen = 0.5 * (self.step or 1) if self.step is not None or self.kind == "int" else 0.0
        low, high = self.low - widen, self.high + widen
        if self.log:
            low, high, number = math.log(low), math.log(high), math.log(number)
        return 0.5 if high == low else (number - low) / (high - low)


@dataclass(frozen=True)
class Space:
    """All that is searched, in the order in which it was typed; what another depends on comes
    first.

    Several parameters of one name are ranges of one key, below conditions of which no two hold
    together."""

    parameters: tuple[Parameter, ...]

    @property
    def is_conditional(self) -> bool:
        """Whether some points lack a parameter."""
        return any(parameter.when for parameter in self.parameters)

    def words(self, values: Mapping[str, Value]) -> list[str]:
        """What to type for a point."""
        return [each.word(values[each.name]) for each in self.parameters if each.is_active(values)]

    def at(self, share: float) -> Values:
        """The point whose parameters all lie at `share` of their ways, in [0, 1)."""
        return self.point([parameter.at(share) for parameter in self.parameters])

    def corners(self) -> list[Values]:
        """Points in which each choice is made, and each number is as low and as high as it can be.

        So is what some points alone have.
        """
        most = max((len(parameter.choices) for parameter in self.parameters), default=0)
        found = [
            self.at(index / max(2, most) + (index > 0) * 1e-9) for index in range(max(2, most))
        ]
        found = list({as_key(point): point for point in [*found, self.at(1 - 1e-9)]}.values())
        for each in self.parameters:
            for way in ways(each, self.parameters)[:1]:
                for end in _missing(each, found):
                    found.append(self._by(way, each, end, found))
        return found

    def _by(self, way: Way, wanted: Parameter, value: Value, before: Sequence[Values]) -> Values:
        """A point with that value of a parameter, and else with what the points before lack."""
        chosen = [*way, (wanted, value)]
        free = ([*_missing(each, before), each.at(0)][0] for each in self.parameters)
        values = (
            next((choice for parameter, choice in chosen if parameter is each), other)
            for each, other in zip(self.parameters, free, strict=True)
        )
        return self.point(values)

    def beside(self, point: Values, name: str, value: Value) -> Values:
        """The point with that value of the parameter `name`, and what it has then beside in the
        middle.
        """
        return self.point(
            value if p.name == name else point.get(p.name, p.at(0.5)) for p in self.parameters
        )

    def point(self, values: Iterable[Value]) -> Values:
        """The point of a value for each parameter, without those that it does not have."""
        found: Values = {}
        for parameter, value in zip(self.parameters, values, strict=True):
            if parameter.is_active(found):
                found[parameter.name] = value
        return found

    @property
    def labels(self) -> list[str]:
        """A name for each parameter that no other has: its own, where it is alone with it, else
        with its condition.
        """
        names = [parameter.name for parameter in self.parameters]
        return [
            (
                each.name
                if names.count(each.name) == 1 or each.when is None
                else f"{each.name} if {'='.join(each.when)}"
            )
            for each in self.parameters
        ]

    def labelled(self, values: Mapping[str, Value]) -> Values:
        """A point, by the labels of its parameters."""
        pairs = zip(self.labels, self.parameters, strict=True)
        return {label: values[each.name] for label, each in pairs if each.is_active(values)}

    def read(self, setting: Callable[[str], Any]) -> Values | None:
        """The point that a run is, whose value of a key `setting` gives; None where it lies outside
        of the space.
        """
        found: Values = {}
        for parameter in self.parameters:
            if parameter.is_active(found):
                value = parameter.read(setting(parameter.name))
                if value is None:
                    return None
                found[parameter.name] = value
        return found

    def without(self, tried: Sequence[Mapping[str, Value]]) -> list[Values] | None:
        """The points that are not among the `tried`; None where the space has too many points to
        name them.
        """
        found: list[Values] = [{}]
        for each in self.parameters:
            if (every := each.all()) is None:
                return None
            found = [more for point in found for more in _with(point, each, every)]
            if len(found) > ENUMERABLE:
                return None
        known = {as_key(point) for point in tried}
        return [point for point in found if as_key(point) not in known]


Way: TypeAlias = tuple[tuple[Parameter, str], ...]
"""Parameters, and what is chosen of each."""


def ways(parameter: Parameter, space: Sequence[Parameter]) -> list[Way]:
    """What must be chosen of other parameters for this one to be there: one way, where those have
    one place each.
    """
    if parameter.when is None:
        return [()]
    name, choice = parameter.when
    above = [each for each in space if each.name == name and choice in each.choices]
    return [(*way, (each, choice)) for each in above for way in ways(each, space)]


def _missing(parameter: Parameter, points: Sequence[Values]) -> list[Value]:
    """Which of its ends no point has."""
    have = [
        point[parameter.name]
        for point in points
        if parameter.name in point and parameter.is_active(point)
    ]
    return [end for end in parameter.ends if end not in have]


def _with(point: Values, parameter: Parameter, every: Sequence[Value]) -> list[Values]:
    """A point with each of the values; itself where it does not have the parameter."""
    return (
        [{**point, parameter.name: value} for value in every]
        if parameter.is_active(point)
        else [point]
    )


def as_key(values: Mapping[str, Value]) -> Hashable:
    """Equal for equal points."""
    return frozenset(values.items())


def _agrees(found: Any, meant: Any) -> bool:
    """Whether a value is what is meant; of a mapping, which leaves the other keys as they are, what
    that names.
    """
    if isinstance(meant, dict):
        return isinstance(found, dict) and all(
            key in found and _agrees(found[key], meant[key]) for key in meant
        )
    if isinstance(meant, list):
        return (
            isinstance(found, list) and len(found) == len(meant) and all(map(_agrees, found, meant))
        )
    return isinstance(found, bool) == isinstance(meant, bool) and bool(found == meant)


def _num_named(meant: Any) -> int:
    below = meant.values() if isinstance(meant, dict) else meant if isinstance(meant, list) else ()
    return 1 + sum(map(_num_named, below))


def _plain(value: Any) -> Any:
    """As JSON has it."""
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
