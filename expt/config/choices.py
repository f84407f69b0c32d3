"""The values that a setting takes, where they can be counted: for a shell that completes what is
typed.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

from expt.config.schema import RunConfig


def choices_of(key: str) -> tuple[str, ...]:
    """Those of `key`, as in `batch_norm` and `ddp.comm_hook`, as they are typed; none for a number
    or a text.
    """
    kinds: list[Any] = [RunConfig]
    for part in key.split("."):
        classes = (
            kind for kind in kinds if dataclasses.is_dataclass(kind) and isinstance(kind, type)
        )
        hints = (typing.get_type_hints(found).get(part) for found in classes)
        kinds = [kind for hint in hints if hint is not None for kind in _alternatives(hint)]
    values = [value for kind in kinds for value in _values(kind)]
    return tuple(dict.fromkeys(values)) if set(values) - {"null"} else ()


def _alternatives(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) in (
        typing.Union,
        types.UnionType,
        tuple,
    ):  # of a list, one may be typed alone
        for one in typing.get_args(hint):
            yield from _alternatives(one)
    else:
        yield hint


def _values(kind: Any) -> Iterator[str]:
    if kind is bool:
        yield from ("true", "false")
    elif kind is types.NoneType:
        yield "null"
    elif typing.get_origin(kind) is typing.Literal:
        yield from (
            str(value).lower() if isinstance(value, bool) else str(value)
            for value in typing.get_args(kind)
        )
