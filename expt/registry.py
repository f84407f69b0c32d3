"""Parts that lie above the configuration, in a catalogue which expt/__init__ says how to find."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

Groups = Mapping[str, dict[str, Any]]
find: Callable[[], Any] = lambda: None
"""Return the catalogue, which has `groups` and `trackers`; expt/__init__ sets this."""


@functools.cache
def groups() -> Groups:
    """Return the registered groups: their classes by the names to choose."""
    found: Groups = find().groups()
    return found


@functools.cache
def trackers() -> Mapping[str, Any]:
    """Return the settings of the registered trackers by their names."""
    found: Mapping[str, Any] = find().trackers()
    return found
