"""JSON as every program reads it, which has no words for what is no finite number.

nan is null, and infinity a number beyond what a float holds, as which it is read again: JSON's
grammar has no limit."""

from __future__ import annotations

import json
import math
from typing import Any

_INFINITE, _MINUS_INFINITE = "\0inf", "\0-inf"
_NUMBERS = {_INFINITE: "1e999", _MINUS_INFINITE: "-1e999"}
"""What stands for them while all else is written, and what is put there then."""


def dumps(content: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """`content` as JSON."""
    try:
        return json.dumps(content, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:
        text = json.dumps(
            _in_words(content), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False
        )
        for word, number in _NUMBERS.items():
            text = text.replace(json.dumps(word), number)
        return text


def _in_words(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _in_words(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_in_words(value) for value in content]
    if not isinstance(content, float) or math.isfinite(content):
        return content
    return None if math.isnan(content) else _INFINITE if content > 0 else _MINUS_INFINITE
