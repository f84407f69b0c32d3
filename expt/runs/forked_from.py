"""What result.json says of the checkpoint that a run is a fork of."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict


class Forked(TypedDict):
    """Whose checkpoint it was, and what the fork has changed."""

    given: str
    """The value of `fork`."""
    run: str
    """The folder of that run."""
    identity: str
    seedless_identity: str
    step: int
    epoch: int
    """Whole epochs that it had done."""
    arguments: list[str]
    """The words that ask for that run: those of the fork are what was typed beside them."""
    changed: dict[str, list[Any]]
    """The settings that are others: of each what it was, and what it is."""
