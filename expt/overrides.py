"""What a person typed for a run: as keys and values, and as a folder's name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

MAX_NAME_BYTES = 180  # file systems take 255; leaves room for a suffix and for .tmp beside it


def as_dict(overrides: Sequence[str]) -> dict[str, Any]:
    """From `["model=mlp", "optimizer.lr=0.1"]` to keys and values."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return {override.key_or_group: override.value() for override in parsed}


def folder_names(points: Sequence[Sequence[str]]) -> list[str]:
    """A name for each point, of the settings in which the points differ: `lr=0.1,model=mlp`."""
    settings = [dict(_split(override) for override in point) for point in points]
    varied = [
        key
        for key in dict.fromkeys(key for point in settings for key in point)
        if len({point.get(key) for point in settings}) > 1
    ]
    keys = varied or list(dict.fromkeys(key for point in settings for key in point))
    short = _short_keys(keys)
    return [run_name({short[key]: point[key] for key in keys if key in point}) for point in settings]


def run_name(settings: Mapping[str, str]) -> str:
    """A folder's name that says what differs; too long a one is cut, and made unique by its place in the caller."""
    parts = [f"{key}={value}" for key, value in sorted(settings.items())]
    name = re.sub(r"[^\w.,=+\-\[\]]", "_", ",".join(parts)) or "run"
    while len(name.encode()) > MAX_NAME_BYTES:
        name = name[:-1]
    return name if name.strip(".") else "run"


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.lstrip("+~").partition("=")
    return key, value.strip("'\"")


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """`optimizer.lr` is `lr`, unless another key would be `lr` too."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}
