"""Runs that Hydra itself asks for: by other sweepers and launchers, and with its callbacks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from expt import machine
from expt.command import compose, hydra_part, terminal
from expt.command.compose import Composer
from expt.command.run import Command, train
from expt.command.sweep import Sweep, SweepObserver
from expt.config.parse import parse
from expt.errors import Interrupted
from expt.launch.job import Job
from expt.launch.launcher import launcher
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, PRUNED, objective_value, read_result


class HydraTask:
    """The task that Hydra calls for each run; a launcher in another process gets a copy."""

    def __init__(self, command: Command, composer: Composer, swept: Sequence[str]) -> None:
        """Take the keys that have several values, too."""
        self._command: Command | None = command
        self._composer, self._swept = composer, swept
        self._sweep: Sweep | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of this process."""
        return {"_command": None}

    def __call__(self, composed: DictConfig) -> float | None:
        """Train one run, in the folder that Hydra has made for it; returns its objective."""
        hydra, this = hydra_part.hydra_now(), self._command
        sweep = getattr(hydra.mode, "name", None) == "MULTIRUN"
        if this is None:
            this = Command(launcher(), time.monotonic(), terminal.console(quiet=False))
        elif sweep:
            this.outcome.sweep_folder = Path(str(hydra.sweep.dir))
        settings = compose.settings_of(composed, sweep=sweep)
        config, paths = parse(settings, machine.detect()), RunPaths(Path(hydra.runtime.output_dir))
        env = {str(key): str(value) for key, value in hydra.job.env_set.items()}
        try:
            words = hydra_part.typed_in(hydra)
            return train(this, words, config, paths, settings=settings, env=env)
        except Interrupted as error:
            if not sweep:
                raise
            # Hydra's own launchers take any other exception for a failure, and start the next run.
            raise KeyboardInterrupt(str(error)) from None

    def launch(
        self,
        config: DictConfig,
        batch: Sequence[Sequence[str]],
        first: int,
        callbacks: Any,
        returned: Callable[[Sequence[str], float | None], Any],
    ) -> list[Any]:
        """Train a batch of runs by the pool, and call Hydra's `callbacks` for each.

        Return the JobReturn that `returned` makes of a run's words and objective, nan for a failed
        run.
        """
        task = self
        assert self._command is not None
        if self._sweep is None:
            self._sweep = Sweep(self._command, config, self._composer)

        class Heard(SweepObserver):
            def job_starting(self, job: Job) -> None:
                super().job_starting(job)
                if not job.retries:  # once for all attempts of a run
                    config = self.runs[job][0].configuration()
                    callbacks.on_job_start(config=config, task_function=task)

            def job_ended(self, job: Job) -> None:
                super().job_ended(job)
                run = self.runs[job][0]
                job_return = returned(run.words, _value(job))
                job_return.cfg = run.configuration()
                callbacks.on_job_end(config=job_return.cfg, job_return=job_return)

        own = [[word for word in words if not word.startswith("hydra.")] for words in batch]
        heard = Heard(self._command.console, total=len(batch), folder=self._sweep.folder)
        folder = self._sweep.open()
        runs = [folder.run(words, number, self._swept) for number, words in enumerate(own, first)]
        with self._sweep.running(heard) as runner:
            runner.run(self._sweep.jobs(runs, heard))
        return [returned(words, _value(run.job)) for words, run in zip(batch, runs, strict=True)]


def _value(job: Job) -> float | None:
    if job.status not in (COMPLETED, PRUNED):
        return math.nan
    record: Any = {"objective": job.objective} if job.objective else read_result(job.paths)
    return objective_value(record)
