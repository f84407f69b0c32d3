"""What a run has of another: that it is the same one and goes on, or that it began with its
weights. Free of torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from expt.config.identity import Content, identity
from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.errors import ConfigError
from expt.runs import fork
from expt.runs.paths import RunPaths
from expt.runs.result import Record, result_of_any


def record_of_resumed(config: RunConfig, shorter: Path | None = None) -> Record:
    """What the run says of itself that `config.resume` names, or that of `shorter`; empty where
    there is none.
    """
    if shorter is not None:
        return result_of_any(RunPaths(shorter))
    if config.resume in (None, "auto"):
        return {}
    path = Path(str(config.resume))
    return result_of_any(RunPaths(path.parent.parent if path.is_file() else path))


def as_resumed(config: RunConfig, content: Content) -> Content:
    """The content of a run that goes on from another's checkpoint: its first weights are those
    which that one had.
    """
    then = record_of_resumed(config)
    if not then.get("content") or not {"config", "identity"} <= then.keys():
        return content
    made = Content(**then["content"])
    content = content._replace(
        weights=made.weights, fork=made.fork, seedless_fork=made.seedless_fork
    )
    try:
        before = dataclasses.replace(recorded(then["config"]), resume=None)
    except (ConfigError, KeyError):  # of another version
        return content
    began_itself = identity(before, made) == then["identity"]
    length = {"epochs": config.epochs, "max_steps": config.max_steps, "scheduler": config.scheduler}
    alone = dataclasses.replace(config, resume=None)
    same = identity(dataclasses.replace(before, **length), made) == identity(alone, content)
    return content._replace(continues=began_itself and same)


def as_forked(config: RunConfig, content: Content, known: Content | None = None) -> Content:
    """The content of a run that is a fork of another's checkpoint: of that in `known`, else of what
    is there.

    Raises ConfigError where nothing is.
    """
    if (
        config.fork is None or content.fork is not None
    ):  # of a run that is resumed the checkpoint says it
        return content
    if known is not None:
        return content._replace(fork=known.fork, seedless_fork=known.seedless_fork)
    try:
        which, seedless = fork.identified(config.fork)
    except ConfigError:
        if config.resume is not None:  # its own checkpoint has what came of it
            return content
        raise
    return content._replace(fork=which, seedless_fork=seedless)
