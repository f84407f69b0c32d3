"""Hydra's errors in the words of a person: the override, what is wrong with it, the nearest valid
name.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from expt.command.choice_errors import (
    PRIMARY,
    chosen_twice,
    no_group,
    not_chosen_yet,
    typed_for,
    unknown_option,
)
from expt.command.conf_files import groups, keys, options
from expt.command.misplaced import has_a_name, within_a_value
from expt.config.problems import own_group
from expt.errors import ConfigError, did_you_mean, first_line
from expt.runs.typed import NAMES_A_RUN, is_there, unquoted, values_of

COMPOSING = (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError)
"""What may be raised while a configuration is composed."""
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "base_lr"), "optimizer.lr"),
    **dict.fromkeys(("wd", "decay", "l2"), "optimizer.weight_decay"),
    **dict.fromkeys(("bs", "batch", "bsz"), "batch_size"),
    **dict.fromkeys(("device", "devices", "cuda", "num_gpus", "accelerator"), "gpus"),
    **dict.fromkeys(("workers", "nproc", "nproc_per_node", "num_processes"), "world_size"),
    **dict.fromkeys(("precision", "dtype", "fp16", "bf16", "mixed_precision"), "amp"),
    **dict.fromkeys(("data_dir", "data_root", "data_path"), "dataset.root"),
    **dict.fromkeys(("steps", "num_steps"), "max_steps"),
}
"""What others call a key, which its spelling would not lead to."""
USE_SWEEP = "use expt.sweep, which returns a list of results"
ONE_VALUE = "name one value"
"""The mends of several values, in Python and where a command has no -m."""


def as_config_error(
    error: BaseException, overrides: Sequence[str], *, of_one_run: str = ""
) -> ConfigError:
    """The ConfigError to show for what Hydra or OmegaConf raised while composing `overrides`.

    `of_one_run` is the mend of several values where there is no -m.
    """
    if of_one_run and (several := re.search(_SEVERAL, str(error))):
        return ConfigError(f"{several[1]}: several values make a sweep; {of_one_run}")
    for kind, pattern, words in _WORDS:
        found = re.search(pattern, str(error)) if isinstance(error, kind) else None
        if found and (text := words(error, found.group(found.lastindex or 0), overrides)):
            return ConfigError(text)
    return ConfigError(str(error).strip())


def _unknown_key(error: Any, key: str, overrides: Sequence[str]) -> str:
    typed, group, known = typed_for(key, overrides), key.partition(".")[0], set(keys())
    if group == "search" and not any(text.startswith("search=") for text in overrides):
        return f"{typed}: is of a search; add search=tpe, or another one"
    if any(text.startswith(f"+{group}._target_=") for text in overrides):
        return f"{typed}: there is no key '{key}' yet; type +{typed}"
    if _last(key) == "_target_" and key.count(".") == 1:
        return (
            f"{typed}: the chosen {group} is no class of your own; write conf/{group}/NAME.yaml, or"
            f" type +{typed}"
        )
    above = getattr(
        error.__cause__, "parent_node", None
    )  # where in the YAML the key was looked for
    is_own = _is_own(group, overrides) or (
        group != "dataset" and isinstance(above, DictConfig) and "_target_" in above
    )
    inner = str(getattr(error.__cause__, "full_key", None) or key)
    if inner.startswith(f"{key}."):  # of a mapping that was typed
        mend = "; add it there" if is_own else _meant(inner, known)
        return f"{typed}: there is no key '{inner}'{'' if mend[:1] == ';' else '.'}{mend}"
    if key in known:
        return f"{typed}: the chosen {group} has no key '{key}'; another {group}=... has"
    there = (
        [str(name) for name in above] if group in groups() and isinstance(above, DictConfig) else []
    )
    near = did_you_mean(_last(key), there).replace("'", f"'{key.removesuffix(_last(key))}", 1)
    if is_own:
        mend = f".{near} If not," if near else ";"
        return f"{typed}: the YAML has no key '{key}'{mend} add it there, or type +{typed}"
    if re.fullmatch(r"task\.metrics\.\w+", key):
        return f"{typed}: there is no key '{key}' yet; type +{typed}"
    if near and _last(key) not in ELSEWHERE:
        return f"{typed}: there is no key '{key}'.{near}"
    hint = _meant(key, known)
    meant = re.search(rf"'{group}\.([\w]+)'", hint)
    if there and meant and meant[1] not in there:
        hint = hint.replace("?", f", which another {group}=... has?")
    if not hint and re.fullmatch(r"\w+=[\w-]+", typed):
        return f"{typed}: there is no key '{key}'; {own_group(key)}"
    return f"{typed}: there is no key '{key}'.{hint}"


def _not_there(key: str) -> str:
    if key in (known := set(keys())):
        group = key.partition(".")[0]
        return f"~{key}: the chosen {group} has no key '{key}'; another {group}=... has"
    return f"~{key}: there is no key '{key}'.{_meant(key, known)}"


def _known_key(key: str, overrides: Sequence[str]) -> str:
    typed, group = typed_for(key, overrides), key.partition(".")[0]
    chosen = next(
        (text for text in overrides if text.startswith(f"{group}=") and "," in text), None
    )
    where, mend = "there is", ""
    if chosen and group != key:
        where, mend = (
            f"one of {chosen} has",
            f"; where another has not, sweep each {group} by itself",
        )
    return (
        f"{typed}: with + a key must be new, and {where} '{key}' already; type"
        f" {typed.lstrip('+')}{mend}"
    )


def _meant(key: str, known: Collection[str]) -> str:
    """A hint to the keys that end alike, `lr` to `optimizer.lr`; else to the nearest of as many
    parts.
    """
    if (elsewhere := ELSEWHERE.get(_last(key))) in known:
        return f" Did you mean '{elsewhere}'?"
    if together := _set_together(key):
        return together
    if key in _keys_of_the_pool():
        return f" Did you mean 'hydra.launcher.{key}'?"
    full = {
        last: [name for name in sorted(known) if name.rpartition(".")[2] == last]
        for last in map(_last, known)
    }
    if alike := full.get(_last(key)):
        return f" Did you mean {' or '.join(map(repr, alike[:3]))}?"
    if hint := did_you_mean(key, [name for name in known if name.count(".") == key.count(".")]):
        return hint
    near = difflib.get_close_matches(_last(key), full, n=1)
    return f" Did you mean '{full[near[0]][0]}'?" if near else ""


def _continuous(overrides: Sequence[str]) -> str:
    word = next((text for text in overrides if "interval(" in text), "interval(...)")
    return f"{word}: a grid has no end of an interval's values; add search=tpe, or name some"


def _no_sweep(word: str) -> str:
    key, _, value = word.partition("=")
    name = ",".join(map(unquoted, value.split(",")))
    is_name = key in NAMES_A_RUN and "=" in name.rpartition(",")[2]
    if is_name and not any(map(is_there, values_of(name))):  # a run's, mistyped
        near = did_you_mean(name, map(str, Path(name).parent.glob("*")))
        return f"{key}={name}: there is no such file or folder.{near}"
    return (
        f"{word}: several values make a sweep; add -m, as in python -m expt -m {shlex.quote(word)}"
    )


def _unreadable(word: str) -> str:
    key, _, value = word.partition("=")
    if not re.match(r"(tag\(.*)?interval\(", value):
        return f"{word}: not of the form key=value; quote values with spaces or brackets"
    if key.lstrip("+") in groups():
        return has_a_name(word)
    return f"{word}: an interval has two numbers as its ends, as in {key}=interval(0.1,1)"


def _set_together(key: str) -> str | None:
    from expt.config import keys  # late: for a mistake alone

    group = key.partition(".")[0]
    names, example = keys.names_beside([group, ""], {}), keys.meaning(group).example
    if group in keys.holders() or not names or example is None:
        return None
    near = "" if _last(key) in names else did_you_mean(_last(key), names)
    return f"{near} Type its keys together, as in '{example}'"


def _keys_of_the_pool() -> set[str]:
    from expt.launch.job import Options  # late: for a mistake alone

    return {"dry_run", *(field.name for field in dataclasses.fields(Options))}


def _is_own(group: str, overrides: Sequence[str]) -> bool:
    """Whether a person's own option of the group is chosen: its class may take more than its YAML
    names.
    """
    chosen = [text.partition("=")[2] for text in overrides if text.startswith(f"{group}=")]
    if not chosen or group not in groups():
        return False
    shipped = {path.stem for path in options(group)}
    return not {*chosen[-1].removeprefix("choice(").rstrip(")").split(",")} <= shipped


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _in_brackets(word: str) -> str:
    key, _, node = word.partition("=")
    return f"{word}: is a list; put brackets around it, as in {shlex.quote(f'{key}=[{node}]')}"


def _not_text(error: Any, overrides: Sequence[str]) -> str:
    """Which file it is, the error does not say."""
    folders = [path for word in overrides if (path := Path(word.rpartition("=")[2])).is_dir()]
    files = [
        path for folder in folders for path in sorted(folder.rglob("*.yaml")) if not _is_text(path)
    ]
    return (
        f"{', '.join(map(str, files)) or 'a YAML file'}: not text in UTF-8 ({error.reason}); save"
        " it as UTF-8"
    )


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


Words = Callable[[Any, str, Sequence[str]], str]
_SEVERAL = r"(?:Ambiguous value for argument|Sweep parameters) '(.+)'"
_WORDS: tuple[tuple[type[BaseException], str, Words], ...] = (
    # kind of error, pattern in its text, words for the error, what the pattern's group has found,
    # what was typed
    (HydraException, "does not support sweep type", lambda _, __, typed: _continuous(typed)),
    (UnicodeDecodeError, "", lambda error, _, typed: _not_text(error, typed)),
    (
        YAMLError,
        "",
        lambda error, *_: f"not valid YAML: {' '.join(str(error).split())}; mend that line",
    ),
    (
        *(OverrideParseException, ""),
        lambda error, *_: _unreadable(str(error.override)),
    ),
    (MissingConfigException, "", lambda error, *_: unknown_option(error)),
    (
        *(Exception, r"config group '([^']+)' does not exist"),
        lambda _, group, typed: no_group(group, typed),
    ),
    (
        *(Exception, r"Could not override '([^']+)'\. No match in the defaults list"),
        lambda error, group, typed: not_chosen_yet(error, group, typed),
    ),
    (
        *(Exception, r"Multiple values for ([\w/@.]+)\."),
        lambda error, group, typed: chosen_twice(
            group, str(error).rstrip("'").rpartition(": ")[2], typed
        ),
    ),
    (
        *(Exception, r"Could not override '([^']+)'"),
        lambda error, key, typed: _unknown_key(error, key, typed),
    ),
    (
        *(Exception, r"Could not append to config\. An item is already at '([^']+)'"),
        lambda _, key, typed: _known_key(key, typed),
    ),
    (
        *(Exception, r"Could not delete from config\. '([^']+)' does not exist"),
        lambda _, key, __: _not_there(key),
    ),
    (
        *(Exception, r"Could not delete '?([\w/@.]+)'?\. ?No match in the defaults list"),
        lambda _, group, __: f"~{group}: nothing chooses {group}.{did_you_mean(group, groups())}",
    ),
    (
        *(Exception, r"Could not (?:load|override) '?([\w/]+)'?\.? ?No match in the defaults list"),
        lambda _, group, __: f"{group}: there is no such group.{did_you_mean(group, groups())}",
    ),
    (
        *(Exception, _SEVERAL),
        lambda _, word, __: _no_sweep(word),
    ),
    (
        Exception,
        r"Primary config|config directory",
        lambda error, *_: f"{first_line(error)}; {PRIMARY}",
    ),
    (
        *(Exception, "Error merging override|Unexpected type annotation"),
        lambda error, _, typed: within_a_value(error, typed),
    ),
    (
        *(Exception, r"Error merging override ([^=]+=\{.+)"),
        lambda error, word, _: (
            _in_brackets(word) if "with ListConfig" in str(error.__cause__) else ""
        ),
    ),
    (
        *(Exception, r"Error merging override (.+)"),
        lambda error, word, _: f"{word}: {first_line(error.__cause__ or error)}",
    ),
    (
        *(MissingMandatoryValue, ""),
        lambda error, *_: f"{error.full_key}: has no value; give one, as in {error.full_key}=...",
    ),
    (
        *(OmegaConfBaseException, ""),
        lambda error, *_: f"{error.full_key}: {first_line(error)}" if error.full_key else "",
    ),
)
"""The first that fits, and has something to say."""
