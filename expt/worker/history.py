"""What a run remembers of its past epochs."""

from __future__ import annotations

import math


def is_better(value: float, than: float | None, objective: str) -> bool:
    """Whether `value` of the tag `objective` is better than the best so far; a loss is the better the lower it is."""
    if than is None or not math.isfinite(value):
        return than is None and math.isfinite(value)
    return value < than if objective.startswith("loss") else value > than
