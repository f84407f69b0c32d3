"""Errors for words that no configuration has or takes, with the nearest ones to type instead."""

from __future__ import annotations

import copy
import difflib
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from expt.errors import ConfigError, did_you_mean

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


class Place:
    """The place of a key in nested settings: how far the parts of its name lead.

    Those `there` lead to `value`, whose own key is `holder`; those `missing` lead no further.
    `of_list` are those that lead to the first list on the way, or None.
    """

    def __init__(self, settings: Any, names: Sequence[str]) -> None:
        passed = [settings]
        for name in names:
            node = passed[-1]
            if isinstance(node, dict) and name in node:
                passed.append(node[name])
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                passed.append(node[int(name)])
            else:
                break
        self.names, self.value = names, passed[-1]
        self.there, self.missing = names[: len(passed) - 1], names[len(passed) - 1 :]
        self.key, self.holder = ".".join(names), ".".join(self.there)
        lists = (names[:at] for at, node in enumerate(passed) if isinstance(node, list))
        self.of_list = next(lists, None)


def place_of(own: Mapping[str, Any], word: Override) -> Place:
    """Return the place of a word's key in the settings."""
    return Place(own, word.key_or_group.split("."))


def unknown_option(group: str, name: str, known: Iterable[str]) -> str:
    """Return the error of a choice of a group for which there is no file."""
    if not (choices := sorted({*known})):
        return f"{group}={name}: there is no such group.{did_you_mean(group, groups())}"
    hint = did_you_mean(name, choices)
    return f"{group}={name}: not one of {', '.join(choices)}.{hint}"


def refuse_wrong_choice(word: Override) -> None:
    """Raise ConfigError for a group of expt's with neither the name of one choice nor its keys."""
    key, value = word.key_or_group, word.value()
    if key == "hydra":
        raise ConfigError(f"{word.input_line}: has keys of its own, e.g. hydra.run.dir=FOLDER")
    if key not in groups() or word.package is not None or word.is_delete():
        return
    is_choice = isinstance(value, str) and not _adds(word)
    if is_choice or (isinstance(value, dict) and value):
        return
    several = value if isinstance(value, list) else [value]
    names = ",".join(each for each in several if isinstance(each, str)) or "NAME"
    fix = f"{'for a sweep: -m' if ',' in names else 'type'} {key}={names}"
    raise ConfigError(f"{word.input_line}: takes the name of one choice; {fix}")


def refuse_wrong_key(own: Mapping[str, Any], word: Override, choices: Mapping[str, Any]) -> None:
    """Raise ConfigError for a word that can't set its key in these settings.

    `choices` are those of the groups.
    """
    if word.is_delete():
        _refuse_to_delete(own, word)
    refuse_wrong_element(own, word)
    (group, *below), value = word.key_or_group.split("."), word.value()
    chosen = own.get(group)
    is_custom = isinstance(chosen, dict) and "_target_" in chosen
    is_name = isinstance(chosen, dict) and not is_custom and below == ["name"]
    if is_name and value != own[group].get("name") and value in options(group):
        raise ConfigError(f"{word.input_line}: its other keys stay; write {group}={value}")
    may_lack = is_custom and group == "dataset" and not _of_all_datasets().isdisjoint(below[:1])
    if may_lack or _adds(word) or (unknown := _unknown_in(own, word)) is None:
        return
    _refuse_below_value(unknown, word)
    if is_custom:
        _refuse_argument(own, unknown, word)
    choice, near = str(choices.get(group) or ""), _of_element(own, unknown)
    raise UnknownKey(str(word.input_line), unknown.key, choice, near).error()


def _adds(word: Override) -> bool:
    return word.is_add() or word.is_force_add()


def _of_all_datasets() -> set[str]:
    """Return the keys that every custom dataset has, in its YAML or not."""
    own = {"name", "target", "kwargs", "train", "val", "test"}
    return {*names_of(GROUPS["dataset"]["_target_"])} - own


def refuse_wrong_element(own: Mapping[str, Any], word: Override) -> None:
    """Raise ConfigError for one element of a key that has no list, with the value to type."""
    place, one = place_of(own, word), typed(word.value())
    if word.is_delete() or not (place.there and place.missing):
        return
    is_next = place.missing[0].isdecimal()
    if problem := _of_one_value(place, one) if is_next else _of_unset_list(own, place, one):
        raise ConfigError(f"{word.input_line}: {problem}")


def _of_one_value(place: Place, one: str) -> str:
    """Return the problem with an element of a key that has one value; else an empty string."""
    key, value = place.holder, place.value
    if isinstance(value, list) or (value is None and takes_list(key)):
        return ""  # `with_value` names the whole list
    if key in groups():
        value, whole = kind(value), _whole(key, one)
    elif isinstance(value, dict):
        return ""  # a mapping may have numbers
    else:
        has_keys = any(each.startswith(f"{key}.") for each in all_keys())
        whole = example_of(place.there) if has_keys else _whole(key, one)
    return f"{key} has one value, {typed(value)}; write {whole}"


def _of_unset_list(own: Mapping[str, Any], place: Place, one: str) -> str:
    """Return the problem with an element of a custom argument's list that nothing sets."""
    group = place.there[0]
    has_class = any(key.endswith("_target_") for key in flat({group: own[group]}))
    names = [*itertools.takewhile(lambda name: not name.isdecimal(), place.missing)]
    if not (isinstance(place.value, dict) and has_class and len(names) < len(place.missing)):
        return ""
    key = ".".join([*place.there, *names])
    whole = in_a_shell(f"+{key}=[{one}]" if takes_list(key) else f"+{key}={one}")
    return f"nothing sets {key} yet; write the whole list, {whole}"


def _whole(key: str, one: str) -> str:
    """Return the word for a key that has one value, which may be a list."""
    return in_a_shell(f"{key}=[{one}]" if takes_list(key) and key in all_keys() else f"{key}={one}")


def _refuse_to_delete(own: Mapping[str, Any], word: Override) -> NoReturn:
    """Raise ConfigError for an element that is to be deleted, with the list that is left."""
    place = place_of(own, word)
    if place.missing:
        absent = ".".join([*place.there, place.missing[0]])
        found = f"{place.holder} is {typed(place.value)}"
        raise ConfigError(f"{word.input_line}: there is no {absent}; {found}")
    of_list = place.of_list or ()
    left = copy.deepcopy(Place(own, of_list).value)
    *above, last = place.names[len(of_list) :]
    holder = Place(left, above).value
    del holder[int(last) if isinstance(holder, list) else last]
    whole = in_a_shell(f"{'.'.join(of_list)}={typed(left)}")
    raise ConfigError(f"{word.input_line}: is in a list; write the list that is left, e.g. {whole}")


def _unknown_in(own: Mapping[str, Any], word: Override) -> Place | None:
    """Return the place of a key that the settings lack: the word's, or one in its mapping.

    None if they have all, or may get them.
    """
    place, value = place_of(own, word), word.value()
    if not place.missing and isinstance(value, dict) and isinstance(place.value, dict):
        place = Place(own, [*place.names, *_first_not_in(place.value, value)])
    return place if place.missing and not _may_get(place) else None


def _first_not_in(node: Mapping[Any, Any], mapping: Mapping[Any, Any]) -> list[str]:
    """Return the way to the first key of a mapping that `node` lacks; empty if it has all."""
    for key, value in mapping.items():
        has_keys = isinstance(value, dict) and isinstance(node.get(key), dict)
        below = _first_not_in(node[key], value) if has_keys else []
        if below or key not in node:
            return [str(key), *below]
    return []


def _may_get(place: Place) -> bool:
    """Return whether a key may be set that is not there."""
    if not place.there:
        return False
    if place.value in (None, []) and place.missing[0].isdecimal():
        return True  # `with_value` names the whole list
    if isinstance(place.value, list) and place.value:
        return True
    if place.there[-1].isdecimal():  # an element may lack keys
        return ".".join(name for name in place.names if not name.isdecimal()) in all_keys()
    was_null = place.key in all_keys() and place.key not in keys_in_yaml()
    return isinstance(place.value, dict) and was_null


def _refuse_below_value(unknown: Place, word: Override) -> None:
    """Raise ConfigError for a key below one that has a value, and no keys."""
    key, value = unknown.holder, unknown.value
    has_keys = isinstance(value, dict | list) or takes_keys(key)
    if not has_keys and (value is not None or key in all_keys()):
        whole = _whole(key, typed(word.value()) if unknown.key == word.key_or_group else "...")
        raise ConfigError(f"{word.input_line}: {key} has no keys below it; write {whole}")


def _refuse_argument(own: Mapping[str, Any], unknown: Place, word: Override) -> NoReturn:
    """Raise ConfigError for an argument of a custom class that nothing sets."""
    text, near = str(word.input_line), _of_element(own, unknown)
    if isinstance(unknown.value, dict):  # the keys next to the first that there is not
        rest = unknown.missing[1:]
        near += [".".join([*unknown.there, str(name), *rest]) for name in unknown.value]
    if unknown.names[0] == "dataset":
        near += [f"dataset.{key}" for key in _of_all_datasets()]
    add = f"type +{text} if the class takes it, or add it to the class's YAML"
    hint = did_you_mean(unknown.key, near)
    raise ConfigError(f"{text}: nothing sets '{unknown.key}' yet; {add}.{hint}")


def _of_element(own: Mapping[str, Any], place: Place) -> list[str]:
    """Return the keys that the element of a list may have; none for a key of no element."""
    *above, _ = place.names
    if not any(name.isdecimal() for name in above):
        return []
    return [".".join([*above, name]) for name in names_around(place.names, own)]


@dataclass(frozen=True)
class UnknownKey:
    """A key that the settings lack; its hints are empty strings where they do not apply."""

    word: str
    key: str
    choice: str = ""
    """The choice of its group, if any."""
    near: Sequence[str] = ()
    """The keys next to it in an element of a list."""

    def error(self) -> ConfigError:
        """Return the error with the first hint that applies."""
        own = (self._addition, self._whole, self._other_choice)
        hints = (*own, self._similar, self._own_keys, self._anywhere)
        return ConfigError(f"{self.word}: {next(filter(None, (hint() for hint in hints)))}")

    @functools.cached_property
    def _names(self) -> list[str]:
        """The parts of the key; the first is its group, if it has one."""
        return self.key.split(".")

    @functools.cached_property
    def _by_choice(self) -> dict[str, list[str]]:
        """The keys of each choice of the group."""
        return {each: keys_of(self._names[0], each) for each in options(self._names[0])}

    @property
    def _own(self) -> list[str]:
        """The keys of the choice."""
        return self._by_choice.get(self.choice, [])

    @property
    def _chosen(self) -> str:
        return f"{self._names[0]}={self.choice}"

    @property
    def _is_of_choice(self) -> bool:
        """True for a key right below a group that has a choice."""
        return bool(self.choice) and len(self._names) == 2

    def _addition(self) -> str:
        """Hint at the `+` of a class, or of a metric."""
        is_class = self._names[0] in groups() and self._names[-1] == "_target_"
        may_add = is_class or self.key.startswith("task.metrics.")
        return f"there is no key '{self.key}'; add it with +{self.word}" if may_add else ""

    def _whole(self) -> str:
        """Hint at the mapping above it, which is null."""
        *above, _ = self._names
        if not above or self.key not in all_keys() or self.key in keys_in_yaml():
            return ""
        fix = f"set all of its keys at once, e.g. {example_of(above)}"
        return f"{'.'.join(above)} has no keys yet; {fix}"

    def _other_choice(self) -> str:
        """Hint at the choices that have the key, or one above it, which this choice lacks."""
        every = (".".join(self._names[:end]) for end in range(len(self._names), 0, -1))
        known = next((each for each in every if each in keys_in_yaml()), "")
        is_of_others = "." in known and self._own and known not in self._own
        if known != self.key and not is_of_others:
            return ""
        meant = _nearest(known, self._own, 0.6)
        hint = f". Did you mean '{meant}'? Or" if meant else ";"
        of_choice = f"{self._chosen} has no key '{known}'"
        lacks = of_choice if self.choice else f"there is no {self._names[0]}"
        return f"{lacks}{hint} add one that has it: {self._having(known)}"

    def _similar(self) -> str:
        """Hint at a similar key of the group, or at one of the same or a known name elsewhere."""
        last = self._names[-1]
        of_group = [*itertools.chain(*self._by_choice.values()), *self._own]
        by_end = {each.rpartition(".")[2]: each for each in keys_in_yaml()[::-1]}
        meant = _nearest(self.key, of_group, 0.8) or ELSEWHERE.get(last) or by_end.get(last)
        if not meant and self._is_of_choice:
            meant = _nearest(self.key, of_group, 0.6)
        if not meant:
            return ""
        is_of_others = meant in of_group and meant not in self._own
        of_choice = f"{self._chosen} has none; add" if self.choice else "Add"
        fix = f" {of_choice} {self._having(meant)}" if is_of_others else ""
        return f"there is no key '{self.key}'. Did you mean '{meant}'?{fix}"

    def _own_keys(self) -> str:
        """List the keys of the choice."""
        listed = f" {self._chosen} has {', '.join(self._own)}." if self._own else ""
        return f"there is no key '{self.key}'.{listed}" if self._is_of_choice else ""

    def _anywhere(self) -> str:
        """Hint at the nearest of all keys, or else at the list of those of its group."""
        settings, first = keys_in_yaml(), self._names[0]
        every = (*settings, *ELSEWHERE.values())
        known = [each for each in every if not self.key.startswith(f"{each}.")]
        if len(self._names) > 1 and first not in settings:
            known += [f"{each}.{self._names[-1]}" for each in groups()]
        listed = f" --help {first} lists its keys" if first in settings else ""
        hint = did_you_mean(self.key, self.near or known) or listed
        return f"there is no key '{self.key}'.{hint}"

    def _having(self, key: str) -> str:
        """Return the choices that have a key, as a word."""
        group, every = self._names[0], self._by_choice.items()
        return f"{group}={' or '.join(name for name, keys in every if key in (group, *keys))}"


def _nearest(key: str, keys: Sequence[str], cutoff: float) -> str | None:
    """Return the key whose last name is most like that of `key`; of equal names the last key."""
    ends = {each.rpartition(".")[2]: each for each in keys}
    found = difflib.get_close_matches(key.rpartition(".")[2], ends, n=1, cutoff=cutoff)
    return ends[found[0]] if found else None
