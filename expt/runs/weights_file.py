"""Where a run's first weights come from, by the key `weights`: a file, and what is known of the run that wrote it."""

from __future__ import annotations

from pathlib import Path

from expt.errors import ConfigError
from expt.runs.paths import RunPaths
from expt.runs.result import Begun, read_result


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
