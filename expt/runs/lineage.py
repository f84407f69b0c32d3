"""What a run has of another: that it is the same one and goes on, or that it began with its weights. Free of torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from expt.config.identity import Content, identity
from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.errors import ConfigError
from expt.runs.paths import RunPaths
from expt.runs.result import Record, result_of_any


def record_of_resumed(config: RunConfig) -> Record:
    """What the run says of itself that `config.resume` names; empty for none, and for one without a record."""
    if config.resume in (None, "auto"):
        return {}
    path = Path(str(config.resume))
    return result_of_any(RunPaths(path.parent.parent if path.is_file() else path))


def as_resumed(config: RunConfig, content: Content) -> Content:
    """The content of a run that goes on from another's checkpoint: its first weights are those which that one had."""
    then = record_of_resumed(config)
    if not then.get("content") or not {"config", "identity"} <= then.keys():
        return content
    made = Content(**then["content"])
    content = content._replace(weights=made.weights)
    try:
        before = dataclasses.replace(recorded(then["config"]), resume=None)
    except (ConfigError, KeyError):  # of another version
        return content
    began_itself = identity(before, made) == then["identity"]
    length = {"epochs": config.epochs, "max_steps": config.max_steps, "scheduler": config.scheduler}
    alone = dataclasses.replace(config, resume=None)
    same = identity(dataclasses.replace(before, **length), made) == identity(alone, content)
    return content._replace(continues=began_itself and same)
