"""How much of a run is done before it begins: by its own checkpoint, or that of another which it
goes on from.
"""

from __future__ import annotations

from pathlib import Path

from expt.errors import ConfigError
from expt.runs import fork, forkable
from expt.runs.request import RunRequest


def steps_done(request: RunRequest, steps_per_epoch: int) -> int:
    """The optimiser steps that need not be taken any more; looks on alone, and warns of nothing."""
    if request.resumes and (done := _newest(request.paths.folder)):
        return done
    source = request.goes_on_from
    if request.config.resume not in (None, "auto"):
        source = Path(str(request.config.resume))
    if source is not None:
        return _newest(source)
    if request.config.fork is None:
        return 0
    try:
        return fork.epochs_before(request.config.fork) * steps_per_epoch
    except ConfigError:  # it is gone, which says who tries to train
        return 0


def _newest(run: Path) -> int:
    """The step of a run's newest checkpoint, or of that file."""
    folder = run.parent.parent if run.is_file() else run
    return max(
        (found.step for found in forkable.all_of(folder) if run in (folder, found.file)), default=0
    )
