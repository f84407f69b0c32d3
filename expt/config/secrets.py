"""What `${oc.env:NAME}` stands for is not written to disk: a secret may be among it.

Free of torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from expt.errors import ConfigError, first_line

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

MIN_LENGTH = 4
"""A shorter value would be found in too many texts that have nothing to do with it."""

MIN_DIGITS = 8
"""The same of a number that is made of one: a rate or a size is found in others' settings."""

_names: dict[str, str] = {}
"""From a value to the variable that held it. One for the whole process, because texts are written
from everywhere, by
excepthooks and by what prints a traceback too: a set of secrets that is passed along would miss one
of them."""

_PLAIN = re.compile(r"\$\{oc\.env:(\w+)\}")
_VARIABLE = re.compile(r"\$\{\s*oc\.env:\s*(\w+)[^{}]*\}")
_RESOLVER = re.compile(r"\$\{\s*(?!oc\.env\s*:)[\w.]+\s*:")
_REFERENCE = re.compile(r"\$\{[^:{}$]*\}")
_Made = Mapping[tuple[str, ...], tuple[str, Any]]
"""From a key to the interpolation, and what it gave."""
_ELSEWHERE = "made_of"
"""The name of no resolver, in the place of an interpolation that says nothing outside of its
configuration.
"""


class Variables(dict[str, str]):
    """The variables that interpolations have read, and their values.

    And of what other resolvers have made of them, as `oc.decode` does, each value in JSON, by
    `KEY=INTERPOLATION`: no text of the variable need be in it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_for: list[str] = []
        """The names, each time one is read."""

    def add_made(self, composed: DictConfig, keys: Iterable[str]) -> None:
        """Add what is made of variables below these keys of a configuration."""
        references = list[_Reference]()
        for path, holder, key in _interpolated(composed, keys):
            self.asked_for.clear()
            value, text = _resolved(holder, key), str(holder._get_node(key)._value())  # type: ignore[union-attr]
            if not self.asked_for or "${" not in _VARIABLE.sub("", text):
                continue  # what is left is found as text
            if isinstance(
                value, Mapping | list
            ):  # hidden as a whole; by its parts where they lie elsewhere
                self[f"{'.'.join(path)}={text}"] = json.dumps(value, default=str)
                for number, name in enumerate(_long_keys(value)):
                    self[f"{'.'.join(path)}.key{number}={text}"] = json.dumps(name)
            for below, leaf in _leaves(value):
                at = ".".join([*path, *below])
                if _REFERENCE.search(text):
                    references.append(
                        _Reference(at, self.asked_for[-1], leaf, bool(_RESOLVER.search(text)))
                    )
                else:
                    self[f"{at}={text}{''.join(f'[{part}]' for part in below)}"] = json.dumps(
                        leaf, default=str
                    )
        self._add_references(references)

    def _add_references(self, found: Iterable[_Reference]) -> None:
        made = {value: split[1] for key, value in self.items() if (split := _split(key))}
        texts = [str(json.loads(value)) for value in made]
        for key, name, value, is_resolved in found:
            written, is_text = json.dumps(value, default=str), isinstance(value, str)
            if is_resolved or not is_text or any(text in value for text in texts):
                self[f"{key}={made.get(written, f'${{{_ELSEWHERE}:${{oc.env:{name}}}}}')}"] = (
                    written
                )


class _Reference(NamedTuple):
    """What an interpolation of other keys gives."""

    key: str
    variable: str
    """One of those that it is made of."""
    value: Any
    is_resolved: bool
    """Whether a resolver makes it of those keys."""


@contextlib.contextmanager
def environment_read() -> Iterator[Variables]:
    """Collects, by name, the variables that interpolations read meanwhile, and keeps them out of
    what is written.
    """
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    read = Variables()

    def env(key: str, *default: Any) -> Any:
        if key in os.environ:
            read[key] = os.environ[key]
            read.asked_for.append(key)
        return oc.env(key, *default)

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        yield read
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        remember(read)


def _interpolated(
    holder: DictConfig | ListConfig, keys: Iterable[Any], path: Sequence[str] = ()
) -> Iterator[tuple[Sequence[str], DictConfig | ListConfig, Any]]:
    """Where in it interpolations are: the path, what holds it, and by which key."""
    from omegaconf import DictConfig, ListConfig

    for key in keys:
        node: Any = holder._get_node(key)
        at = [*path, str(key)]
        if node._is_interpolation():
            yield at, holder, key
        elif isinstance(node, DictConfig | ListConfig) and not (
            node._is_none() or node._is_missing()
        ):
            yield from _interpolated(
                node, node.keys() if isinstance(node, DictConfig) else range(len(node)), at
            )


def _resolved(holder: Any, key: Any) -> Any:
    from omegaconf import OmegaConf

    value = holder[key]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _leaves(value: Any, path: Sequence[str] = ()) -> Iterator[tuple[Sequence[str], Any]]:
    """The values that are no containers, and long enough to be a secret."""
    if isinstance(value, Mapping | list | tuple):
        for key, below in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(below, [*path, str(key)])
    elif not isinstance(value, bool | None) and len(str(value)) >= MIN_LENGTH:
        yield path, value


def _long_keys(value: Any) -> Iterator[str]:
    """The keys of mappings in it that are long enough to be a secret, and no word such as `user`."""
    if isinstance(value, Mapping | list):
        yield from (
            str(key) for key in value if isinstance(value, Mapping) and len(str(key)) >= MIN_DIGITS
        )
        for below in value.values() if isinstance(value, Mapping) else value:
            yield from _long_keys(below)


def remember(variables: Mapping[str, str]) -> None:
    """Keep the values of these variables out of what this process writes."""
    _names.update(_by_value(variables))


def hidden(value: Any, also: Mapping[str, str] | None = None) -> Any:
    """`value`, a text or nested containers, with `${oc.env:NAME}` in the place of what the variable
    held.

    Of the variables that this process remembers, and of those in `also`.
    """
    names = _names | _by_value(also or {})
    return _replaced(value, names, {}, ()) if names else value


def said(error: BaseException) -> str:
    """The class of an error and the first line of its text, from which secrets are taken before it
    is cut.
    """
    lines = hidden(str(error)).split("\n")
    return ": ".join([type(error).__name__, *[line.strip() for line in lines if line.strip()][:1]])


def hidden_settings(settings: Any, read: Mapping[str, str]) -> Any:
    """The same of a run's settings: what was made of a variable is the interpolation again, be it a
    number.
    """
    found = ((split, json.loads(read[key])) for key in read if (split := _split(key)))
    made = {tuple(key.split(".")): (text, value) for (key, text), value in found}
    names = _names | _by_value(read)
    return _replaced(settings, names, made, ()) if names or made else settings


def _split(key: str) -> tuple[str, str] | None:
    """Of `KEY=INTERPOLATION` both; None for the name of a variable."""
    path, equals, interpolation = key.partition("=")
    return (path, interpolation) if equals else None


def _by_value(variables: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in variables.items():
        text, name = value, key
        if made := _split(key):
            leaf, variable = json.loads(value), _VARIABLE.search(made[1])
            is_long = len(value) >= MIN_DIGITS and not isinstance(leaf, dict | list)
            text = leaf if isinstance(leaf, str) or is_long else ""
            name = variable[1] if variable else key
        if len(text := str(text)) >= MIN_LENGTH:
            # As it stands, and as Python and JSON write it: with a line break or a quote in it
            # these are others.
            found |= dict.fromkeys((text, repr(text)[1:-1], json.dumps(text)[1:-1]), name)
    return found


def _replaced(value: Any, names: Mapping[str, str], made: _Made, path: tuple[str, ...]) -> Any:
    if path in made and made[path][1] == value:
        return made[path][0]
    if isinstance(value, Mapping):
        below = (
            (key, _replaced(item, names, made, _below(path, key))) for key, item in value.items()
        )
        return {
            _replaced(key, names, {}, ()) if isinstance(key, str) else key: item
            for key, item in below
        }
    if isinstance(value, list | tuple):
        return type(value)(
            _replaced(item, names, made, _below(path, index)) for index, item in enumerate(value)
        )
    if isinstance(value, str) and names:
        # The longest first, for one may hold another.
        secret = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        return re.sub(secret, lambda found: f"${{oc.env:{names[found[0]]}}}", value)
    return value


def _below(path: tuple[str, ...], key: object) -> tuple[str, ...]:
    """An own class's arguments lie among `kwargs` in what is written, and beside its name in what
    is composed.
    """
    return path if key == "kwargs" else (*path, str(key))


def restored(value: Any, read: dict[str, str], path: tuple[str, ...] = ()) -> Any:
    """What was hidden, by today's environment; adds to `read`.

    Raises ConfigError for a variable not set.
    """
    if isinstance(value, str):
        if "oc.env:" in value and "${" in _VARIABLE.sub("", value):
            found = _made_again(value, read)
            read[f"{'.'.join(path)}={value}"] = json.dumps(found, default=str)
            return found
        return _PLAIN.sub(lambda found: _variable(found[1], read), value)
    if isinstance(value, Mapping):
        return {key: restored(item, read, _below(path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(
            restored(item, read, _below(path, index)) for index, item in enumerate(value)
        )
    return value


def _made_again(text: str, read: dict[str, str]) -> Any:
    """What the interpolation, or a part of what it gives, is today."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for name in _PLAIN.findall(text):
        _variable(name, read)
    interpolation, below = re.fullmatch(r"(.*?)((?:\[[^][]*\])*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        value = _resolved(OmegaConf.create({"value": interpolation}), "value")
        for part in re.findall(r"\[([^][]*)\]", below):
            value = value[int(part)] if isinstance(value, list) else value[part]
    except (OmegaConfBaseException, LookupError, TypeError, ValueError) as error:
        told = " ".join(first_line(error).split())
        raise ConfigError(
            f"{text}: cannot be made of the environment anew ({told}); type the key again"
        ) from error
    return value


def _variable(name: str, read: dict[str, str]) -> str:
    if name not in os.environ:
        raise ConfigError(
            f"{name}: the run took this variable from the environment, where it is not set now"
        )
    read[name] = os.environ[name]
    return read[name]
