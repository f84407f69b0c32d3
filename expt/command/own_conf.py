"""A folder of a person's own YAML: where it is, and what may be chosen of its groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from expt.command.arguments import apart
from expt.command.conf_files import conf_dir, groups, keys
from expt.command.overrides import is_readable, named_values, parsed
from expt.command.own_class import is_class
from expt.errors import ConfigError
from expt.runs.typed import key_of


def conf_here(arguments: Sequence[str]) -> Path | None:
    """The folder `conf` of the current one, where it has a group of expt's, or one that is typed;
    else it is another's.

    What is a key of expt's is no group of a person's own.
    """
    here = Path("conf")
    if not here.is_dir() or here.resolve() == conf_dir().resolve():
        return None
    typed = (
        group
        for group in _typed_groups(arguments)
        if (here / group).is_dir() and group not in keys()
    )
    ours = any(path.parent.name in groups() for path in here.glob("*/*.yaml"))
    return here if ours or any(_names(typed, [here])) else None


def with_conf_here(arguments: Sequence[str]) -> list[str]:
    """The words, with `--config-dir conf` where none is named and the current folder has one for
    them.
    """
    named = any(
        re.fullmatch(r"(--config-dir|-cd|--config-path|-cp)(=.*)?", word) for word in arguments
    )
    here = None if named else conf_here(arguments)
    return ["--config-dir", str(here), *arguments] if here else list(arguments)


def own_folders(arguments: Sequence[str]) -> Iterator[Path]:
    """The folders of their own YAML that a command's words name, or else the one here."""
    words = with_conf_here(arguments)
    for option, following in zip(words, [*words[1:], ""], strict=False):
        name, _, value = option.partition("=")
        if name in ("--config-dir", "-cd"):
            yield Path(value or following)
        elif name == "hydra.searchpath" and is_readable(option):
            several = parsed([option])[0].value()
            for each in several if isinstance(several, list) else ():
                yield Path(str(each).removeprefix("file://"))


def refuse_hidden(folders: Iterable[Path]) -> None:
    """Raise ConfigError for a choice in them that expt has too, with other content: Hydra would
    take expt's.
    """
    for path in (path for folder in folders for path in sorted(folder.glob("*/*.yaml"))):
        group = path.parent.name
        ours = conf_dir() / group / path.name
        if ours.is_file() and path.read_bytes() != ours.read_bytes():
            raise ConfigError(
                f"{path}: expt has a {group}={path.stem} of its own, which would be taken; give the"
                f" file another name, and type {group}=THAT, or name a folder without it with"
                " --config-dir FOLDER"
            )


def refuse_no_names(arguments: Sequence[str], folders: Sequence[Path] = ()) -> None:
    """Raise ConfigError for groups such as `model=null`, `+recipe=3` and `model=range(3)`: Hydra's
    errors are no help.

    `folders` are those of YAML, where the words themselves do not name them.
    """
    is_no_name = re.compile(r"null|true|false|[-+.\d]+|\{.*\}", re.IGNORECASE).fullmatch
    folders = [conf_dir(), *(folders or own_folders(arguments))]
    for word in apart(arguments)[1]:
        key, _, value = word.partition("=")
        if re.search(r"(range|interval)\(", value) and _names([_group(key)], folders):
            from expt.command.misplaced import (
                refuse_numbers,
            )  # late: it imports Hydra, and `--help` does without

            refuse_numbers(word)
        wrong = [
            text
            for text in named_values(word) or [value]
            if is_no_name(text) and not is_class(f"{key}={text}")
        ]
        if wrong and (names := _names([_group(key)], folders)):
            raise ConfigError(f"{word}: not one of {', '.join(names)}.")


def refuse_wrong_plus(arguments: Sequence[str]) -> None:
    """Raise ConfigError for `++recipe=a`, and for `+recipe=...` beside another word for that group."""
    folders, settings = [conf_dir(), *own_folders(arguments)], apart(arguments)[1]
    for word in (word for word in settings if word.startswith("+") and "={" not in word):
        key, group = key_of(word), _group(word.partition("=")[0])
        if not _names([group], folders):
            continue
        simple = word.lstrip("+") if key in groups() else f"+{word.lstrip('+')}"
        if word.startswith("++"):
            raise ConfigError(f"{word}: a choice is not forced; type {simple}")
        same = [each for each in settings if each[0] != "~" and key_of(each) == key]
        several = any("," in each or "(" in each for each in same)
        if len(same) > 1 and (several or all(each.startswith("+") for each in same)):
            values = ",".join(each.partition("=")[2] for each in same)
            both = "" if several else f", or +{key}=[{values}] for both"
            raise ConfigError(
                f"{' '.join(same)}: {key} is there twice; name it once, as in {simple}{both}"
            )


def _typed_groups(arguments: Sequence[str]) -> Iterator[str]:
    for word in apart(arguments)[1]:
        if group := _group(word.partition("=")[0]):
            yield group


def _group(key: str) -> str:
    """The group that a word's key may be of, as `aug` of `+aug@model.opts`; "" where it is of none."""
    group = key.lstrip("+").partition("@")[0]
    return group if re.fullmatch(r"[\w-]+(/[\w-]+)*", group) else ""


def _names(some: Iterable[str], folders: Sequence[Path]) -> list[str]:
    """What may be chosen of these groups."""
    files = (
        path
        for group in some
        if group
        for folder in folders
        for path in (folder / group).glob("*.yaml")
    )
    return sorted({path.stem for path in files})
