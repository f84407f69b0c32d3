"""The `.hydra` folder of a run: the composed configuration and the words of the command."""

from __future__ import annotations

import contextlib

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from expt.command.sweep_points import ComposedRun
from expt.runs.paths import RunPaths

COMPOSED = "config.yaml"


def leave_no_trace(run_paths: RunPaths) -> None:
    """Remove the folder that Hydra made for a run that cannot start, unless it holds something."""
    with contextlib.suppress(OSError):  # a disk that is read-only now; why it cannot start is still to be told
        if run_paths.result.exists() or run_paths.logs(0).exists():
            return
        own = (*(run_paths.hydra / name for name in (COMPOSED, "hydra.yaml")), run_paths.overrides, run_paths.lock)
        for path in own:
            path.unlink(missing_ok=True)
        for folder in (run_paths.hydra, run_paths.folder):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def renew(run_paths: RunPaths, composed: DictConfig) -> None:
    """Let the folder's .hydra tell what the run is now, when it goes on: Hydra was kept from writing there."""
    words = HydraConfig.get().overrides.task
    run_paths.hydra.mkdir(exist_ok=True)
    OmegaConf.save(
        OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]), run_paths.hydra / COMPOSED
    )
    OmegaConf.save(OmegaConf.create([word for word in words if word != "resume=auto"]), run_paths.overrides)


def save_hydra(run: ComposedRun) -> None:
    """Write `.hydra` into the run's folder, as Hydra does for a single run."""
    paths = run.job.paths
    paths.hydra.mkdir(parents=True, exist_ok=True)
    hydra_only = OmegaConf.masked_copy(run.hydra_config, "hydra")
    for name, content in (
        ("config", run.returned.cfg),
        ("hydra", hydra_only),
        ("overrides", run.hydra_config.hydra.overrides.task),
    ):
        OmegaConf.save(content, paths.hydra / f"{name}.yaml")
