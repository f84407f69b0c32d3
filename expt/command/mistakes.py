"""Errors for words that no configuration has or takes, with the nearest ones to type instead."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from expt.command.conf_files import groups, keys_in_yaml, keys_of, options
from expt.config import keys
from expt.config.constraints import in_a_shell, kind, names_of, typed
from expt.config.groups import GROUPS
from expt.errors import ConfigError, did_you_mean, nearest

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
    """The place of a dotted key in nested settings: how far the names in it lead.

    Those `there` lead to `value`, whose own key is `holder`; those `missing` lead no further.
    `of_list` is the key of the first list on the way, or None.
    """

    def __init__(self, settings: Any, key: str) -> None:
        self.key, self.names, passed = key, key.split("."), [settings]
        for name in self.names:
            node = passed[-1]
            if isinstance(node, dict) and name in node:
                passed.append(node[name])
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                passed.append(node[int(name)])
            else:
                break
        keys_of_all = [".".join(self.names[:at]) for at in range(len(passed))]
        self.value, self.holder = passed[-1], keys_of_all[-1]
        self.there, self.missing = self.names[: len(passed) - 1], self.names[len(passed) - 1 :]
        every = zip(keys_of_all, passed, strict=True)
        self.of_list = next((key for key, node in every if isinstance(node, list)), None)


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
    is_name = isinstance(value, str) and not (word.is_add() or word.is_force_add())
    if is_name or (isinstance(value, dict) and value):
        return
    several = value if isinstance(value, list) else [value]
    names = ",".join(each for each in several if isinstance(each, str)) or "NAME"
    fix = f"{'for a sweep: -m' if ',' in names else 'type'} {key}={names}"
    raise ConfigError(f"{word.input_line}: takes the name of one choice; {fix}")


def refuse_wrong_key(own: Mapping[str, Any], word: Override, choices: Mapping[str, Any]) -> None:
    """Raise ConfigError for a word that can't set its key here; `choices` are those of groups."""
    if problem := next(filter(None, _problems(own, word, choices)), ""):
        raise ConfigError(f"{word.input_line}: {problem}")


def refuse_wrong_element(own: Mapping[str, Any], word: Override) -> None:
    """Raise ConfigError for one element of a key that has no list, with the value to type."""
    if problem := _of_element(own, word):
        raise ConfigError(f"{word.input_line}: {problem}")


def _problems(own: Mapping[str, Any], word: Override, choices: Mapping[str, Any]) -> Iterator[str]:
    """Yield each problem that a key may have, or an empty string; the first one is to be said."""
    if word.is_delete():
        yield "is in a list; write the list that is left"
    yield _of_element(own, word)
    yield _of_other_choice(own, word)
    if word.is_add() or word.is_force_add() or (absent := _absent_in(own, word)) is None:
        return
    yield _below_value(absent, word)
    if _is_custom(own, absent.names[0]):
        yield _of_argument(own, absent, word)
    choice, near = str(choices.get(absent.names[0]) or ""), _keys_of_element(own, absent)
    yield unknown_key(str(word.input_line), absent.key, choice, near)


def _is_custom(own: Mapping[str, Any], group: str) -> bool:
    return isinstance(own.get(group), dict) and "_target_" in own[group]


def _of_all_datasets() -> set[str]:
    """Return the keys that every custom dataset has, in its YAML or not."""
    own = {"name", "target", "kwargs", "train", "val", "test"}
    return {*names_of(GROUPS["dataset"]["_target_"])} - own


def _of_other_choice(own: Mapping[str, Any], word: Override) -> str:
    """Return the problem with a name of another choice, whose keys would not be there."""
    (group, *below), value = word.key_or_group.split("."), word.value()
    if below != ["name"] or not isinstance(own.get(group), dict) or _is_custom(own, group):
        return ""
    is_other = value != own[group].get("name") and value in options(group)
    return f"its other keys stay; write {group}={value}" if is_other else ""


def _of_element(own: Mapping[str, Any], word: Override) -> str:
    """Return the problem with an element of a key that has no list; else an empty string."""
    place, one = Place(own, word.key_or_group), typed(word.value())
    if word.is_delete() or not (place.there and place.missing):
        return ""
    if not place.missing[0].isdecimal():
        return _of_unset_list(own, place, one)
    key, value = place.holder, place.value
    if isinstance(value, list) or (value is None and keys.takes_list(key)):
        return ""  # `with_value` names the whole list
    if key in groups():
        value, whole = kind(value), _whole(key, one)
    elif isinstance(value, dict):
        return ""  # a mapping may have numbers
    else:
        has_keys = any(each.startswith(f"{key}.") for each in keys.all_keys())
        whole = keys.example_of(place.there) if has_keys else _whole(key, one)
    return f"{key} has one value, {typed(value)}; write {whole}"


def _of_unset_list(own: Mapping[str, Any], place: Place, one: str) -> str:
    """Return the problem with an element of a custom argument's list that nothing sets."""
    group = place.there[0]
    has_class = any(key.endswith("_target_") for key in keys.flat({group: own[group]}))
    names = [*itertools.takewhile(lambda name: not name.isdecimal(), place.missing)]
    if not (isinstance(place.value, dict) and has_class and len(names) < len(place.missing)):
        return ""
    key = ".".join([*place.there, *names])
    whole = in_a_shell(f"+{key}=[{one}]" if keys.takes_list(key) else f"+{key}={one}")
    return f"nothing sets {key} yet; write the whole list, {whole}"


def _whole(key: str, one: str) -> str:
    """Return the word for a key that has one value, which may be a list."""
    is_list = keys.takes_list(key) and key in keys.all_keys()
    return in_a_shell(f"{key}=[{one}]" if is_list else f"{key}={one}")


def _absent_in(own: Mapping[str, Any], word: Override) -> Place | None:
    """Return the place of a key that the settings lack: the word's, or one in its mapping.

    None if they have all, or may get them.
    """
    place, value = Place(own, word.key_or_group), word.value()
    if not place.missing and isinstance(value, dict) and isinstance(place.value, dict):
        place = Place(own, ".".join([place.key, *_first_not_in(place.value, value)]))
    return place if place.missing and not _may_get(own, place) else None


def _first_not_in(node: Mapping[Any, Any], mapping: Mapping[Any, Any]) -> list[str]:
    """Return the way to the first key of a mapping that `node` lacks; empty if it has all."""
    for key, value in mapping.items():
        has_keys = isinstance(value, dict) and isinstance(node.get(key), dict)
        below = _first_not_in(node[key], value) if has_keys else []
        if below or key not in node:
            return [str(key), *below]
    return []


def _may_get(own: Mapping[str, Any], place: Place) -> bool:
    """Return whether a key may be set that is not there."""
    if not place.there:
        return False
    if place.there == ["dataset"] and _is_custom(own, "dataset"):
        return place.missing[0] in _of_all_datasets()
    is_unset = place.value in (None, [])
    if place.missing[0].isdecimal() if is_unset else isinstance(place.value, list):
        return True  # `with_value` names the whole list
    if place.there[-1].isdecimal():  # an element may lack keys
        return ".".join(name for name in place.names if not name.isdecimal()) in keys.all_keys()
    was_null = place.key in keys.all_keys() and place.key not in keys_in_yaml()
    return isinstance(place.value, dict) and was_null


def _below_value(absent: Place, word: Override) -> str:
    """Return the problem with a key below one that has a value, and no keys."""
    key, value = absent.holder, absent.value
    has_keys = isinstance(value, dict | list) or keys.takes_keys(key)
    if has_keys or (value is None and key not in keys.all_keys()):
        return ""
    whole = _whole(key, typed(word.value()) if absent.key == word.key_or_group else "...")
    return f"{key} has no keys below it; write {whole}"


def _of_argument(own: Mapping[str, Any], absent: Place, word: Override) -> str:
    """Return the problem with an argument of a custom class that nothing sets."""
    near = _keys_of_element(own, absent)
    if isinstance(absent.value, dict):  # the keys next to the first that there is not
        rest = absent.missing[1:]
        near += [".".join([*absent.there, str(name), *rest]) for name in absent.value]
    if absent.names[0] == "dataset":
        near += [f"dataset.{key}" for key in _of_all_datasets()]
    add = f"type +{word.input_line} if the class takes it, or add it to the class's YAML"
    return f"nothing sets '{absent.key}' yet; {add}.{did_you_mean(absent.key, near)}"


def _keys_of_element(own: Mapping[str, Any], place: Place) -> list[str]:
    """Return the keys that the element of a list may have; none for a key of no element."""
    *above, _ = place.names
    if not any(name.isdecimal() for name in above):
        return []
    return [".".join([*above, name]) for name in keys.names_around(place.names, own)]


def unknown_key(word: str, key: str, choice: str = "", near: Sequence[str] = ()) -> str:
    """Return the error of a key that the settings lack, with the one that is meant.

    `choice` is that of its group, `near` are the keys next to it in an element of a list.
    """
    names, settings = key.split("."), keys_in_yaml()
    group, above = names[0], names[:-1]
    absent = f"there is no key '{key}'"
    if key.startswith("task.metrics.") or (group in groups() and names[-1] == "_target_"):
        return f"{absent}; add it with +{word}"
    if above and key in keys.all_keys() and key not in settings:
        fix = f"set all of its keys at once, e.g. {keys.example_of(above)}"
        return f"{'.'.join(above)} has no keys yet; {fix}"
    if near:
        return f"{absent}.{did_you_mean(key, near)}"
    by_choice = {each: keys_of(group, each) for each in options(group)}
    own = by_choice.get(choice) or [each for each in settings if each.startswith(f"{group}.")]
    of_group = [*itertools.chain(*by_choice.values()), *own]
    there = key if key in settings else _meant(key, of_group)
    meant = _nearest(key, own, 0.8) or there
    having = [each for each, known in by_choice.items() if meant in known]
    others = f"{group}={' or '.join(having)}" if having and choice not in having else ""
    if meant == key:
        return f"{group}={choice or 'null'} has no key '{key}'; add {others}" if others else absent
    if meant:
        return f"{absent}. Did you mean '{meant}'?{f' Add {others}' if others else ''}"
    if own:
        holder = f"{group}={choice}" if choice else group
        return f"{absent}. {holder} has {', '.join(own)}."
    # A custom class may have the key.
    of_similar = [f"{each}.{names[-1]}" for each in nearest(group, groups()) if above]
    return f"{absent}.{did_you_mean(key, [*settings, *of_similar])}"


def _meant(key: str, of_group: Sequence[str]) -> str:
    """Return a similar key of the group, or one of the same or a known name elsewhere; or ""."""
    last = key.rpartition(".")[2]
    by_end = {each.rpartition(".")[2]: each for each in keys_in_yaml()[::-1]}
    elsewhere = ELSEWHERE.get(last) or by_end.get(last)
    return _nearest(key, of_group, 0.8) or elsewhere or _nearest(key, of_group, 0.6) or ""


def _nearest(key: str, known: Sequence[str], cutoff: float) -> str | None:
    """Return the key whose last name is most like that of `key`; of equal names the last key."""
    ends = {each.rpartition(".")[2]: each for each in known}
    found = difflib.get_close_matches(key.rpartition(".")[2], ends, n=1, cutoff=cutoff)
    return ends[found[0]] if found else None
