"""What became of a command's runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from expt.errors import ExptError, SweepFailed
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, FAILED, PAUSED

if TYPE_CHECKING:
    from expt.launch.job import Job


@dataclass
class Outcome:
    """The runs of one command, by what became of them."""

    completed: list[RunPaths] = field(default_factory=list)
    paused: list[RunPaths] = field(default_factory=list)
    failed: list[RunPaths] = field(default_factory=list)
    num_unfinished: int = 0
    """Interrupted, or never started."""
    errors: dict[Path, ExptError] = field(default_factory=dict)
    """Of each run of a sweep that has failed, by its folder."""
    in_order: list[RunPaths] = field(default_factory=list)
    """The completed, the paused and the failed, in the order of the grid."""
    notes: list[str] = field(default_factory=list)
    """Lines to print at the end."""
    sweep_folder: Path | None = None
    """Of a sweep that has begun."""

    def add(self, run_paths: RunPaths, status: str, error: ExptError | None = None) -> None:
        """Take in a run of this status, which `error` has ended."""
        if run_paths in self.paused:  # by an earlier command, and has continued
            self.paused.remove(run_paths)
            self.in_order.remove(run_paths)
        if status == FAILED and error is not None:
            self.errors[run_paths.folder] = error
        ended = {COMPLETED: self.completed, PAUSED: self.paused, FAILED: self.failed}
        if status in ended:
            self.in_order.append(run_paths)
            ended[status].append(run_paths)
        else:
            self.num_unfinished += 1

    def add_jobs(self, jobs: Collection[Job], spared: tuple[type[ExptError], ...] = ()) -> None:
        """Take in what became of a sweep's runs.

        An error that is `spared` is no failure where any run has come to something.
        """
        has_any = bool(self.completed or self.paused) or any(
            job.status in (COMPLETED, PAUSED) for job in jobs
        )
        for job in jobs:
            if not (has_any and isinstance(job.error, spared)):
                self.add(job.paths, job.status, job.error)

    def raise_if_failed(self) -> None:
        """Raise SweepFailed where a run of the sweep has failed."""
        if not self.failed:
            return
        left = self.num_unfinished
        rest = f", {left} were stopped or not started" if left else ""
        why = {
            paths.folder.absolute(): str(self.errors.get(paths.folder, "it failed"))
            for paths in self.failed
        }
        completed, runs = (
            [paths.folder.absolute() for paths in several]
            for several in (self.completed, self.in_order)
        )
        total = len(self.in_order) + left
        raise SweepFailed(f"{len(self.failed)} of {total} runs failed{rest}", completed, why, runs)
