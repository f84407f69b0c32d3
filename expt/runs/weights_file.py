"""Where a run's first weights come from, by the key `weights`: a file, and what is known of the run
that wrote it.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, cast

from expt.errors import ConfigError, warn
from expt.runs import provenance
from expt.runs.paths import RunPaths, is_sweep
from expt.runs.result import (
    RUNNING,
    Begun,
    Record,
    read_result,
    result_of_any,
    results,
    results_below,
)
from expt.runs.sweep import by_objective

Which: TypeAlias = Literal["best", "last"]
WHICH = ("best", "last")


class Chosen(NamedTuple):
    """What `weights` names."""

    file: Path
    run: Path | None
    """The folder of the run that wrote it; None for a file of another program's."""
    which: str | None
    """Of its checkpoints: best or last, or of an older one its name."""


def weights_file(given: str) -> Path:
    """The file that `weights` names, see `chosen`."""
    return chosen(given).file


def chosen(given: str) -> Chosen:
    """A file, or of a run's folder the best checkpoint, or else the last; `FOLDER@last` is the last
    in any case.

    Raises ConfigError for what is none of these.
    """
    path, which = Path(given), ""
    if not path.exists() and "@" in given:
        folder, _, which = given.rpartition("@")
        path = Path(folder)
        if path.exists() and (which not in WHICH or path.is_file()):
            mend = "give the file alone" if path.is_file() else "use @best or @last"
            raise ConfigError(
                f"weights={given}: {path} is there, and @{which} names none of its checkpoints;"
                f" {mend}"
            )
    if path.is_file():
        run = path.parent.parent if RunPaths(path.parent.parent).result.exists() else None
        return Chosen(path, run, path.stem if run else None)
    if is_sweep(path):
        raise ConfigError(f"weights={given}: {best_of_sweep(path, which)}")
    paths = RunPaths(path)
    for name in (which,) if which else WHICH:
        if paths.checkpoint(name).is_file():
            return Chosen(paths.checkpoint(name), path, name)
    what = (
        f"has no {which or ''} checkpoint".replace("  ", " ")
        if path.is_dir()
        else "there is no such file or folder"
    )
    raise ConfigError(
        f"weights={given}: {what}; give a run's folder, a checkpoint, or a file of weights"
    )


def best_of_sweep(folder: Path, which: str, *, key: str = "weights") -> str:
    """What to say of a sweep's folder, given for `key`: which of its runs is the best, for one must
    be named.
    """
    found = [(paths.folder, record) for paths, record in results(folder) if paths.best.is_file()]
    ranked = by_objective(found)
    if not ranked:
        return "is a sweep, and no run of it has weights yet; name a run"
    best, name = ranked[0], dict(found)[ranked[0]]["objective"]["name"]
    again = f"'{key}=\"{best}{f'@{which}' if which else ''}\"'"
    return (
        f"is a sweep of {len(found)} runs with weights; name one, as in {again}, its best by {name}"
    )


def begun_from(given: str, checksum: str | None) -> Begun:
    """What result.json says of the weights `given`; of a file that a resumed run has no need of,
    its name.

    It warns where the run that writes them is still under way: what is loaded is of now.
    """
    try:
        file, run, which = chosen(given)
    except ConfigError:
        return {"file": given, "identity": None}
    begun: Begun = {"file": str(file), "identity": None, "checksum": checksum}
    if run is None:
        return begun
    record = result_of_any(RunPaths(run))
    if record.get("status") == RUNNING:
        warn(
            f"weights={given}: the run of {run} is still under way; what is loaded is what it has"
            " come to now"
        )
    return {
        **begun,
        "identity": read_result(RunPaths(run)).get("identity"),
        "run": str(run.resolve()),
        "which": which,
    }


def run_and_which(given: str | Path, which: str | None = None) -> tuple[Path, Which]:
    """The folder of a run, given as `RUN`, `RUN@best` or `RUN@last`, and which of its checkpoints
    is meant: the best.

    Raises ConfigError for another word after the @, and where `which` names the other checkpoint.
    """
    folder, at, named = str(given).rpartition("@")
    if not at or Path(given).exists() or not Path(folder).exists():
        return Path(given), cast("Which", which or "best")
    if named not in WHICH:
        raise ConfigError(
            f"{given}: @{named} names no checkpoint that is loaded; use @best or @last"
        )
    if which not in (None, named):
        raise ConfigError(f"{given}: which={which} is another checkpoint; leave one of them out")
    return Path(folder), cast("Which", named)


def found(run: str | Path, which: str = "best") -> tuple[Record, Path]:
    """What result.json of the run in the folder `run` says, and the file of its best or last
    checkpoint.

    Raises ConfigError for a folder that is that of no run which has begun to train, or without that
    checkpoint."""
    paths = RunPaths(Path(run))
    record = read_result(paths)
    if "data" not in record:
        raise ConfigError(_no_run(Path(run)))
    if which not in WHICH:
        raise ConfigError(f"which={which}: use best or last")
    file = paths.checkpoint(which)
    if not file.is_file():
        there = [name for name in WHICH if paths.checkpoint(name).is_file()]
        mend = f"use which={there[0]}" if there else "it has no checkpoint"
        raise ConfigError(f"{file}: there is no such file; {mend}")
    return record, file


def _no_run(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: there is no such folder; give that of a run that has begun to train"
    below = (
        [paths.folder for paths, record in results_below(folder) if "data" in record]
        if folder.is_dir()
        else []
    )
    if below and below != [folder]:
        example = shlex.join([*provenance.program().split(), "report", str(folder)])
        return (
            f"{folder}: holds {len(below)} runs; name one of them, as {below[0]} ({example} lists"
            " them)"
        )
    return f"{folder}: is no folder of a run that has begun to train; give that of one"
