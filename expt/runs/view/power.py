"""How many pairs show a difference: the power of the two-sided paired t test."""

from __future__ import annotations

import bisect
import math
import warnings
from typing import Any

POWER = 0.8
"""The chance of seeing a difference that is there."""


def pairs_needed(effect: float, level: float) -> int:
    """The fewest that show `effect`, a mean difference in its standard deviations, at `level` with
    a power of 0.8.

    As in Cohen, Statistical Power Analysis for the Behavioral Sciences (1988), chapter 2, but in
    whole pairs."""
    most = 2
    while _power(most, effect, level) < POWER:
        most *= 2
    return bisect.bisect_left(
        range(most), POWER, lo=2, key=lambda pairs: _power(pairs, effect, level)
    )


def _power(pairs: int, effect: float, level: float) -> float:
    """The mean over what deviation the pairs may show: scipy's noncentral t is nan where the power
    is near 1.
    """
    from scipy import stats
    from scipy.special import ndtr, stdtrit

    of: Any = stats  # which lists its distributions when it is imported
    freedom, shift = pairs - 1, effect * math.sqrt(pairs)
    critical = -stdtrit(freedom, level / 2) / math.sqrt(freedom)
    low, high = of.chi.ppf(1e-9, freedom), of.chi.isf(1e-9, freedom)

    def given(spread: float) -> float:
        return float(ndtr(shift - critical * spread) + ndtr(-shift - critical * spread))

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # of two pairs at a level near 0: it is near 0 too
        return float(of.chi.expect(given, args=(freedom,), lb=low, ub=high, epsabs=1e-6))
