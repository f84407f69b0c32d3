"""Errors for words that no configuration has or takes, with the nearest ones to type instead."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from expt.command.conf_files import groups, keys_in_yaml, keys_of, options
from expt.config.constraints import kind, typed
from expt.config.key_types import names_around, takes_keys, takes_list
from expt.config.keys import all_keys, example_of, flat, in_a_shell
from expt.config.kinds import CUSTOM_DATASET_KEYS
from expt.errors import ConfigError, did_you_mean, first_line
from expt.runs.overrides import key_of, unquoted

if TYPE_CHECKING:
    from expt.command.grammar import Override

_UNSET = object()
"""The value of a key that nothing sets yet."""
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
        return _Unknown(word, key).error()
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


class _Unknown:
    """A key that there is not, in a word of the command, and the hints about it."""

    def __init__(
        self,
        word: str,
        key: str,
        choice: str | None = "",
        near: Sequence[str] = (),
        holder: str = "",
        written: str = "...",
    ) -> None:
        """Take the choice of the key's group, None for a custom class, and the keys next to it.

        `holder` is the key above it, if that has a value and no keys; `written` is the value.
        """
        self._word, self._key, self._choice, self._near = word, key, choice, near
        self._holder, self._written = holder, written
        self._group = key.partition(".")[0]
        self._above, _, self._last = key.rpartition(".")
        self._is_of_group = bool(choice) and self._above == self._group and not near
        self._has = {name: keys_of(self._group, name) for name in options(self._group)}
        self._own = self._has.get(choice or "", [])
        self._every = [*itertools.chain(*self._has.values())]

    def error(self) -> ConfigError:
        """Return the error with the first hint that there is."""
        hints = (
            *(self._below_value, self._of_custom_class, self._to_be_added, self._below_null),
            *(self._of_other_choice, self._misspelt, self._of_choice, self._anywhere),
        )
        return ConfigError(next(filter(None, (hint() for hint in hints))))

    def _said(self, hint: str) -> str:
        return f"{self._word}: there is no key '{self._key}'{hint}"

    def _below_value(self) -> str:
        holder, one = self._holder, self._written
        if not holder:
            return ""
        if takes_list(holder) and holder in all_keys():
            one = f"[{one}]"
        return f"{self._word}: {holder} has no keys below it; write {in_a_shell(f'{holder}={one}')}"

    def _of_custom_class(self) -> str:
        if self._choice is not None:
            return ""
        hint, add = did_you_mean(self._key, self._near), f"type +{self._word}"
        add = f".{hint} Or {add}" if hint else f"; {add}"
        return f"{self._word}: nothing sets '{self._key}' yet{add}, or add it to the class's YAML"

    def _to_be_added(self) -> str:
        is_class = self._group in groups() and self._last == "_target_"
        is_metric = self._key.startswith("task.metrics.")
        return self._said(f"; add it with +{self._word}") if is_class or is_metric else ""

    def _below_null(self) -> str:
        if self._key not in all_keys() or self._key in keys_in_yaml():
            return ""
        whole = f"set all of its keys at once, e.g. {example_of(self._above.split('.'))}"
        return f"{self._word}: {self._above} has no keys yet; {whole}"

    def _of_other_choice(self) -> str:
        """Return the choices that have the key, or one above it with a value and no keys."""
        names, own = self._key.split("."), self._own
        every = (".".join(names[:end]) for end in range(len(names), 0, -1))
        known = next((key for key in every if key in keys_in_yaml()), "")
        if known != self._key and ("." not in known or not own or known in own):
            return ""
        lacks = f"there is no {self._group}"
        if self._choice:
            lacks = f"{self._group}={self._choice} has no key '{known}'"
        meant = self._closest(known.rpartition(".")[2], 0.6, own)
        hint = f". Did you mean '{meant}'? Or" if meant else ";"
        return f"{self._word}: {lacks}{hint} add one that has it: {self._having(known)}"

    def _misspelt(self) -> str:
        """Return the key of its group, or of another place, whose last name is like this one's."""
        every = [*self._every, *self._own]
        by_end = {key.rpartition(".")[2]: key for key in keys_in_yaml()[::-1]}
        meant = self._closest(self._last, 0.8, every)  # dataset.groups: dataset.group
        meant = meant or ELSEWHERE.get(self._last) or by_end.get(self._last)
        if not meant and self._is_of_group:
            meant = self._closest(self._last, 0.6, every)
        if not meant:
            return ""
        hint = f". Did you mean '{meant}'?"
        if meant in self._every and meant not in self._own:
            hint += f" {self._group}={self._choice} has none; add {self._having(meant)}"
        return self._said(hint)

    def _having(self, key: str) -> str:
        """Return the word for the choices that have a key."""
        names = (name for name, below in self._has.items() if key in (self._group, *below))
        return f"{self._group}={' or '.join(names)}"

    @staticmethod
    def _closest(last: str, cutoff: float, keys: Sequence[str]) -> str | None:
        """Return the key whose last name is nearest to `last`; of equal names the last key."""
        ends = {each.rpartition(".")[2]: each for each in keys}
        found = difflib.get_close_matches(last, ends, n=1, cutoff=cutoff)
        return ends[found[0]] if found else None

    def _of_choice(self) -> str:
        own = ", ".join(self._own)
        has = f". {self._group}={self._choice} has {own}." if own else "."
        return self._said(has) if self._is_of_group else ""

    def _anywhere(self) -> str:
        settings, key = keys_in_yaml(), self._key
        known = [
            name for name in (*settings, *ELSEWHERE.values()) if not key.startswith(f"{name}.")
        ]
        if self._above and self._group not in settings:
            known += [f"{each}.{self._last}" for each in groups()]
        hint = did_you_mean(key, self._near or known)
        if not hint and self._group in settings:
            hint = f" --help {self._group} lists its keys"
        return self._said(f".{hint}")


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
    if key not in groups() or word.package is not None or word.is_delete() or is_name:
        return
    if isinstance(value, dict) and value:
        return
    several = value if isinstance(value, list) else [value]
    names = ",".join(each for each in several if isinstance(each, str)) or "NAME"
    fix = f"{'for a sweep: -m' if ',' in names else 'type'} {key}={names}"
    raise ConfigError(f"{word.input_line}: takes the name of one choice; {fix}")


def refuse_unknown(own: Mapping[str, Any], word: Override, choice: str | None) -> None:
    """Raise ConfigError for a key that the settings lack, or one that the value has below it.

    `choice` is the one of its group; None for a custom class.
    """
    path = word.key_or_group.split(".")
    unknown = _first_unknown(own, path, word.value())
    if not unknown:
        return
    names = unknown.split(".")
    value, at = _descend(own, names)
    near = list[str]()
    if choice is None and isinstance(value, dict):  # the keys next to the first that there is not
        near += [".".join([*names[:at], str(name), *names[at + 1 :]]) for name in value]
    if choice is None and path[0] == "dataset":
        near += [f"dataset.{key}" for key in CUSTOM_DATASET_KEYS]
    if re.search(r"\.\d+\.", unknown):  # in an element of a list
        above = ".".join(names[:-1])
        near += [f"{above}.{name}" for name in names_around(names, own)]
    written = typed(word.value()) if unknown == word.key_or_group else "..."
    holder = ".".join(names[:at])
    may_have_keys = isinstance(value, dict | list) or takes_keys(holder)
    if may_have_keys or (value is None and holder not in all_keys()):
        holder = ""
    found = _Unknown(str(word.input_line), unknown, choice, near, holder, written)
    raise found.error()


def refuse_no_list(own: Mapping[str, Any], word: Override) -> None:
    """Raise ConfigError for one element of a key that has no list, with the value to type."""
    if (found := _element_of_no_list(own, word)) is None:
        return
    path, value = found
    key = ".".join(path)
    one = typed(word.value())
    if takes_list(key) and (value is _UNSET or key in all_keys()):
        one = f"[{one}]"
    if value is _UNSET:
        whole = in_a_shell(f"+{key}={one}")
        why = f"nothing sets {key} yet; write the whole list, {whole}"
    elif key in groups():
        why = f"{key} has one value, {typed(kind(value))}; write {in_a_shell(f'{key}={one}')}"
    else:
        has_keys = any(each.startswith(f"{key}.") for each in all_keys())
        whole = example_of(path) if has_keys else in_a_shell(f"{key}={one}")
        why = f"{key} has one value, {typed(value)}; write {whole}"
    raise ConfigError(f"{word.input_line}: {why}")


def _element_of_no_list(own: Mapping[str, Any], word: Override) -> tuple[list[str], Any] | None:
    """Return the path and the value of a key, if the word sets an element and it takes no list."""
    path = word.key_or_group.split(".")
    value, at = _descend(own, path)
    if word.is_delete() or at in (0, len(path)):
        return None
    is_custom = any(key.endswith("_target_") for key in flat({path[0]: own.get(path[0])}))
    if isinstance(value, dict) and is_custom and not path[at].isdecimal():
        element = next((place for place in range(at, len(path)) if path[place].isdecimal()), None)
        return None if element is None else (path[:element], _UNSET)
    key = ".".join(path[:at])
    if not path[at].isdecimal() or isinstance(value, list):  # `with_value` names the whole list
        return None
    if isinstance(value, dict) and key not in groups():
        return None
    if value is None and takes_list(key):
        return None
    return path[:at], value


def refuse_to_delete(own: Mapping[str, Any], word: Override) -> NoReturn:
    """Raise ConfigError for an element that is to be deleted, with the list that is left."""
    path = word.key_or_group.split(".")
    value, at = _descend(own, path)
    if at < len(path):
        found = f"{'.'.join(path[:at])} is {typed(value)}"
        raise ConfigError(f"{word.input_line}: there is no {'.'.join(path[: at + 1])}; {found}")
    end = list_on(own, word) or 0
    left = _without(_descend(own, path[:end])[0], path[end:])
    whole = in_a_shell(f"{'.'.join(path[:end])}={typed(left)}")
    raise ConfigError(f"{word.input_line}: is in a list; write the list that is left, e.g. {whole}")


def _without(node: Any, path: Sequence[str]) -> Any:
    """Return a list or a mapping without the element or the key at a path that is there."""
    named = node.items() if isinstance(node, dict) else enumerate(node)
    found = {key: each for key, each in named if len(path) > 1 or str(key) != path[0]}
    for key, each in found.items():
        if str(key) == path[0]:
            found[key] = _without(each, path[1:])
    return found if isinstance(node, dict) else [*found.values()]


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
    is_in_list = isinstance(found, list | None) and names[at].isdecimal()
    if at and (is_in_list or (isinstance(found, list) and found)):
        return ""  # `with_value` names the whole list
    in_schema = ".".join(name for name in names if not name.isdecimal()) in all_keys()
    if at and names[at - 1].isdecimal() and in_schema:
        return ""  # elements may lack keys
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
