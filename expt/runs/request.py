"""A run that is to be carried out: what, where, for whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from expt.config.schema import RunConfig
from expt.runs.paths import RunPaths


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run that a person has asked for."""

    config: RunConfig
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What `config` was parsed from; another machine parses it anew."""
    paths: RunPaths
    started: float
    """When it was typed [seconds since the epoch]."""
    about: Mapping[str, Any]
    """For result.json: the run's name, identity and overrides."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More variables for its workers."""
    begun: bool = False
    """Whether it may have been under way before, in a job that was started again; then it goes on."""
    on_start: Callable[[], None] | None = None
    """Called once, when the run has been accepted and begins."""

    def next_attempt(self) -> int:
        """The number of the attempt, 0 where it is the first."""
        if self.begun or self.config.resume == "auto":
            return max(self.paths.next_attempt(), int(self.begun))
        return 0
