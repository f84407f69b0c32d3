"""The YAML that expt ships: where it is, and which groups, options and keys it has."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from expt.command import libyaml


def conf_dir() -> Path:
    """The YAML that expt ships: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


@functools.cache  # a command asks some five times, and to look takes 2 ms
def groups() -> tuple[str, ...]:
    """The groups that expt ships, by folder name."""
    return tuple(sorted({path.parent.name for path in conf_dir().glob("*/*.yaml")}))


def options(group: str) -> list[Path]:
    """The YAML files of a group."""
    return sorted((conf_dir() / group).glob("*.yaml"))


def keys() -> Iterator[str]:
    """Every key that a person may set, dotted."""
    yield from groups()
    yield from _flat(conf_dir() / "config.yaml", "")
    for group in groups():
        for path in options(group):
            if "# @package _global_" not in path.read_text(encoding="utf-8"):
                yield from _flat(path, f"{group}.")


def _flat(path: Path, prefix: str) -> Iterator[str]:
    for key, value in (libyaml.plain(path) or {}).items():
        if key in ("defaults", "hydra") or (prefix and key == "name"):
            continue
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from (f"{prefix}{key}.{below}" for below in value)
