"""Errors for words that no configuration has or takes, with the nearest ones to type instead."""

from __future__ import annotations

import copy
import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from expt.command.conf_files import groups, keys_in_yaml, keys_of, options
from expt.config.constraints import kind, names_of, typed
from expt.config.groups import GROUPS
from expt.config.keys import (
    all_keys,
    example_of,
    flat,
    in_a_shell,
    names_around,
    takes_keys,
    takes_list,
)
from expt.errors import ConfigError, did_you_mean, first_line
from expt.runs.overrides import key_of, unquoted

if TYPE_CHECKING:
    from expt.command.grammar import Override

ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "base_lr"), "optimizer.lr"),
    **dict.fromkeys(("wd", "decay", "l2"), "optimizer.weight_decay"),
    **dict.fromkeys(("bs", "batch", "bsz"), "batch_size"),
    **dict.fromkeys(("device", "devices", "cuda", "num_gpus", "accelerator"), "gpus"),
    **dict.fromkeys(("workers", "nproc", "nproc_per_node", "num_processes"), "world_size"),
    **dict.fromkeys(("precision", "dtype", "fp16", "bf16", "mixed_precision"), "amp"),
    **dict.fromkeys(("data_dir", "data_root", "data_path"), "dataset.root"),
    **dict.fromkeys(("steps", "num_steps"), "max_steps"),
    **{
        key: f"hydra.launcher.{key}"
        for key in "max_concurrent runs_per_gpu fail_fast retries stagger_s dry_run".split()
    },
}
"""Names of keys in other tools that no similar spelling leads to."""


def as_config_error(
    error: BaseException, words: Sequence[str], folders: Sequence[Path] = ()
) -> ConfigError:
    """Return the error for one of Hydra or OmegaConf that composing `words` has raised.

    `folders` are those that YAML was searched in.
    """
    if missing := getattr(error, "missing_cfg_file", None):
        group, _, name = str(missing).rpartition("/")
        known = [*(getattr(error, "options", None) or ()), *options(group, *folders)]
        return ConfigError(unknown_option(group, name, known))
    if isinstance(error, RecursionError):
        fix = "in its defaults another of the same group is - NAME, without the group"
        return ConfigError(f"{' '.join(words)}: a YAML file chooses itself; {fix}")
    unknown = re.match(r"Could not override '(.*?)'", str(error))
    key = unknown[1] if unknown else str(getattr(error, "full_key", None) or "")
    word = unquoted(next((each for each in reversed(words) if key_of(each) == key), key))
    if unknown:
        return ConfigError(_no_such_key(word, key))
    if type(error).__name__ == "MissingMandatoryValue":
        return ConfigError(f"{key}: has no value; set {key}=...")
    if key:
        is_unset = re.search("' not found|Unsupported interpolation type", str(error))
        fix = "; name a key or a variable that is set, as ${oc.env:NAME}" if is_unset else ""
        return ConfigError(f"{word}: {first_line(error)}{fix}")
    text = " ".join(str(error).split())
    if isinstance(error, ValueError):  # of a file that is not UTF-8, or of a choice; it names none
        where = folders if isinstance(error, UnicodeDecodeError) else words
        text = f"{' '.join(map(str, where))}: {text}"
    cause = first_line(error.__cause__ or error)
    if "is not Optional" in text and "sweeper.params" in text:
        cause += "; write null in quotes"
    return ConfigError(text if cause in text else f"{text}: {cause}")


def _no_such_key(word: str, key: str, choice: str = "", near: Sequence[str] = ()) -> str:
    """Return the error of a key that the settings lack, with the first hint that there is.

    `choice` is that of its group, and `near` are the keys next to it in an element of a list.
    """
    *above, last = names = key.split(".")
    group = names[0]
    has = {each: keys_of(group, each) for each in options(group)}
    own = has.get(choice, [])
    said = f"{word}: there is no key '{key}'"
    if (group in groups() and last == "_target_") or key.startswith("task.metrics."):
        return f"{said}; add it with +{word}"
    if above and key in all_keys() and key not in keys_in_yaml():
        whole = f"set all of its keys at once, e.g. {example_of(above)}"
        return f"{word}: {'.'.join(above)} has no keys yet; {whole}"

    def having(known: str) -> str:
        choices = (name for name, below in has.items() if known in (group, *below))
        return f"{group}={' or '.join(choices)}"

    every = (".".join(names[:end]) for end in range(len(names), 0, -1))
    known = next((each for each in every if each in keys_in_yaml()), "")
    if known == key or ("." in known and own and known not in own):
        lacks = f"{group}={choice} has no key '{known}'" if choice else f"there is no {group}"
        meant = _nearest(known, own, 0.6)
        hint = f". Did you mean '{meant}'? Or" if meant else ";"
        return f"{word}: {lacks}{hint} add one that has it: {having(known)}"
    of_choice = bool(choice) and above == [group]
    of_group = [*itertools.chain(*has.values()), *own]
    by_end = {each.rpartition(".")[2]: each for each in keys_in_yaml()[::-1]}
    meant = _nearest(key, of_group, 0.8) or ELSEWHERE.get(last) or by_end.get(last)
    if not meant and of_choice:
        meant = _nearest(key, of_group, 0.6)
    if meant:
        of_another = meant in of_group and meant not in own
        has_none = f" {group}={choice} has none; add {having(meant)}" if of_another else ""
        return f"{said}. Did you mean '{meant}'?{has_none}"
    if of_choice:
        return f"{said}. {group}={choice} has {', '.join(own)}." if own else f"{said}."
    return f"{said}.{_anywhere(key, near)}"


def _nearest(key: str, keys: Sequence[str], cutoff: float) -> str | None:
    """Return the key whose last name is most like that of `key`; of equal names the last key."""
    ends = {each.rpartition(".")[2]: each for each in keys}
    found = difflib.get_close_matches(key.rpartition(".")[2], ends, n=1, cutoff=cutoff)
    return ends[found[0]] if found else None


def _anywhere(key: str, near: Sequence[str]) -> str:
    """Return the nearest of all keys, or else where those of its group are listed."""
    settings, names = keys_in_yaml(), key.split(".")
    known = [each for each in (*settings, *ELSEWHERE.values()) if not key.startswith(f"{each}.")]
    if len(names) > 1 and names[0] not in settings:
        known += [f"{each}.{names[-1]}" for each in groups()]
    hint = did_you_mean(key, near or known)
    return f" --help {names[0]} lists its keys" if not hint and names[0] in settings else hint


def unknown_option(group: str, name: str, known: Iterable[str]) -> str:
    """Return the error of a choice of a group for which there is no file."""
    if not (choices := sorted({*known})):
        return f"{group}={name}: there is no such group.{did_you_mean(group, groups())}"
    hint = did_you_mean(name, choices)
    return f"{group}={name}: not one of {', '.join(choices)}.{hint}"


def refuse_no_choice(word: Override) -> None:
    """Raise ConfigError for a group of expt's with neither the name of one choice nor its keys."""
    key, value = word.key_or_group, word.value()
    if key == "hydra":
        raise ConfigError(f"{word.input_line}: has keys of its own, e.g. hydra.run.dir=FOLDER")
    is_name = isinstance(value, str) and not (word.is_add() or word.is_force_add())
    is_right = is_name or word.is_delete() or (isinstance(value, dict) and value)
    if key not in groups() or word.package is not None or is_right:
        return
    several = value if isinstance(value, list) else [value]
    names = ",".join(each for each in several if isinstance(each, str)) or "NAME"
    fix = f"{'for a sweep: -m' if ',' in names else 'type'} {key}={names}"
    raise ConfigError(f"{word.input_line}: takes the name of one choice; {fix}")


def refuse_wrong(own: Mapping[str, Any], word: Override, choices: Mapping[str, Any]) -> None:
    """Raise ConfigError for a word that can't set its key in these settings.

    `choices` are those of the groups.
    """
    if word.is_delete():
        _refuse_to_delete(own, word)
    refuse_no_list(own, word)
    path, value = word.key_or_group.split("."), word.value()
    group, chosen = path[0], own.get(path[0])
    is_custom = isinstance(chosen, dict) and "_target_" in chosen
    is_name = isinstance(chosen, dict) and path[1:] == ["name"] and not is_custom
    if is_name and value != own[group].get("name") and value in options(group):
        raise ConfigError(f"{word.input_line}: its other keys stay; write {group}={value}")
    may_add = is_custom and group == "dataset" and not _of_custom_datasets().isdisjoint(path[1:2])
    if not (may_add or word.is_add() or word.is_force_add()):
        _refuse_unknown(own, word, None if is_custom else str(choices.get(group) or ""))


def _refuse_unknown(own: Mapping[str, Any], word: Override, choice: str | None) -> None:
    """Raise ConfigError for a key that the settings lack, or one that the value has below it.

    `choice` is the one of its group; None for a custom class.
    """
    text = str(word.input_line)
    unknown = _first_unknown(own, word.key_or_group.split("."), word.value())
    if not unknown:
        return
    names = unknown.split(".")
    value, at = _descend(own, names)
    if at and isinstance(value, dict) and unknown in all_keys() and unknown not in keys_in_yaml():
        return  # of a mapping that was null
    holder = ".".join(names[:at])
    has_keys = isinstance(value, dict | list) or takes_keys(holder)
    if not has_keys and (value is not None or holder in all_keys()):
        written = typed(word.value()) if unknown == word.key_or_group else "..."
        whole = in_a_shell(_whole(holder, written))
        raise ConfigError(f"{text}: {holder} has no keys below it; write {whole}")
    near = list[str]()
    if re.search(r"\.\d+\.", unknown):  # in an element of a list
        above = unknown.rpartition(".")[0]
        near += [f"{above}.{name}" for name in names_around(names, own)]
    if choice is not None:
        raise ConfigError(_no_such_key(text, unknown, choice, near))
    if isinstance(value, dict):  # the keys next to the first that there is not
        near += [".".join([*names[:at], str(name), *names[at + 1 :]]) for name in value]
    if names[0] == "dataset":
        near += [f"dataset.{key}" for key in _of_custom_datasets()]
    add = f"type +{text} if the class takes it, or add it to the class's YAML"
    raise ConfigError(f"{text}: nothing sets '{unknown}' yet; {add}.{did_you_mean(unknown, near)}")


def _of_custom_datasets() -> set[str]:
    """Return the keys that every custom dataset has, in its YAML or not."""
    own = {"name", "target", "kwargs", "train", "val", "test"}
    return {*names_of(GROUPS["dataset"]["_target_"])} - own


def _whole(key: str, one: str) -> str:
    """Return the word for a key that has one value, which may be a list."""
    return f"{key}=[{one}]" if takes_list(key) and key in all_keys() else f"{key}={one}"


def refuse_no_list(own: Mapping[str, Any], word: Override) -> None:
    """Raise ConfigError for one element of a key that has no list, with the value to type."""
    path = word.key_or_group.split(".")
    value, at = _descend(own, path)
    one = typed(word.value())
    if word.is_delete() or at in (0, len(path)):
        return
    if not path[at].isdecimal():
        is_custom = any(key.endswith("_target_") for key in flat({path[0]: own[path[0]]}))
        element = next((end for end in range(at, len(path)) if path[end].isdecimal()), None)
        if isinstance(value, dict) and is_custom and element is not None:
            key = ".".join(path[:element])
            whole = in_a_shell(f"+{key}=[{one}]" if takes_list(key) else f"+{key}={one}")
            why = f"nothing sets {key} yet; write the whole list, {whole}"
            raise ConfigError(f"{word.input_line}: {why}")
        return
    key = ".".join(path[:at])
    is_list = isinstance(value, list) or (value is None and takes_list(key))
    if is_list or (isinstance(value, dict) and key not in groups()):
        return  # `with_value` names the whole list; a mapping may have numbers
    whole = in_a_shell(_whole(key, one))
    if key in groups():
        value = kind(value)
    elif any(each.startswith(f"{key}.") for each in all_keys()):
        whole = example_of(path[:at])
    raise ConfigError(f"{word.input_line}: {key} has one value, {typed(value)}; write {whole}")


def _refuse_to_delete(own: Mapping[str, Any], word: Override) -> NoReturn:
    """Raise ConfigError for an element that is to be deleted, with the list that is left."""
    path = word.key_or_group.split(".")
    value, at = _descend(own, path)
    if at < len(path):
        found = f"{'.'.join(path[:at])} is {typed(value)}"
        raise ConfigError(f"{word.input_line}: there is no {'.'.join(path[: at + 1])}; {found}")
    end = list_on(own, word) or 0
    left = copy.deepcopy(_descend(own, path[:end])[0])
    holder, _ = _descend(left, path[end:-1])
    del holder[int(path[-1]) if isinstance(holder, list) else path[-1]]
    whole = in_a_shell(f"{'.'.join(path[:end])}={typed(left)}")
    raise ConfigError(f"{word.input_line}: is in a list; write the list that is left, e.g. {whole}")


def list_on(own: Mapping[str, Any], word: Override) -> int | None:
    """Return how many parts of the word's key lead to the first list on it; None without one."""
    path = word.key_or_group.split(".")
    ends = range(len(path) + 1)
    return next((at for at in ends if isinstance(_descend(own, path[:at])[0], list)), None)


def _first_unknown(node: Any, path: Sequence[Any], value: Any) -> str:
    """Return the dotted key that `node` lacks: `path`, or one that `value` has below it."""
    names = [*map(str, path)]  # a mapping may have numbers
    found, at = _descend(node, path)
    if at == len(path):
        if isinstance(found, dict) and isinstance(value, dict):
            for key, below in value.items():
                if unknown := _first_unknown(found, [key], below):
                    return ".".join([*names, unknown])
        return ""
    is_in_list = isinstance(found, list | None) and (found or names[at].isdecimal())
    in_schema = ".".join(name for name in names if not name.isdecimal()) in all_keys()
    # `with_value` names the whole list, and elements may lack keys.
    if at and (is_in_list or (names[at - 1].isdecimal() and in_schema)):
        return ""
    return ".".join(names)


def _descend(node: Any, path: Sequence[Any]) -> tuple[Any, int]:
    """Return the deepest value on a path that is there, and how many of its keys lead there."""
    for at, key in enumerate(path):
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and str(key).isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return node, at
    return node, len(path)
