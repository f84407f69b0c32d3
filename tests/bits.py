"""Whether two states are equal to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same(found: Any, expected: Any) -> bool:
    """Types, order of keys, strides and bits; an OrderedDict is a dict."""
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and _raw(found) == _raw(expected)
    if isinstance(expected, dict) and isinstance(found, dict):
        return [*found] == [*expected] and all(map(same, found.values(), expected.values()))
    if type(found) is not type(expected):
        return False
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return repr(found) == repr(expected)  # nan and -0.0, too


def _raw(tensor: Tensor) -> Any:
    plain = tensor.detach().resolve_conj().resolve_neg()
    bits = plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tensor.shape, tensor.stride() if tensor.numel() else (), bits


def differing(found: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    """The keys whose values are not the same."""
    return {key for key in expected.keys() | found if not same(found.get(key), expected.get(key))}
