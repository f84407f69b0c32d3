"""The space of a search: parameters with their values, some of them only in some trials.

Plain data, without Hydra.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from expt.config.constraints import typed

Value: TypeAlias = int | float | str
"""A number, or the text of a choice of a categorical parameter."""
Values: TypeAlias = dict[str, Value]
"""The values of a trial, by the names of its active parameters."""
DIGITS = 5
"""Significant digits of a suggested float: it names a folder, and may be typed."""
ENUMERABLE = 10_000
"""The largest number of points of a space that are listed one by one."""


@dataclass(frozen=True)
class Parameter:
    """A key that is searched."""

    name: str
    kind: Literal["float", "int", "categorical"]
    low: float = 0.0
    high: float = 0.0
    """The highest value, inclusive."""
    log: bool = False
    step: float | None = None
    choices: tuple[str, ...] = ()
    """The choices of a categorical parameter as they are typed."""
    meant: tuple[Any, ...] = ()
    """The value of each choice, as a record has it."""
    typed: str = ""
    """The key with a prefix that was typed, such as `+`."""
    when: tuple[str, str] | None = None
    """The name and the choice of another parameter without which this one is inactive."""

    def word(self, value: Value) -> str:
        """Return the override for the value."""
        text = (
            value if isinstance(value, str) and value in self.choices else typed(value, exact=True)
        )
        return f"{self.typed or self.name}={text}"

    def is_active(self, values: Mapping[str, Value]) -> bool:
        """Return whether a trial with these values has this parameter."""
        return self.when is None or str(values.get(self.when[0])) == self.when[1]

    def read(self, found: Any) -> Value | None:
        """Return a record's value as one of this parameter, or None."""
        if self.kind == "categorical":
            pairs = zip(self.choices, self.meant, strict=True)
            return next((text for text, meant in pairs if _equal(found, meant)), None)
        if isinstance(found, bool) or not isinstance(found, int | float):
            return None
        slack = 1e-6 * (self.step or 0.0)
        if not self.low - slack <= found <= self.high + slack:
            return None
        near = self.rounded(int(found) if self.kind == "int" else float(found))
        if self.kind == "int":
            return near if found == near and (found - self.low) % (self.step or 1) == 0 else None
        if self.step is None:
            return float(found)
        return near if abs(found - float(near)) < slack else None

    def rounded(self, value: Value) -> Value:
        """Return a float as it is typed, with few digits and within the bounds."""
        if self.kind != "float" or not isinstance(value, float):
            return value
        if self.step is not None:
            steps = round((value - self.low) / self.step)
            return float(f"{min(self.high, self.low + steps * self.step):.12g}")
        return min(self.high, max(self.low, float(f"{value:.{self._digits}g}")))

    @property
    def _digits(self) -> int:
        """More digits where all values begin with the same ones."""
        width = self.high - self.low
        alike = math.log10(max(abs(self.low), abs(self.high)) / width) if width else 0.0
        return DIGITS + max(0, math.floor(alike) - 1)

    @property
    def _count(self) -> int:
        """The number of values of an int or of a float in steps."""
        return int((self.high - self.low) / (self.step or 1) + 1e-9) + 1

    def all(self) -> list[Value] | None:
        """Return every value, or None where they are too many."""
        if self.kind == "categorical":
            return list(self.choices)
        if (self.kind == "float" and self.step is None) or self._count > ENUMERABLE:
            return None
        return [self._at_index(index) for index in range(self._count)]

    def _at_index(self, index: int) -> Value:
        value = self.low + index * (self.step or 1)
        return int(value) if self.kind == "int" else self.rounded(value)

    def at(self, share: float) -> Value:
        """Return the value at `share` of the range, in [0, 1)."""
        if self.kind == "categorical":
            return self.choices[int(share * len(self.choices))]
        if (self.step is not None or self.kind == "int") and not self.log:
            return self._at_index(int(share * self._count))
        low, high = self._scaled_ends
        value = low + share * (high - low)
        value = math.exp(value) if self.log else value
        if self.kind == "int":
            return min(int(self.high), max(int(self.low), round(value)))
        return self.rounded(value)

    def share(self, value: Value) -> float:
        """Return where a number lies in the range, the inverse of `at`."""
        low, high = self._scaled_ends
        number = math.log(float(value)) if self.log else float(value)
        return 0.5 if high == low else (number - low) / (high - low)

    @property
    def _scaled_ends(self) -> tuple[float, float]:
        """The ends, half a step further out for values in steps, by their logarithms for `log`."""
        widen = 0.5 * (self.step or 1) if self.step is not None or self.kind == "int" else 0.0
        low, high = self.low - widen, self.high + widen
        return (math.log(low), math.log(high)) if self.log else (low, high)

    @property
    def ends(self) -> list[Value]:
        """Each choice, or the lowest and the highest value."""
        return list(self.choices) or [self.at(0), self.at(1 - 1e-9)]


@dataclass(frozen=True)
class Space:
    """All parameters in the order in which they were typed, after those that they depend on.

    Several parameters of one name are ranges of one key, under conditions that exclude each other.
    """

    parameters: tuple[Parameter, ...]

    def words(self, values: Mapping[str, Value]) -> list[str]:
        """Return the overrides of a trial."""
        return [each.word(values[each.name]) for each in self.parameters if each.is_active(values)]

    def requires(self, parameter: Parameter) -> dict[str, str]:
        """Return the choices of other parameters without which this one is inactive."""
        found: dict[str, str] = {}
        while parameter.when is not None:
            name, choice = parameter.when
            found[name] = choice
            above = [p for p in self.parameters if p.name == name and choice in p.choices]
            if not above:
                break
            parameter = above[0]
        return found

    def point(self, values: Iterable[Value]) -> Values:
        """Return the trial with a value for each parameter, without the inactive ones."""
        found: Values = {}
        for parameter, value in zip(self.parameters, values, strict=True):
            if parameter.is_active(found):
                found[parameter.name] = value
        return found

    def corners(self) -> list[Values]:
        """Return few trials that have each choice, and the ends of each range, at least once."""
        found: list[Values] = []

        def missing(parameter: Parameter) -> list[Value]:
            mine = [point for point in found if parameter.is_active(point)]
            have = {point.get(parameter.name) for point in mine}
            return [end for end in parameter.ends if end not in have]

        for parameter in self.parameters:
            while ends := missing(parameter):
                chosen: Values = {**self.requires(parameter), parameter.name: ends[0]}
                preferred = ([*missing(each), each.at(0)][0] for each in self.parameters)
                pairs = zip(self.parameters, preferred, strict=True)
                found.append(self.point([chosen.get(each.name, value) for each, value in pairs]))
                if not parameter.is_active(found[-1]):
                    break
        return found

    def variants(self, parameter: Parameter) -> list[Values]:
        """Return trials that differ by one parameter alone, as far as that is possible."""
        required = self.requires(parameter)
        chosen: list[Values] = [{**required, parameter.name: end} for end in parameter.ends]
        return [self.point(own.get(p.name, p.at(0)) for p in self.parameters) for own in chosen]

    @property
    def labels(self) -> list[str]:
        """A unique name for each parameter: its own, or its own with its condition."""
        names = [parameter.name for parameter in self.parameters]
        return [
            each.name
            if names.count(each.name) == 1
            else f"{each.name} if {'='.join(each.when or ())}"
            for each in self.parameters
        ]

    def labelled(self, values: Mapping[str, Value]) -> Values:
        """Return a trial's values by the labels of its parameters."""
        pairs = zip(self.labels, self.parameters, strict=True)
        return {label: values[each.name] for label, each in pairs if each.is_active(values)}

    def read(self, setting: Callable[[str], Any]) -> Values | None:
        """Return the values of a run by its settings, or None where it lies outside the space."""
        found: Values = {}
        for parameter in self.parameters:
            if parameter.is_active(found):
                value = parameter.read(setting(parameter.name))
                if value is None:
                    return None
                found[parameter.name] = value
        return found

    def without(self, tried: Iterable[Mapping[str, Value]]) -> list[Values] | None:
        """Return the points that are not among the `tried`, or None where they are too many."""
        found: list[Values] = [{}]
        for each in self.parameters:
            if (every := each.all()) is None:
                return None
            found = [
                {**point, each.name: value} if each.is_active(point) else point
                for point in found
                for value in (every if each.is_active(point) else every[:1])
            ]
            if len(found) > ENUMERABLE:
                return None
        known = {as_key(point) for point in tried}
        return [point for point in found if as_key(point) not in known]


def as_key(values: Mapping[str, Value]) -> Hashable:
    """Return a key that is equal for equal trials."""
    return frozenset(values.items())


def _equal(found: Any, meant: Any) -> bool:
    """Compare as JSON does: true is not 1, but 1.0 is, and a tuple is a list."""
    if isinstance(meant, list):
        is_list = isinstance(found, list | tuple) and len(found) == len(meant)
        return is_list and all(map(_equal, found, meant))
    return isinstance(found, bool) == isinstance(meant, bool) and bool(found == meant)
