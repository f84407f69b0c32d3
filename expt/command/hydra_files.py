"""What a command writes into a run's folder before the run does: `.hydra`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from expt.command.compose import HydraFiles, as_dict
from expt.runs import paths
from expt.runs.paths import RunPaths, is_held
from expt.runs.result import Record


def about_run(name: str, words: Sequence[str]) -> Record:
    """Return the fields of result.json that say what the run is called, and what asks for it."""
    settings = [word for word in words if word != "resume=auto"]
    return {"name": name, "overrides": as_dict(settings), "arguments": list(words)}


def write_hydra_files(paths: RunPaths, files: HydraFiles) -> None:
    """Write `.hydra` of a run."""
    paths.hydra.mkdir(parents=True, exist_ok=True)
    for path, text in zip(_three(paths), files, strict=True):
        path.write_text(text, encoding="utf-8")


def _three(paths: RunPaths) -> tuple[Path, Path, Path]:
    return paths.hydra / "config.yaml", paths.hydra_settings, paths.overrides


def remove_unused(run_paths: RunPaths) -> None:
    """Remove the folder of a run that did not begin, unless it holds something."""
    unused = {run_paths.hydra, run_paths.lock, run_paths.code}
    with contextlib.suppress(OSError):  # a disk that is read-only now
        folder = run_paths.folder
        if folder.is_dir() and {*folder.iterdir()} <= unused and not is_held(run_paths):
            for path in _three(run_paths):
                path.unlink(missing_ok=True)
            if run_paths.hydra.is_dir():
                run_paths.hydra.rmdir()
            for path in (*run_paths.code.glob("*"), run_paths.lock):
                path.unlink(missing_ok=True)
            if run_paths.code.is_dir():
                run_paths.code.rmdir()
            paths.remove_empty(folder)
