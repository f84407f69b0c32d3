"""What a run's folder has said before it goes on: put back where its workers refuse to, before they
train. No torch.
"""

from __future__ import annotations

import shutil

from expt.runs.paths import RunPaths


def keep(paths: RunPaths) -> None:
    """Keep the record and the numbers as they are; those of a try that was killed before it was
    accepted count.
    """
    if paths.before.exists():
        return
    beside = paths.before.with_name(f"{paths.before.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for path in (paths.result, paths.metrics):
        if path.exists():
            shutil.copyfile(path, beside / path.name)
    if paths.checkpoints.exists():
        (beside / paths.checkpoints.name).touch()
    beside.rename(paths.before)


def accept(paths: RunPaths) -> None:
    """Forget it: the run goes on, or begins anew."""
    shutil.rmtree(paths.before, ignore_errors=True)


def put_back(paths: RunPaths) -> bool:
    """Let the folder be what it was before; returns whether that was a run's.

    Nothing is done where none is kept.
    """
    if not paths.before.exists():
        return False
    was_run = (paths.before / paths.result.name).exists()
    for path in (paths.result, paths.metrics):
        kept = paths.before / path.name
        if kept.exists():
            kept.replace(path)
        elif path != paths.result:
            path.unlink(missing_ok=True)
    if not (paths.before / paths.checkpoints.name).exists():
        paths.remove_checkpoints()
    accept(paths)
    return was_run
