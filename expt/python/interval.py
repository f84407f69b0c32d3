"""An axis of a search that has no end of values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """See `interval`."""

    low: float
    high: float
    log: bool = False

    def __str__(self) -> str:
        """In Hydra's grammar."""
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        text = f"interval({self.low!r},{self.high!r})"
        text = f"int({text})" if whole else text
        return f"tag(log,{text})" if self.log else text


def interval(low: float, high: float, *, log: bool = False) -> Interval:
    """All numbers from `low` to `high`, an axis of a search: whole ones where both are, by their
    logarithm with `log`.

    >>> str(interval(1e-4, 1.0, log=True))
    'tag(log,interval(0.0001,1.0))'
    >>> str(interval(16, 256))
    'int(interval(16,256))'
    """
    return Interval(low, high, log)
