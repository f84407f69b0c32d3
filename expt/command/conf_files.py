"""The YAML of settings, which expt ships and a person adds: groups, choices, keys, meanings."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from expt.config import conf_dir, read_yaml
from expt.errors import ConfigError
from expt.runs.overrides import key_of


@dataclass(frozen=True)
class YamlFile:
    """A file of settings: those of a run, or those of a group's choice."""

    path: Path

    @functools.cached_property
    def content(self) -> dict[str, Any]:
        """Its mapping; empty where it holds none."""
        try:
            content = read_yaml(self.path)
        except yaml.YAMLError as error:
            raise ConfigError(f"{self.path}: {' '.join(str(error).split())}") from None
        return content if isinstance(content, dict) else {}

    @property
    def defaults(self) -> list[Any]:
        """Its defaults list; empty where it has none."""
        found = self.content.get("defaults")
        return found if isinstance(found, list) else []

    @property
    def package(self) -> str | None:
        """The package that its first lines name; None where it is that of its group."""
        text = self.path.read_text(encoding="utf-8")
        found = re.match(r"(\s*#\s*@.*\n)*?\s*#\s*@package\s+(\S+)", text)
        return found[2] if found else None

    def all_keys(self) -> Iterator[str]:
        """Yield its own keys and those right below them, dotted."""
        for key, value in self.content.items():
            if key not in ("defaults", "hydra"):
                yield key
                if isinstance(value, dict):
                    yield from (f"{key}.{below}" for below in value)


@functools.cache
def groups() -> tuple[str, ...]:
    """Return the groups that expt ships, by folder name."""
    return tuple(sorted({path.parent.name for path in conf_dir().glob("*/*.yaml")}))


def options(group: str, *own: Path) -> list[str]:
    """Return the choices of a group, those in folders of custom YAML included."""
    files = (sorted((folder / group).glob("*.yaml")) for folder in (conf_dir(), *own))
    return [*dict.fromkeys(file.stem for file in itertools.chain(*files))]


@functools.cache
def keys_in_yaml() -> tuple[str, ...]:
    """Return every key that may be set, dotted."""
    found = [*groups(), *YamlFile(conf_dir() / "config.yaml").all_keys()]
    found += (key for group in groups() for name in options(group) for key in keys_of(group, name))
    return tuple(dict.fromkeys(found))


def keys_of(group: str, name: str) -> list[str]:
    """Return the keys of a choice, dotted; none of one that sets those of others."""
    path = conf_dir() / group / f"{name}.yaml"
    if YamlFile(path).package is not None:
        return []
    found = dict.fromkeys(key for each in lineage(path) for key in YamlFile(each).all_keys())
    return [f"{group}.{key}" for key in found if key != "name"]


def lineage(path: Path, *below: Path) -> Iterator[Path]:
    """Yield the files of a choice: those of its group that its defaults list names, then its own.

    A later one sets keys again. Of custom YAML those of expt's count too. One of `below`, which
    name this one, is left out.
    """
    for name in YamlFile(path).defaults:
        folders = (path.parent, conf_dir() / path.parent.name)
        every = (folder / f"{name}.yaml" for folder in folders if isinstance(name, str))
        others = (file for file in every if file.is_file() and file not in (path, *below))
        if above := next(others, None):
            yield from lineage(above, path, *below)
    yield path


def own_folders(config_dir: str | Path | None, settings: Sequence[str]) -> list[Path]:
    """Return the folders of custom YAML for `settings`: `config_dir`, or else `conf` here.

    `conf` is one if it has one of expt's groups, or a group that is typed. Raises ConfigError as
    `checked_folders` does.
    """
    if config_dir is not None:
        return checked_folders([config_dir])
    here = Path("conf")
    if not here.is_dir() or here.resolve() == conf_dir().resolve():
        return []
    names = {key_of(word).partition("@")[0] for word in settings}
    own = {name for name in names if re.fullmatch(r"[\w-]+(/[\w-]+)*", name)} - {*keys_in_yaml()}
    has_group = any(any((here / name).glob("*.yaml")) for name in {*groups(), *own})
    return checked_folders([here] if has_group else [])


def checked_folders(folders: Iterable[str | Path]) -> list[Path]:
    """Return folders of custom YAML. Raises ConfigError for one that can't be used.

    Such as one with a choice that expt has too, with other content: Hydra would take expt's.
    """
    found = [Path(folder).expanduser() for folder in folders]
    for folder in found:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: there is no such folder")
        for path in sorted(folder.glob("*/*.yaml")):
            shipped = conf_dir() / path.parent.name / path.name
            if shipped.is_file() and path.read_bytes() != shipped.read_bytes():
                word = f"{path.parent.name}={path.stem}"
                fix = "rename the file"
                raise ConfigError(f"{path}: expt's own {word} would be used in its place; {fix}")
    return found


def refuse_misread(folders: Iterable[str | Path], chosen: Mapping[str, str | None]) -> None:
    """Raise ConfigError for a number that YAML reads as another one: 010 as 8, 1:30 as 90.

    Of the files in `folders` those count that are chosen, by group.
    """
    for _, file in chosen_files(folders, chosen):
        for token in yaml.scan(file.path.read_bytes()):
            text = token.value if isinstance(token, yaml.ScalarToken) and token.plain else ""
            found = yaml.safe_load(text) if re.match(r"[-+]?\d(?!\d*-)", text) else None
            is_decimal = re.fullmatch(r"[-+]?(0|[1-9][\d_]*)([.eE].*)?", text)
            if isinstance(found, int | float) and not is_decimal:
                place = f"{file.path}:{token.start_mark.line + 1}"
                fix = f"YAML reads it as {found}; write that, or a text in quotes"
                raise ConfigError(f"{place}: {text}: {fix}")


def chosen_files(
    folders: Iterable[str | Path], chosen: Mapping[str, str | None]
) -> Iterator[tuple[str, YamlFile]]:
    """Yield the files in `folders` that are chosen, each with the package of its keys.

    They come after those that they build on.
    """
    for folder, (place, name) in itertools.product(folders, chosen.items()):
        group, _, package = place.partition("@")
        path = Path(folder, group, f"{name}.yaml")
        files = [YamlFile(each) for each in lineage(path)] if path.is_file() else []
        for file in files:
            if file.path.is_relative_to(folder):
                of = package or file.package or group.replace("/", ".")
                yield re.sub(r"^_global_\.?", "", of), file
