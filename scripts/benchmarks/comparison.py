"""Systems measured in turn, so that what else the machine does falls on all of them; medians and
ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

OURS = "expt"


@dataclass
class Comparison:
    """One row of the table: a quantity of several systems, a value for each round."""

    measure: str
    case: str
    unit: str
    values: dict[str, list[float]] = field(default_factory=dict)
    at_most: dict[str, float] = field(default_factory=dict)
    """the largest ratio to a system that the project allows itself"""
    at_least: float | None = None
    """the smallest value that the project allows itself, where more is better"""

    def median(self, system: str) -> float:
        """The middle one of a system's rounds."""
        return statistics.median(self.values[system])

    @property
    def ratios(self) -> dict[str, float]:
        """Ours to each other system: the median of the rounds' ratios."""
        ours = self.values.get(OURS, [])
        return {
            name: statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            for name, theirs in self.values.items()
            if name != OURS
        }

    @property
    def met(self) -> bool | None:
        """Whether every bar that was measured is met; None where there is none."""
        ratios = self.ratios
        checks = [ratios[name] <= bar for name, bar in self.at_most.items() if name in ratios]
        if self.at_least is not None:
            checks.append(self.median(OURS) >= self.at_least)
        return all(checks) if checks else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "measure": self.measure,
            "case": self.case,
            "unit": self.unit,
            "rounds": self.values,
            "median": {name: self.median(name) for name in self.values},
            "ratio": self.ratios,
            "at_most": self.at_most,
            "at_least": self.at_least,
            "met": self.met,
        }


def interleave(actions: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The values of every action, called A B C, A B C, ..."""
    values: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            values[name].append(action())
    return values
