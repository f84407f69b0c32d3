"""Tells Hydra's callbacks, the record and the terminal what happens to a sweep's runs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from hydra.core.utils import env_override
from hydra.types import HydraContext, TaskFunction

from expt.command import hydra_folder
from expt.command.composed_run import ComposedRun
from expt.command.hydra_adapter import is_heard, use_config
from expt.command.sweep_display import SweepDisplay
from expt.config.identity import hyperparameters, shown
from expt.dashboards.hparams import add_failure
from expt.errors import ExptError, FolderInUse, warn
from expt.launch.job import Job, Observer, request_of
from expt.runs.attempt import record_refusal
from expt.runs.result import FAILED, Record


class SweepObserver(Observer):
    """Tells Hydra's callbacks and the terminal of what happens in the pool."""

    def __init__(
        self,
        context: HydraContext,
        task_function: TaskFunction,
        runs: Mapping[Job, Sequence[ComposedRun]],
        display: SweepDisplay,
    ) -> None:
        self._callbacks, self._task_function = context.callbacks, task_function
        self._runs, self._display = runs, display
        self._is_heard = is_heard(self._callbacks)

    def job_waiting(self, job: Job, devices: Sequence[str]) -> None:
        """Say so in the terminal."""
        self._display.waiting(job, devices)

    def job_locked_out(self, job: Job) -> None:
        """Say so in the terminal."""
        self._display.locked_out(job)

    def job_next(self, job: Job) -> None:
        """Make what is to be in the run's folder, 10 ms before anybody waits for it."""
        _ = self._runs[job][0].hydra_files

    def job_starting(self, job: Job) -> None:
        """Make the run's folder Hydra's, and tell Hydra's callbacks."""
        run = self._runs[job][0]
        hydra_folder.write(run.job.paths, run.hydra_files)
        self._display.starting(job)
        if job.retries or not self._is_heard:
            return  # for Hydra, the attempts of a run are one job
        use_config(run.hydra_config)
        with env_override(dict(request_of(job).env)):
            self._callbacks.on_job_start(config=run.hydra_config, task_function=self._task_function)

    def job_retrying(self, job: Job, error: ExptError) -> None:
        """Say so in the terminal."""
        self._display.retrying(job, error)

    def job_ended(self, job: Job) -> None:
        """Record it, and tell Hydra's callbacks and the terminal."""
        run = self._runs[job][0]
        try:
            with contextlib.suppress(FolderInUse):  # who is at work there tells of it
                _record_end(job, run.about)
        except OSError as error:  # a full disk, maybe: the others go on
            warn(f"{job.paths.folder}: {error.strerror}; what became of the run is not recorded")
        if self._is_heard:
            use_config(run.hydra_config)
            run.prepare_return()
            self._callbacks.on_job_end(config=run.hydra_config, job_return=run.finish())
        run.finish()
        run.forget()
        self._display.ended(job)

    def tick(self, active: Sequence[Job]) -> None:
        """Show how far the running ones are."""
        self._display.update(active)


def _record_end(job: Job, about: Record) -> None:
    config = job.request.config if job.request else None
    if (
        job.refused and job.error and not job.paths.attempts()
    ):  # else what it has come to before is kept
        record_refusal(job.paths, about, job.request, job.error)
    if (
        job.status == FAILED and job.paths.result.exists()
    ):  # else, on a full disk, nobody could tell whose it is
        add_failure(
            job.paths.folder, hyperparameters(shown(config) if config else about["overrides"])
        )
