"""The meaning of each setting for a run, and its types, as annotated in the schema.

First the meanings: the effect of a key on a run's numbers, and the other settings without which it
has none. Then the types: the keys that there are, and the values that they take. Free of torch.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from expt.config.constraints import IS_GIVEN, IS_SET, Key, in_a_shell, kind, names_of, plain, typed
from expt.config.groups import GROUPS
from expt.config.schema import RunConfig

_DEFAULT = Key(result="changes", resume=False, fork=True, evaluate=False, cost=True)
"""The meaning of a key that no annotation says more of."""


@functools.cache
def meaning(key: str, member: str | None = None) -> Key:
    """Return the meaning of the dotted `key`, every field of it filled in.

    `member` is the chosen member of its group, without which the group's first that has the key
    counts. A key that is not in the schema, such as a custom class's argument, is as the one above.
    """
    parts, found = key.split("."), _DEFAULT
    for end in range(1, len(parts) + 1):
        if not (hints := hints_at(parts[:end], member)):
            break
        found = _below(found, _annotation(hints[0]))
    return found


def _below(above: Key, own: Key | None) -> Key:
    """Return `own`, its empty fields filled in from the key above it."""
    if own is None:
        return above
    inherited = {
        name: getattr(above, name)
        for name in ("result", "resume", "fork", "evaluate", "varies", "cost", "evaluated_as")
        if getattr(own, name) is None
    }
    only_if = {**above.only_if, **own.only_if}
    return dataclasses.replace(own, only_if=only_if, **inherited)


def _annotation(hint: Any) -> Key | None:
    """Return the `Key` in an annotated type, or in a member of a union of such."""
    for found in getattr(hint, "__metadata__", ()):
        if isinstance(found, Key):
            return found
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(filter(None, map(_annotation, typing.get_args(hint))), None)
    return None


@functools.cache
def all_keys() -> Mapping[str, Key]:
    """Return the meaning of every key in the schema, of all members of groups."""
    found: dict[str, Key] = {}
    for name, hint in hints_of(RunConfig).items():
        found.setdefault(name, meaning(name))
        of_group = GROUPS[name].items() if name in GROUPS else ()
        for member, holder in of_group or [(None, cls) for cls in classes_in(hint)]:
            for key in _keys_below(holder, name):
                found.setdefault(key, meaning(key, member))
    return found


def _keys_below(cls: type, prefix: str) -> Iterator[str]:
    for name, hint in hints_of(cls).items():
        if typing.get_origin(hint) is not typing.ClassVar:
            yield f"{prefix}.{name}"
            for below in classes_in(hint):
                yield from _keys_below(below, f"{prefix}.{name}")


def varying(*by: str) -> tuple[str, ...]:
    """Return the keys in which runs that are equal except for `by` may differ: "repetition", ..."""
    return tuple(key for key, meant in all_keys().items() if meant.varies in by)


def meaning_in(settings: Mapping[str, Any], key: str) -> Key:
    """Return the meaning of `key` for the members of groups that the flat settings choose."""
    return meaning(key, settings.get(f"{key.partition('.')[0]}.name"))


def has_effect(conditions: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether flat settings satisfy the conditions of a key; see `Key.only_if`."""

    def holds(other: str, wanted: Any) -> bool:
        value = settings.get(other)
        if wanted is IS_SET:
            return bool(value) or any(key.startswith(f"{other}.") for key in settings)
        if wanted is IS_GIVEN:
            return value is not None
        return value in wanted if isinstance(wanted, tuple) else bool(value == wanted)

    return all(holds(*condition) for condition in conditions.items())


def is_idle(key: str, settings: Mapping[str, Any]) -> bool:
    """Return whether `key` has no effect with the other flat settings."""
    return not has_effect(meaning_in(settings, key).only_if, settings)


def effects_in_words(key: str, *, of_changes: bool = True) -> str:
    """Return in words where a setting has an effect, and that `of_changes` to runs that are there.

    Nothing where a change makes another run.
    """
    meant = meaning(key)
    of_results = {"none": "changes no number", "rounding": "changes rounding only"}
    of_resumes = {True: "may change on resume", "ahead": "may change on resume before it acts"}
    of_forks = {False: "kept by a fork", "epoch": "in a fork from an epoch's end"}
    parts = [of_results.get(str(meant.result))]
    if meant.result == "changes":
        parts += [of_resumes.get(meant.resume or False), of_forks.get(meant.fork)]
    return "; ".join([*filter(None, parts * of_changes), *_conditions(key, meant)])


def _conditions(key: str, meant: Key) -> Iterator[str]:
    for other, wanted in meant.only_if.items():
        if other == key:  # its default is the behaviour of earlier runs, which lack the key
            continue
        if wanted is IS_SET:
            yield f"only if {other} is set"
        else:
            values = wanted if isinstance(wanted, tuple) else (wanted,)
            yield f"only with {other}={' or '.join(map(typed, values))}"


def without_effect(
    config: RunConfig, given: Iterable[str], varied: Collection[str] = ()
) -> list[str]:
    """Return a line for each of the `given` keys that has no effect with the other settings.

    Left out are those that have one with other values of the `varied` keys.
    """
    settings, found = flat(plain(config)), list[str]()
    for key in dict.fromkeys(given):
        if not settings.get(key) or not is_idle(key, settings):
            continue
        meant = meaning_in(settings, key)
        others = {*meant.only_if, *(other.partition(".")[0] for other in meant.only_if)}
        why = ", ".join(_conditions(key, meant))
        if why and others.isdisjoint(varied):
            found.append(f"{key}={typed(settings[key])}: has no effect, {why}")
    return found


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def value_at(node: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of keys and of numbers of elements."""
    for part in path:
        node = node[int(part) if isinstance(node, list) else part]
    return node


def hints_at(path: Sequence[str], member: str | None = None, root: Any = RunConfig) -> list[Any]:
    """Return the types of the key at a path, of each class that may have it."""
    *above, last = path
    every = map(hints_of, classes_at(above, member, root))
    return [hints[last] for hints in every if last in hints]


def classes_at(path: Sequence[str], member: str | None = None, root: Any = RunConfig) -> list[Any]:
    """Return the dataclasses that may lie at a path, where `member` is chosen of its group."""
    if not path:
        return [root]
    if root is RunConfig and len(path) == 1 and path[0] in GROUPS:
        members = GROUPS[path[0]]
        return [members[member]] if member in members else [*members.values()]
    if path[-1].isdigit():  # the elements of a list have the class that its type names
        return classes_at(path[:-1], member, root)
    return [cls for hint in hints_at(path, member, root) for cls in classes_in(hint)]


def names_around(path: Sequence[str], node: Mapping[str, Any], root: Any = RunConfig) -> list[str]:
    """Return the keys that there are next to the last one of `path`, in a configuration `node`."""
    member = kind(node.get(path[0])) if path[0] in GROUPS else None
    return [name for cls in classes_at(path[:-1], member, root) for name in names_of(cls)]


def classes_in(hint: Any) -> Iterator[type]:
    """Yield the dataclasses that a type names, also in unions and lists."""
    return filter(dataclasses.is_dataclass, _leaves([hint]))


@functools.cache
def holders() -> tuple[str, ...]:
    """Return the keys with others below them that are set one by one."""
    found = [name for name in names_of(RunConfig) if name not in GROUPS]
    found += [key for key in all_keys() if key.partition(".")[0] in GROUPS and "." in key]

    def is_bare(hint: Any) -> bool:  # and not in a union or a list
        return dataclasses.is_dataclass(getattr(hint, "__origin__", hint))

    return tuple(key for key in found if any(map(is_bare, hints_at(key.split(".")))))


def example_of(path: Sequence[str]) -> str:
    """Return a value as it is typed for a key that takes a list, or has keys below it."""
    key = ".".join(part for part in path if not part.isdigit())
    if example := meaning(key).example:
        return in_a_shell(example)
    below = next((names_of(cls)[0] for cls in classes_at(path)), None)
    if below is None:
        return f"{key}=[a,b]" if takes_text(key) else f"{key}=[1,2]"
    return f"{key}.{below}=..." if key in holders() else in_a_shell(f"{key}=[{{{below}: ...}}]")


def choices_of(key: str) -> tuple[str, ...]:
    """Return the values of a setting as they are typed; none for a number or a text."""
    values: list[Any] = []
    for leaf in _types_of(key):
        of_literal = typing.get_args(leaf) if typing.get_origin(leaf) is typing.Literal else ()
        values += {bool: (True, False), types.NoneType: (None,)}.get(leaf, of_literal)
    found = tuple(dict.fromkeys(map(typed, values)))
    return found if {*found} - {"null"} else ()


def takes_null(key: str) -> bool:
    """Return whether a setting may be null."""
    return types.NoneType in _types_of(key)


def takes_list(key: str) -> bool:
    """Return whether a setting may be a list; any may that is not in the schema."""
    hints = hints_at(key.split("."))
    return not hints or any(typing.get_origin(each) is tuple for each in _leaves(hints, ()))


def takes_keys(key: str) -> bool:
    """Return whether a setting may have keys below it, also in the elements of its list."""
    types_in = _types_of(key)
    return any(dataclasses.is_dataclass(x) or typing.get_origin(x) is dict for x in types_in)


@functools.cache
def takes_text(key: str) -> bool:
    """Return whether a setting is a text, or a list of texts, whichever word stands there."""
    found = _types_of(key)
    return bool(found) and found.keys() <= {str, types.NoneType, Ellipsis}


@functools.cache
def may_be_text(key: str) -> bool:
    """Return whether a setting, or an element of it, may be any text, as a secret is."""
    found = _types_of(key)
    literals = {leaf for leaf in found if typing.get_origin(leaf) is typing.Literal}
    return not found or not found.keys() - literals <= {bool, int, float, types.NoneType, Ellipsis}


def _types_of(key: str) -> dict[Any, None]:
    """Return the types of a setting, or of the elements of its list, in the order of the schema."""
    path = re.sub(r"(\.\d+)+$", "", key).split(".")
    return dict.fromkeys(_leaves(hints_at(path)))


def _leaves(hints: Iterable[Any], lists: tuple[type, ...] = (tuple,)) -> Iterator[Any]:
    """Yield the types in types: of unions their members, of `lists` their elements."""
    for hint in hints:
        origin, inside = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Annotated, typing.Union, types.UnionType, *lists):
            yield from _leaves(inside[:1] if origin is typing.Annotated else inside, lists)
        else:
            yield hint


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the annotated types of a dataclass's fields."""
    return typing.get_type_hints(cls, include_extras=True)
