"""What all runs of a search must have alike, and which parameters change it: by their names, or in
an own YAML.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

from expt.search.space import Space

Changes: TypeAlias = Mapping[str, Collection[str]]
"""By the name of a parameter the settings that are others where it has another value."""
LENGTH = {"epochs", "max_steps"}


def keys_changed(name: str, changes: Changes) -> list[str]:
    """The settings that the parameter changes: its own first, though no point with it may have
    settings.
    """
    return [
        name if "." in name or name in LENGTH else f"{name}.name",
        *sorted(changes.get(name, ())),
    ]


def changes_length(space: Space, changes: Changes) -> str | None:
    """What to say of runs of other lengths, of whose axis the name does not tell it; None where
    there are none.
    """
    names = [each.name for each in space.parameters if LENGTH & {*keys_changed(each.name, changes)}]
    if not names:
        return None
    return "" if LENGTH & {*names} else f", which {names[0]} changes"
