"""The YAML of settings, which expt ships and a person adds: groups, choices, keys, meanings."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from expt.config.keys import flat, typed
from expt.config.kinds import conf_dir
from expt.errors import ConfigError
from expt.runs.overrides import key_of

Row: TypeAlias = tuple[str, str]
"""A setting as `key=value`, and its meaning."""


@functools.cache
def groups() -> tuple[str, ...]:
    """Return the groups that expt ships, by folder name."""
    return tuple(sorted({path.parent.name for path in conf_dir().glob("*/*.yaml")}))


def options(group: str, *own: Path) -> list[str]:
    """Return the choices of a group, those in folders of custom YAML included."""
    files = (sorted((folder / group).glob("*.yaml")) for folder in (conf_dir(), *own))
    return [*dict.fromkeys(file.stem for file in itertools.chain(*files))]


@functools.cache
def keys() -> tuple[str, ...]:
    """Return every key that may be set, dotted."""
    found = [*groups(), *_flat(read_yaml(conf_dir() / "config.yaml"))]
    found += (key for group in groups() for name in options(group) for key in keys_of(group, name))
    return tuple(dict.fromkeys(found))


def keys_of(group: str, name: str) -> list[str]:
    """Return the keys of a choice, dotted; none of one that sets those of others."""
    path = conf_dir() / group / f"{name}.yaml"
    if "# @package _global_" in path.read_text(encoding="utf-8"):
        return []
    found = dict.fromkeys(key for each in lineage(path) for key in _flat(read_yaml(each)))
    return [f"{group}.{key}" for key in found if key != "name"]


def lineage(path: Path) -> Iterator[Path]:
    """Yield the files of a choice: those of its group that its defaults list names, then its own.

    A later one sets keys again. Of custom YAML those of expt's count too.
    """
    for name in (read_yaml(path) or {}).get("defaults") or ():
        folders = (path.parent, conf_dir() / path.parent.name)
        every = (folder / f"{name}.yaml" for folder in folders if isinstance(name, str))
        if above := next((file for file in every if file.is_file() and file != path), None):
            yield from lineage(above)
    yield path


def rows_of(path: Path) -> list[Row]:
    """Return the settings of a choice with their meanings, which its own file need not repeat."""
    found = dict[str, Row]()
    for file in reversed([*lineage(path)]):
        lines = file.read_text(encoding="utf-8").splitlines()
        for row, meaning in keys_with_meaning(lines, f"{path.parent.name}."):
            last, said = found.get(key := row.partition("=")[0], (row, ""))
            found[key] = (last, said or meaning)
    return [*found.values()]


def _flat(content: Mapping[str, Any] | None) -> Iterator[str]:
    for key, value in (content or {}).items():
        if key not in ("defaults", "hydra"):
            yield key
            yield from (f"{key}.{below}" for below in (value if isinstance(value, dict) else ()))


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file, interpolations as they are written."""
    return yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def own_folders(config_dir: str | Path | None, settings: Sequence[str]) -> list[Path]:
    """Return the folders of custom YAML for `settings`: `config_dir`, or else `conf` here.

    `conf` is one if it has one of expt's groups, or a group that is typed. Raises ConfigError as
    `checked` does.
    """
    if config_dir is not None:
        return checked([config_dir])
    here = Path("conf")
    if not here.is_dir() or here.resolve() == conf_dir().resolve():
        return []
    names = (word.partition("=")[0].lstrip("+~").partition("@")[0] for word in settings)
    typed = {name for name in names if re.fullmatch(r"[\w-]+(/[\w-]+)*", name)}
    wanted = {*groups(), *(typed - {*keys()})}
    return checked([here] if any(any((here / name).glob("*.yaml")) for name in wanted) else [])


def checked(folders: Iterable[str | Path]) -> list[Path]:
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
    for path in _chosen(folders, chosen):
        for token in yaml.scan(path.read_bytes()):
            text = token.value if isinstance(token, yaml.ScalarToken) and token.plain else ""
            found = yaml.safe_load(text) if re.match(r"[-+]?\d", text) else None
            is_decimal = re.fullmatch(r"[-+]?(0|[1-9][\d_]*)([.eE].*)?", text)
            if isinstance(found, int | float) and not is_decimal:
                place = f"{path}:{token.start_mark.line + 1}"
                fix = f"YAML reads it as {found}; write that, or a text in quotes"
                raise ConfigError(f"{place}: {text}: {fix}")


def _chosen(folders: Iterable[str | Path], chosen: Mapping[str, str | None]) -> Iterator[Path]:
    """Yield each file in `folders` that is chosen, by group."""
    for folder, (group, name) in itertools.product(folders, chosen.items()):
        path = Path(folder, group.partition("@")[0], f"{name}.yaml")
        if path.is_file():
            yield path


def written_in(
    folders: Iterable[str | Path], chosen: Mapping[str, str | None], typed: Iterable[str], key: str
) -> tuple[str, str] | None:
    """Return the chosen file in `folders` that sets a key, and the key as it stands there.

    None where it is among the `typed` words, or in no such file.
    """
    for word in typed:
        holds = f"{key}.".startswith(f"{key_of(word)}.") and "={" in word
        if holds or f"{key_of(word)}.".startswith(f"{key}."):
            return None
    found = None
    for path in _chosen(folders, chosen):
        content = read_yaml(path)
        is_global = "# @package _global_" in path.read_text(encoding="utf-8")
        nested = content if is_global else {path.parent.name: content}
        if isinstance(content, dict) and re.split(r"\.\d+\b", key)[0] in flat(nested):
            found = str(path), key.rpartition(".")[2]
        if f"hydra.sweeper.params.{key}" in flat(content if isinstance(content, dict) else {}):
            return str(path), key
    return found


def hydra_words(
    folders: Iterable[str | Path], chosen: Mapping[str, str | None]
) -> Iterator[tuple[Path, str]]:
    """Yield each of Hydra's keys, with its value, that a chosen file in `folders` sets."""
    for path in _chosen(folders, chosen):
        content = read_yaml(path)
        if not isinstance(content, dict):
            continue
        for entry in content.get("defaults") or ():
            for key, value in entry.items() if isinstance(entry, dict) else ():
                if found := re.fullmatch(r"override\s+/?(hydra/\w+)(@\S*)?", str(key)):
                    yield path, f"{found[1]}={value}"
        for key, value in flat({"hydra": content.get("hydra") or {}}).items():
            yield path, f"{key}={typed(value)}"


def sections(path: Path) -> Iterator[tuple[str, list[Row]]]:
    """Yield the sections of config.yaml, each opened by a comment line, and their rows."""
    title, lines = "", list[str]()
    for line in path.read_text(encoding="utf-8").partition("\nhydra:")[0].splitlines():
        if line.startswith("# "):
            if title:
                yield title, keys_with_meaning(lines)
            title, lines = line.removeprefix("# "), []
        lines.append(line)
    yield title, keys_with_meaning(lines)


def keys_with_meaning(lines: Iterable[str], group: str = "") -> list[Row]:
    """Return `key=value` and its meaning of lines such as `key: value  # meaning`.

    Keys below an indented `key:` are dotted.
    """
    prefix, found = "", list[Row]()
    for line in lines:
        setting, _, meaning = line.partition("#")
        key, colon, value = setting.partition(":")
        if found and line.startswith(" ") and not setting.strip():  # a meaning's second line
            found[-1] = (found[-1][0], f"{found[-1][1]} {meaning.strip()}")
        if not colon or (group and (key in ("name", "defaults") or key.lstrip().startswith("-"))):
            continue
        prefix = prefix if key.startswith(" ") else ""
        if value.strip():
            found.append((f"{group}{prefix}{key.strip()}={value.strip()}", meaning.strip()))
        else:
            prefix = f"{key.strip()}."
    return found
