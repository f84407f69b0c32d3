"""Whether samples are of one structure, as a batch of them must be: another would be lost in it, or
cast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from expt.data.checked_samples import Check
from expt.errors import DataError

Structure = Any
"""Containers of one kind as they are, and in place of a tensor its dtype, of else its type."""
_MEND = "make all alike, or give the dataset a method collate(samples) -> batch"


def structure_of(sample: Any) -> Structure:
    """What is to be equal of all samples; lengths of tensors may differ, which torch tells of."""
    if isinstance(sample, Tensor | np.ndarray):
        return sample.dtype
    if isinstance(sample, Mapping):
        return {key: structure_of(below) for key, below in sample.items()}
    if isinstance(sample, list | tuple):
        return [structure_of(below) for below in sample]
    return float if isinstance(sample, bool | int | float | np.number | np.bool_) else type(sample)


def like(expected: Structure, check: Check) -> Check:
    """A `check` that also refuses a sample of another structure than the first's."""

    def also(sample: Any) -> Any:
        if sample is None:
            raise DataError("it is None; return (inputs, targets) from __getitem__")
        found = structure_of(sample)
        if found != expected:
            where, one, other = _difference(found, expected, "")
            raise DataError(
                f"{where or 'it'} is {one}, and of the first training sample {other}; {_MEND}"
            )
        return check(sample)

    return also


def _difference(found: Structure, expected: Structure, path: str) -> tuple[str, str, str]:
    """Where they first differ, and what is there."""
    pairs: dict[Any, tuple[Any, Any]] = {}
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        pairs = {key: (found[key], expected[key]) for key in found}
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = dict(enumerate(zip(found, expected, strict=True)))
    for key, (one, other) in pairs.items():
        if one != other:
            return _difference(one, other, f"{path}[{key!r}]")
    return path, told(found), told(expected)


def told(structure: Structure) -> str:
    """In words."""
    if isinstance(structure, dict):
        return f"a dict of {', '.join(map(str, structure)) or 'nothing'}"
    if isinstance(structure, list):
        return f"{len(structure)} values"
    if isinstance(structure, type):
        return {float: "a number", type(None): "None"}.get(structure, f"a {structure.__name__}")
    return f"a tensor of {str(structure).removeprefix('torch.')}"
