"""Where a run's first weights come from, by the key `weights`: a file, and what is known of the run that wrote it."""

from __future__ import annotations

from pathlib import Path

from expt.errors import ConfigError
from expt.runs.paths import RunPaths
from expt.runs.result import Begun, Record, read_result


def found(run: str | Path, which: str) -> tuple[Record, Path]:
    """The record of a run that has begun to train, and its best or last checkpoint. Raises ConfigError for neither."""
    paths = RunPaths(Path(run))
    record = read_result(paths)
    if "data" not in record:
        what = "is no folder of a run that has begun to train" if paths.folder.exists() else "there is no such folder"
        raise ConfigError(f"{run}: {what}; give that of one")
    if which not in ("best", "last"):
        raise ConfigError(f"which={which}: use best or last")
    file = paths.checkpoint(which)
    if not file.is_file():
        there = [name for name in ("best", "last") if paths.checkpoint(name).is_file()]
        mend = f"use which={there[0]}" if there else "it has no checkpoint"
        raise ConfigError(f"{file}: there is no such file; {mend}")
    return record, file


def weights_file(given: str) -> Path:
    """The file `given`, or of a run's folder the best checkpoint, or else the last. Raises ConfigError for neither."""
    path = Path(given)
    if path.is_file():
        return path
    paths = RunPaths(path)
    found = next((file for file in (paths.best, paths.last) if file.is_file()), None)
    if found is None:
        what = "has no checkpoint" if path.is_dir() else "there is no such file or folder"
        raise ConfigError(f"weights={given}: {what}; give a run's folder, a checkpoint, or a file of weights")
    return found


def begun_from(given: str) -> Begun:
    """What result.json says of the weights `given`; of a file that a resumed run has no need of, its name."""
    try:
        file = weights_file(given)
    except ConfigError:
        return {"file": given, "identity": None}
    return {"file": str(file), "identity": read_result(RunPaths(file.parent.parent)).get("identity")}
