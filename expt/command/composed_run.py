"""A point of a sweep as a run: the job that the pool runs, and what Hydra is told of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, open_dict, read_write

from expt.command import hydra_folder
from expt.command.hydra_adapter import fail, parted, use_config
from expt.errors import ExptError
from expt.launch.job import Job
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, PAUSED, Record, objective_of, read_result


class ComposedRun:
    """One point of the grid: the job that the pool runs, and for that time Hydra's configuration of
    it.

    The whole configuration takes 300 kB, and most points of a large grid wait, or have ended.
    """

    def __init__(
        self,
        number: int,
        overrides: Sequence[str],
        job: Job,
        compose: Callable[[], DictConfig],
        about: Record,
    ) -> None:
        self.number, self.overrides, self.job = number, list(overrides), job
        self.about = about
        """What the run is called, and how it was asked for."""
        self._compose = compose
        self.returned = JobReturn(overrides=self.overrides, working_dir=str(Path.cwd()))

    @functools.cached_property
    def hydra_config(self) -> DictConfig:
        """Hydra's configuration of it, composed when it is first asked for."""
        composed = numbered(self._compose(), self.number)
        set_folder(composed, self.job.paths)
        return composed

    def prepare_return(self) -> JobReturn:
        """What Hydra's callbacks get to know, but for what the run has come to."""
        self.returned.status = JobStatus.UNKNOWN  # also of what has paused, and goes on
        if self.returned.cfg is None:
            composed = self.hydra_config
            self.returned.cfg, self.returned.hydra_cfg = parted(composed)
            self.returned.task_name = composed.hydra.job.name
        return self.returned

    @functools.cached_property
    def hydra_files(self) -> Mapping[Path, str]:
        """What Hydra writes into the run's folder."""
        returned = self.prepare_return()
        return hydra_folder.files(
            self.job.paths, returned.cfg, returned.overrides or (), returned.hydra_cfg
        )

    def finish(self) -> JobReturn:
        """What Hydra's sweepers and callbacks get to know."""
        job, returned = self.job, self.returned
        if returned.status != JobStatus.UNKNOWN:
            return returned
        if job.status in (COMPLETED, PAUSED):
            returned.status = JobStatus.COMPLETED
            known: Record = (
                {"objective": job.objective} if job.objective else read_result(job.paths)
            )
            returned.return_value = objective_of(known)
        else:
            returned = self.returned = fail(returned, job.error or ExptError("was not started"))
        return returned

    def forget(self) -> None:
        """Keep what sweepers ask for alone, since callbacks know of the end now."""
        for prepared in ("hydra_config", "hydra_files"):
            self.__dict__.pop(prepared, None)
        self.returned.cfg = self.returned.hydra_cfg = None


def numbered(composed: DictConfig, number: int) -> DictConfig:
    """The configuration, as of the job of that number."""
    with open_dict(composed):
        composed.hydra.job.id = composed.hydra.job.num = number
    return composed


def set_folder(composed: DictConfig, paths: RunPaths) -> None:
    """Let the run be in its folder."""
    with read_write(composed.hydra), open_dict(composed.hydra):
        composed.hydra.runtime.output_dir = str(paths.folder.absolute())
        composed.hydra.sweep.subdir = paths.folder.name


def env_of(composed: DictConfig, paths: RunPaths) -> dict[str, str]:
    """What the run's workers find in their environment, by `hydra.job.env_set`."""
    set_folder(composed, paths)
    if composed.hydra.job.env_set:
        use_config(composed)  # an interpolation there may ask for it
    return {str(key): str(value) for key, value in composed.hydra.job.env_set.items()}
