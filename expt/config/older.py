"""What an older version has recorded, by the keys of today. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def brought_up_to_date(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A run's recorded settings, with each key that has come since at what was done before there was a choice."""
    settings = dict(recorded)
    scheduler = settings["scheduler"]
    if scheduler["name"] == "_target_":
        settings["scheduler"] = {"interval": "step", **scheduler}
    return settings
