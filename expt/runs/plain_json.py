"""JSON as every program reads it: nan and infinity, for which it has no words, are null."""

from __future__ import annotations

import json
import math
from typing import Any


def dumps(content: Any, *, indent: int | None = None) -> str:
    """`content` as JSON."""
    try:
        return json.dumps(content, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
