"""The `.hydra` folder of a run: the composed configuration and the words of the command."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from expt.command.libyaml import as_yaml
from expt.command.overrides import typed_in
from expt.runs.folder_lock import is_held
from expt.runs.paths import RunPaths, remove_empty

SETTINGS = "config.yaml"


def leave_no_trace(run_paths: RunPaths) -> None:
    """Remove the folder that Hydra made for a run that cannot start, unless it holds something.

    Where the run was to resume, Hydra has written nothing, and what is there is of before.
    """
    with contextlib.suppress(
        OSError
    ):  # a disk that is read-only now; why it cannot start is still to be told
        resumes = HydraConfig.initialized() and HydraConfig.get().output_subdir is None
        if resumes or run_paths.result.exists() or run_paths.attempts() or run_paths.has_trained():
            return
        if not is_held(run_paths):
            _remove(run_paths)


def leave_no_trace_of_a_point(run_paths: RunPaths) -> None:
    """Remove the folder of a sweep's run that was stopped before it could begin, unless it holds
    something.
    """
    with contextlib.suppress(OSError):  # as above
        unused = {run_paths.hydra, run_paths.lock, run_paths.code}
        if (
            run_paths.folder.is_dir()
            and {*run_paths.folder.iterdir()} <= unused
            and not is_held(run_paths)
        ):
            shutil.rmtree(run_paths.code, ignore_errors=True)
            _remove(run_paths)


def _remove(run_paths: RunPaths) -> None:
    own = (
        run_paths.hydra / SETTINGS,
        run_paths.hydra_settings,
        run_paths.overrides,
        run_paths.lock,
    )
    for path in own:
        path.unlink(missing_ok=True)
    if run_paths.hydra.is_dir() and not any(run_paths.hydra.iterdir()):
        run_paths.hydra.rmdir()
    remove_empty(run_paths.folder)


def save(run_paths: RunPaths, settings: object, words: Sequence[str], hydra: object = None) -> None:
    """Write what Hydra writes for a single run; its own settings stay what they were where none are
    given.
    """
    write(run_paths, files(run_paths, settings, words, hydra))


def files(
    run_paths: RunPaths, settings: object, words: Sequence[str], hydra: object = None
) -> dict[Path, str]:
    """What `save` writes."""
    written = {
        run_paths.hydra / SETTINGS: settings,
        run_paths.overrides: OmegaConf.create(list(words)),
    }
    if hydra is not None:
        written[run_paths.hydra_settings] = hydra
    return {path: as_yaml(config) for path, config in written.items()}


def write(run_paths: RunPaths, texts: Mapping[Path, str]) -> None:
    """Write the `files`."""
    run_paths.hydra.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


def renew(run_paths: RunPaths, settings: DictConfig) -> None:
    """Let the folder's .hydra tell what the run is now, when it goes on: Hydra was kept from
    writing there.
    """
    save(
        run_paths, settings, [word for word in typed_in(HydraConfig.get()) if word != "resume=auto"]
    )
