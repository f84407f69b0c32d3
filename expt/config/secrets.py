"""What `${oc.env:NAME}` stands for is not written to disk: a secret may be among it. Free of torch."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from expt.errors import ConfigError

MIN_LENGTH = 4
"""A shorter value would be found in too many texts that have nothing to do with it."""

_names: dict[str, str] = {}
"""From a value to the variable that held it. One for the whole process, because texts are written from everywhere, by
excepthooks and by what prints a traceback too: a set of secrets that is passed along would miss one of them."""


@contextlib.contextmanager
def environment_read() -> Iterator[dict[str, str]]:
    """Collects, by name, the variables that interpolations read meanwhile, and keeps them out of what is written."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    read: dict[str, str] = {}

    def env(key: str, *default: Any) -> Any:
        if key in os.environ:
            read[key] = os.environ[key]
        return oc.env(key, *default)

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        yield read
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        remember(read)


def remember(variables: Mapping[str, str]) -> None:
    """Keep the values of these variables out of what this process writes."""
    _names.update(_by_value(variables))


def hidden(value: Any, also: Mapping[str, str] | None = None) -> Any:
    """`value`, a text or nested containers, with `${oc.env:NAME}` in the place of what the variable held.

    Of the variables that this process remembers, and of those in `also`.
    """
    names = _names | _by_value(also or {})
    return _replaced(value, names) if names else value


def _by_value(variables: Mapping[str, str]) -> dict[str, str]:
    return {value: name for name, value in variables.items() if len(value) >= MIN_LENGTH}


def _replaced(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        # The longest first, for one may hold another.
        secret = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        return re.sub(secret, lambda found: f"${{oc.env:{names[found[0]]}}}", value)
    if isinstance(value, Mapping):
        return {key: _replaced(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, names) for item in value)
    return value


def restored(value: Any, read: dict[str, str]) -> Any:
    """What `hidden` was given, by today's environment; adds to `read`. Raises ConfigError for a variable not set."""
    if isinstance(value, str):
        return re.sub(r"\$\{oc\.env:(\w+)\}", lambda found: _variable(found[1], read), value)
    if isinstance(value, Mapping):
        return {key: restored(item, read) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(restored(item, read) for item in value)
    return value


def _variable(name: str, read: dict[str, str]) -> str:
    if name not in os.environ:
        raise ConfigError(f"{name}: the run took this variable from the environment, where it is not set now")
    read[name] = os.environ[name]
    return read[name]
