"""What a command composes: each choice of groups once for all tests, as in a sweep."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from expt.command.compose import Composer, Where


def composed(*overrides: str, conf: Path | None = None) -> dict[str, Any]:
    """Return the settings of `python -m expt OVERRIDES`, where the user has a folder `conf`."""
    return copy.deepcopy(composer(conf).settings(overrides, sweep=False))


@functools.cache
def composer(conf: Path | None = None) -> Composer:
    """Return the composer of a folder of custom YAML."""
    return Composer(Where(own=(str(conf),) if conf else ()))
