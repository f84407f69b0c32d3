"""Where a run's first weights come from, by the key `weights`: a file, and what is known of the run that wrote it."""

from __future__ import annotations

import shlex
from pathlib import Path

from expt.errors import ConfigError
from expt.runs import provenance
from expt.runs.paths import RunPaths
from expt.runs.result import Begun, Record, read_result, results_below


def found(run: str | Path, which: str = "best") -> tuple[Record, Path]:
    """What result.json of the run in the folder `run` says, and the file of its best or last checkpoint.

    Raises ConfigError for a folder that is that of no run which has begun to train, or without that checkpoint.
    """
    paths = RunPaths(Path(run))
    record = read_result(paths)
    if "data" not in record:
        raise ConfigError(_no_run(Path(run)))
    file = {"best": paths.best, "last": paths.last}.get(which)
    if file is None:
        raise ConfigError(f"which={which}: use best or last")
    if not file.is_file():
        there = [name for name, path in (("best", paths.best), ("last", paths.last)) if path.is_file()]
        mend = f"use which={there[0]}" if there else "it has no checkpoint"
        raise ConfigError(f"{file}: there is no such file; {mend}")
    return record, file


def _no_run(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: there is no such folder, and so it is no folder of a run that has begun to train"
    below = [paths.folder for paths, record in results_below(folder) if "data" in record] if folder.is_dir() else []
    if below and below != [folder]:
        example = shlex.join([*provenance.program().split(), "report", str(folder)])
        return f"{folder}: holds {len(below)} runs; name one of them, as {below[0]} ({example} lists them)"
    return f"{folder}: is no folder of a run that has begun to train; give that of one"


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
