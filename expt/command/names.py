"""Names of a sweep's runs, by the settings in which they differ."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence

from expt.runs.request import unquoted

MAX_NAME_BYTES = 180
"""File systems take 255; this leaves room for a suffix, and for `.tmp`."""


def folder_names(points: Sequence[Sequence[str]], swept: Collection[str] = ()) -> list[str]:
    """Return a name for each run, of the settings that differ: `lr=0.1,model=mlp`.

    `swept` are keys that vary, whether or not they do among these. Equal names are equal runs.
    """
    settings = [dict(map(_split, point)) for point in points]
    given = list(dict.fromkeys(key for point in settings for key in point))
    varied = [
        key for key in given if key in swept or len({point.get(key) for point in settings}) > 1
    ]
    keys = varied or given
    short = _short_keys(keys)
    return [
        run_name({short[key]: point[key] for key in keys if key in point}) for point in settings
    ]


def run_name(settings: Mapping[str, str]) -> str:
    """Return a name for a folder; one that a file system would not take is changed, and unique."""
    text = ",".join(f"{key}={value}" for key, value in sorted(settings.items()))
    name = re.sub(r"[^\w.,=+\-\[\]]", "_", text)
    while len(name.encode()) > MAX_NAME_BYTES:
        name = name[:-1]
    if name != text:  # two texts may have become one
        name = f"{name},{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return name or "run"


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.lstrip("+~").partition("=")
    # Of a custom class the last part of its name, and its arguments.
    own = re.fullmatch(r"\{\s*_target_:\s*([\w.]*?)(\w+)\s*(?:,(.*))?\}", value, re.DOTALL)
    return key, (f"{own[2]}({own[3]})" if own[3] else own[2]) if own else unquoted(value)


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Shorten `optimizer.lr` to `lr`, unless another key would be `lr` too."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)
    }
