"""The values that a text, a number or a list of another type was meant as. Free of torch."""

from __future__ import annotations

import math
import re
from collections.abc import Set
from typing import Any

from expt.config.constraints import typed
from expt.config.key_types import takes_null

_NULLS = ("None", "none", "null", "NULL", "Null", "~", "")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def meant(value: Any, wanted: Set[str]) -> float | bool | None:
    """Return a value of a wanted type that is written like this one, or None.

    `wanted` are the types by which pydantic names its rules, such as bool, int, float and tuple.
    """
    if isinstance(value, bool):
        return value if "bool" in wanted else None
    if isinstance(value, str) and "bool" in wanted and value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    if "int" not in wanted and "float" not in wanted:
        return None
    try:
        if isinstance(value, str) and re.match(r"[-+]?0[xob]", value, re.IGNORECASE):
            return int(value, 0)
        number = float(value) if isinstance(value, str | float | int) else math.nan
    except ValueError:
        return None
    if math.isfinite(number) and number == int(number):
        return int(number)
    return number if math.isfinite(number) and "float" in wanted else None


def as_wanted(key: str, value: Any, wanted: Set[str]) -> str | None:
    """Return `meant` as it is typed, or null where the key takes that; None where it is neither."""
    if value in _NULLS and takes_null(key):
        return "null"
    found = meant(value, wanted)
    return None if found is None else typed(found)


def several(value: Any, wanted: Set[str], *, of_lists: bool) -> list[str]:
    """Return the values, each for a run of its own, that a list or a text with commas holds.

    They are typed as lists if the key takes a list, and this is one `of_lists`.
    """
    if "tuple" in wanted or not isinstance(value, str | list):
        return []
    if isinstance(value, str):
        every = [meant(each.strip(), wanted) for each in value.strip("[]").split(",")]
        are_right = len(every) > 1 and None not in every
    elif of_lists:
        every = value
        are_right = all(isinstance(each, list) for each in value)
    else:
        every = _elements(value)
        may_be_texts = not wanted <= {"bool", "int", "float"}
        are_meant = (each is None or meant(each, wanted) is not None for each in every)
        are_right = may_be_texts or all(are_meant)
    return [*map(typed, every)] if are_right else []


def _elements(value: Any) -> list[Any]:
    """Return the elements of a list, and of the lists in it."""
    if not isinstance(value, list):
        return [value]
    return [each for below in value for each in _elements(below)]
