"""Hydra's errors in the words of a person: the override, what is wrong with it, the nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from expt.command.conf_files import groups, keys, options
from expt.errors import ConfigError, did_you_mean


def as_config_error(
    error: HydraException | OmegaConfBaseException | YAMLError | UnicodeDecodeError, overrides: Sequence[str]
) -> ConfigError:
    """The ConfigError to show for what Hydra or OmegaConf raised while composing `overrides`."""
    text = str(error)
    if isinstance(error, YAMLError | UnicodeDecodeError):
        return ConfigError(_not_yaml(error, overrides))
    if isinstance(error, OverrideParseException):
        return ConfigError(f"{error.override}: not of the form key=value; quote values with spaces or brackets")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return ConfigError(_unknown_option(error))
    if key := _first_match(r"Could not (?:override|append to config\. An item is already at) '([^']+)'", text):
        return ConfigError(_unknown_key(key, _typed(key, overrides)))
    if group := _first_match(r"Could not (?:override|load) '?([\w/]+)'?\.? ?No match in the defaults list", text):
        return ConfigError(f"{group}: there is no such group.{did_you_mean(group, groups())}")
    if override := _first_match(r"Ambiguous value for argument '([^']+)'", text):
        return ConfigError(f"{override}: several values make a sweep; add -m, as in python -m expt -m {override}")
    if "Primary config" in text or "config directory" in text:
        return ConfigError(f"{text.splitlines()[0].strip()}; see --config-dir, --config-name and --config-path")
    if override := _first_match(r"Error merging override (.+)", text):
        return ConfigError(f"{override}: {str(error.__cause__ or text).splitlines()[0]}")
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"{error.full_key}: has no value; give one, as in {error.full_key}=...")
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return ConfigError(f"{error.full_key}: {text.splitlines()[0]}")
    return ConfigError(text.strip())


def _unknown_option(error: MissingConfigException) -> str:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    choices = sorted(set(error.options or ()))
    if not group:
        first = str(error).splitlines()[0].rstrip(".")
        return f"{first}; see --config-dir, --config-name and --config-path"
    if not choices and group in groups():  # a file of a person's own asks for it
        choices = [path.stem for path in options(group)]
    if not choices:
        return f"{group}={name}: there is no group {group}.{did_you_mean(group, groups())}"
    return f"{group}={name}: not one of {', '.join(choices)}.{did_you_mean(name, choices)}"


def _unknown_key(key: str, typed: str) -> str:
    known = set(keys())
    if key in known:
        group = key.partition(".")[0]
        return f"{typed}: the chosen {group} has no key '{key}'; another {group}=... has"
    return f"{typed}: there is no key '{key}'.{did_you_mean(key, known)}"


def _not_yaml(error: YAMLError | UnicodeDecodeError, overrides: Sequence[str]) -> str:
    if isinstance(error, UnicodeDecodeError):  # which does not say where
        folders = [path for word in overrides if (path := Path(word.rpartition("=")[2])).is_dir()]
        files = [path for folder in folders for path in sorted(folder.rglob("*.yaml")) if not _is_text(path)]
        return f"{', '.join(map(str, files)) or 'a YAML file'}: not text in UTF-8 ({error.reason}); save it as UTF-8"
    return f"not valid YAML: {' '.join(str(error).split())}; mend that line"


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _typed(key: str, overrides: Sequence[str]) -> str:
    return next((text for text in overrides if text.lstrip("+~").partition("=")[0].partition("@")[0] == key), key)


def _first_match(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found.group(1) if found else None
