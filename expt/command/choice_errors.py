"""Hydra's errors about a group's choice, typed or in the `defaults` of a YAML file, in the words of
a person.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expt.command.conf_files import groups, options
from expt.command.own_conf import own_folders
from expt.config.problems import own_group
from expt.errors import did_you_mean, first_line

PRIMARY = "see --config-dir, --config-name and --config-path"


def typed_for(key: str, overrides: Sequence[str]) -> str:
    """The word that was typed for a key, or the key itself."""
    return next(
        (
            text
            for text in overrides
            if text.lstrip("+~").partition("=")[0].partition("@")[0] == key
        ),
        key,
    )


def unknown_option(error: Any) -> str:
    """Of a file that is not there."""
    if not error.missing_cfg_file:
        return ""
    missing = str(error.missing_cfg_file)
    group, _, name = missing.rpartition("/")
    if not group:
        return f"{first_line(error).rstrip('.')}; {PRIMARY}"
    if relative := _relative(error, group, f": {name}"):
        return relative
    folders = [Path(path) for path in re.findall(r"path=file://(.+)", str(error))]
    for folder in folders:
        if (other := folder / f"{missing}.yml").is_file():
            return f"{group}={name}: is {other}; its name must end in .yaml"
        if (folder / missing).is_dir() and any((folder / missing).glob("*.yaml")):
            return f"{group}={name}: is a group itself, {missing}; type +{missing}=NAME"
    choices = sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
    choices = choices or sorted(set(error.options or ()))
    if not choices and group in groups():  # a file of a person's own asks for it
        choices = [path.stem for path in options(group)]
    if not choices:
        return f"{group}={name}: there is no group {group}.{did_you_mean(group, groups())}"
    return f"{group}={name}: not one of {', '.join(choices)}.{did_you_mean(name, choices)}"


def no_group(group: str, overrides: Sequence[str]) -> str:
    """Of a group that nobody has."""
    near = did_you_mean(group, groups())
    return (
        f"{typed_for(group, overrides)}: there is no group"
        f" {group}{near and '.'}{near or f'; {own_group(group)}'}"
    )


def not_chosen_yet(error: Any, key: str, overrides: Sequence[str]) -> str:
    """Of a group that is chosen anew, where nothing has chosen it."""
    group = key.partition("@")[0]
    typed, where = typed_for(group, overrides), _file(error) or "some YAML"
    if "=" in typed and not _file(error):
        return f"{typed}: nothing chooses {key} yet; type +{typed}"
    if found := re.search(
        r"default list use \+(\S+=.+)", str(error)
    ):  # of a command's words, and not typed
        return (
            f"{found[1]}: the named grid has it, and nothing chooses {key} yet; write +{key} there"
        )
    if relative := _relative(error, group, ""):
        return relative
    is_there = group in groups() or any(
        (folder / group).is_dir() for folder in own_folders(overrides)
    )
    if not is_there and (near := did_you_mean(group, groups())):
        return f"{key}: {where} overrides it, and there is no such group.{near}"
    return (
        f"{key}: {where} overrides it, and nothing chooses it; write /{key} there, without override"
    )


def chosen_twice(key: str, name: str, overrides: Sequence[str]) -> str:
    """Of a group that is chosen already."""
    typed = typed_for(key.partition("@")[0], overrides)
    if typed.startswith("+"):
        return f"{typed}: {key} is chosen already; type {typed.lstrip('+')}"
    return (
        f"{key}: some YAML chooses {name}, and it is chosen already; write override /{key}: {name}"
        " there"
    )


def _relative(error: Any, group: str, name: str) -> str:
    """Of a group's name in a YAML file that lacks its slash, so that the file's own folder is
    searched for it.
    """
    file = _file(error)
    above, _, meant = group.rpartition("/")
    if not above or not file.startswith(f"{above}/"):
        return ""
    override = "override " if meant in groups() else ""
    return (
        f"{meant}{name and '='}{name[2:]}: {file} looks for it in {above}/; write"
        f" {override}/{meant}{name} there"
    )


def _file(error: Any) -> str:
    """The YAML file whose `defaults` are wrong, where Hydra says so and it is not its own or expt's
    first.
    """
    found = re.search(r"In '([^']+)'", str(error))
    return f"{found[1]}.yaml" if found and found[1] != "config" else ""
