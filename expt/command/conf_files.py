"""The YAML that expt ships: where it is, and which groups, options and keys it has."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from expt.errors import ConfigError


def conf_dir() -> Path:
    """Return the folder of the YAML that expt ships: in the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


@functools.cache
def groups() -> tuple[str, ...]:
    """Return the groups that expt ships, by folder name."""
    return tuple(sorted({path.parent.name for path in conf_dir().glob("*/*.yaml")}))


def options(group: str) -> list[Path]:
    """Return the YAML files of a group."""
    return sorted((conf_dir() / group).glob("*.yaml"))


@functools.cache
def keys() -> tuple[str, ...]:
    """Return every key that may be set, dotted."""
    found = [*groups(), *_flat(conf_dir() / "config.yaml", "")]
    for group in groups():
        for path in options(group):
            if "# @package _global_" not in path.read_text(encoding="utf-8"):
                found += _flat(path, f"{group}.")
    return tuple(dict.fromkeys(found))


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file, interpolations as they are written."""
    return yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def conf_here(settings: Sequence[str]) -> str | None:
    """Return `conf` where the current folder has one with a group of ours, or one that is typed."""
    here = Path("conf")
    if not here.is_dir() or here.resolve() == conf_dir().resolve():
        return None
    names = (word.partition("=")[0].lstrip("+~").partition("@")[0] for word in settings)
    typed = {name for name in names if re.fullmatch(r"[\w-]+(/[\w-]+)*", name)}
    wanted = {*groups(), *(typed - {*keys()})}
    return str(here) if any(any((here / name).glob("*.yaml")) for name in wanted) else None


def refuse_hidden(folder: Path) -> None:
    """Raise ConfigError for a choice that expt has too, with other content: Hydra takes expt's."""
    for path in sorted(folder.glob("*/*.yaml")):
        ours = conf_dir() / path.parent.name / path.name
        if ours.is_file() and path.read_bytes() != ours.read_bytes():
            word = f"{path.parent.name}={path.stem}"
            raise ConfigError(
                f"{path}: expt's own {word} would be taken; give the file another name"
            )


def _flat(path: Path, prefix: str) -> Iterator[str]:
    for key, value in (read_yaml(path) or {}).items():
        if key in ("defaults", "hydra") or (prefix and key == "name"):
            continue
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from (f"{prefix}{key}.{below}" for below in value)
