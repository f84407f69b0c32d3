"""The YAML that expt ships: where it is, and which groups, options and keys it has."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from expt.config.kinds import conf_dir
from expt.errors import ConfigError, did_you_mean, first_line
from expt.runs.overrides import key_of


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
    """Return `conf` if it is here and has one of expt's groups, or a group that is typed."""
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
        shipped = conf_dir() / path.parent.name / path.name
        if shipped.is_file() and path.read_bytes() != shipped.read_bytes():
            word = f"{path.parent.name}={path.stem}"
            raise ConfigError(
                f"{path}: expt's own {word} would be used in its place; rename the file"
            )


def refuse_misread(folders: Iterable[str | Path], chosen: Mapping[str, str | None]) -> None:
    """Raise ConfigError for a number that YAML reads as another one: 010 as 8, 1:30 as 90.

    Of the files in `folders` those count that are chosen, by group.
    """
    for folder, (group, name) in itertools.product(folders, chosen.items()):
        path = Path(folder, group.partition("@")[0], f"{name}.yaml")
        for token in yaml.scan(path.read_bytes()) if path.is_file() else ():
            text = token.value if isinstance(token, yaml.ScalarToken) and token.plain else ""
            found = yaml.safe_load(text) if re.match(r"[-+]?\d", text) else None
            is_decimal = re.fullmatch(r"[-+]?(0|[1-9][\d_]*)([.eE].*)?", text)
            if isinstance(found, int | float) and not is_decimal:
                place = f"{path}:{token.start_mark.line + 1}"
                fix = f"YAML reads it as {found}; write that, or a text in quotes"
                raise ConfigError(f"{place}: {text}: {fix}")


def _flat(path: Path, prefix: str) -> Iterator[str]:
    for key, value in (read_yaml(path) or {}).items():
        if key in ("defaults", "hydra") or (prefix and key == "name"):
            continue
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from (f"{prefix}{key}.{below}" for below in value)


def as_config_error(
    error: BaseException, words: Sequence[str], folders: Sequence[Path] = ()
) -> ConfigError:
    """Return the error for one of Hydra or OmegaConf that composing `words` has raised.

    `folders` are those that YAML was searched in.
    """
    if missing := getattr(error, "missing_cfg_file", None):
        options = getattr(error, "options", None)
        return ConfigError(unknown_option(str(missing), options, folders or [conf_dir()]))
    unknown = re.match(r"Could not override '(.*?)'", str(error))
    key = unknown[1] if unknown else str(getattr(error, "full_key", None) or "")
    word = next((each for each in reversed(words) if key_of(each) == key), key)
    if unknown:
        return ConfigError(unknown_key(word, key, ""))
    if type(error).__name__ == "MissingMandatoryValue":
        return ConfigError(f"{key}: has no value; set {key}=...")
    if key:
        is_unset = "Interpolation" in type(error).__name__
        fix = "; name a key or a variable that is set" * is_unset
        return ConfigError(f"{word}: {first_line(error)}{fix}")
    text = " ".join(str(error).split())
    if isinstance(error, ValueError):  # of a file that is not UTF-8, or of a choice; it names none
        where = folders if isinstance(error, UnicodeDecodeError) else words
        text = f"{' '.join(map(str, where))}: {text}"
    cause = first_line(error.__cause__ or error)
    return ConfigError(text if cause in text else f"{text}: {cause}")


def unknown_key(word: str, key: str, choice: str | None) -> str:
    """Return the error of `word` if this is the choice of its group; None: a custom class."""
    group = key.partition(".")[0]
    if choice is None:
        return f"{word}: nothing sets '{key}' yet; type +{word}, or add it to the class's YAML"
    if key in keys():
        has = {path.stem: [*_flat(path, f"{group}.")] for path in options(group)}
        missing = f"{group}={choice} has no key '{key}'" if choice else f"there is no {group}"
        hint = did_you_mean(key, has.get(str(choice), ()))
        names = " or ".join(name for name, below in has.items() if key in (group, *below))
        add = f"{' Or add' if hint else '; add'} one that has it: {group}={names}"
        return f"{word}: {missing}{f'.{hint}' if hint else ''}{add}"
    if key.endswith("._target_") or key.startswith("task.metrics."):
        return f"{word}: there is no key '{key}'; add it with +{word}"
    return f"{word}: there is no key '{key}'.{nearest(key)}"


def nearest(key: str) -> str:
    """Return a hint at the key that was meant, or nothing; `lr` is that of `optimizer.lr`."""
    by_end = {name.rpartition(".")[2]: name for name in reversed(keys())}
    return did_you_mean(by_end.get(key.rpartition(".")[2], key), keys())


def unknown_option(
    missing: str, options: Sequence[str] | None, folders: Sequence[Path] = ()
) -> str:
    """Return the error of a choice of a group for which there is no file."""
    group, _, name = missing.rpartition("/")
    files = (path for folder in folders for path in (folder / group).glob("*.yaml"))
    choices = sorted({*(options or ()), *(path.stem for path in files)})
    if not choices:
        return f"{group}={name}: there is no such group.{did_you_mean(group, groups())}"
    hint = did_you_mean(name, choices)
    return f"{group}={name}: not one of {', '.join(choices)}.{hint}"
