"""Parts that lie above the configuration, in a catalogue which expt/__init__ says how to find."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

Groups = Mapping[str, dict[str, Any]]
_finders = list[Callable[[], Any]]()


def register(find: Callable[[], Any]) -> None:
    """Let `find`, called late, return a catalogue, which has `groups` and `trackers`."""
    _finders.append(find)


@functools.cache
def groups() -> Groups:
    """Return the registered groups: their classes by the names to choose."""
    return {name: members for find in _finders for name, members in find().groups().items()}


@functools.cache
def trackers() -> Mapping[str, Any]:
    """Return the settings of the registered trackers by their names."""
    return {name: cls for find in _finders for name, cls in find().trackers().items()}
