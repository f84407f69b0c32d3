"""Groups whose members lie above the configuration, which expt/__init__ says how to find."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

Groups = Mapping[str, dict[str, Any]]
_finders = list[Callable[[], Groups]]()


def register(find: Callable[[], Groups]) -> None:
    """Let `find`, called once and late, return groups: their classes by the names to choose."""
    _finders.append(find)


@functools.cache
def groups() -> Groups:
    """Return the registered groups by their names in conf/."""
    return {name: members for find in _finders for name, members in find().items()}
