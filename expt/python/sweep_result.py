"""What a sweep has come to: its runs in the order of the grid, those that have failed too."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from expt.errors import RunFailed, SweepFailed
from expt.python.result import Metrics, Result, Runs
from expt.runs.result import COMPLETED, FAILED, PAUSED, FoundRecord
from expt.runs.sweep import by_objective
from expt.runs.view.leaderboard import leaderboard
from expt.runs.worker_error import in_one_line

WIDTH = 110
"""Of a leaderboard as a text [characters]."""


@dataclass(frozen=True, repr=False)
class FailedResult(Result):
    """A run of a sweep that has failed: it has a folder, a record and an error, and no numbers that
    could be meant.
    """

    reason: str = ""

    @property
    def status(self) -> str:
        """`failed`, even where the record could not say so."""
        return FAILED

    @property
    def error(self) -> str:
        """Why."""
        return self.reason

    @property
    def metrics(self) -> Metrics:
        """Raises RunFailed. What the run had measured until then is in `history`."""
        raise RunFailed(
            f"{self.folder.name} failed, and has no metrics: {in_one_line(self.reason)}"
        )

    @property
    def objective(self) -> None:
        """None."""
        return

    def __repr__(self) -> str:
        return (
            f"expt.Result failed\n  folder   {self.folder}\n  error    {in_one_line(self.reason)}"
        )


class SweepResult(Runs):
    """The runs of a sweep, in the order of its grid; those that have failed raise where their
    metrics are asked for.
    """

    @classmethod
    def of(cls, folders: Iterable[Path]) -> SweepResult:
        """Of runs of which none has failed."""
        return cls(map(Result.of, folders))

    @classmethod
    def of_failed(cls, error: SweepFailed) -> SweepResult:
        """Of a sweep in which runs have failed."""
        return cls(
            (
                FailedResult(folder, Result.of(folder).record, error.failed[folder])
                if folder in error.failed
                else Result.of(folder)
            )
            for folder in error.runs
        )

    @property
    def completed(self) -> Runs:
        """Those that have completed."""
        return Runs(result for result in self if result.status == COMPLETED)

    @property
    def paused(self) -> Runs:
        """Those that a search has stopped early, for now: they can go on."""
        return Runs(result for result in self if result.status == PAUSED)

    @property
    def failed(self) -> Runs:
        """Those that have failed; `error` says why."""
        return Runs(result for result in self if isinstance(result, FailedResult))

    @property
    def best(self) -> Result:
        """The completed run whose objective is best; of a search by its first goal, of those that
        keep its constraints.

        Raises RunFailed where there is none.
        """
        if (searched := self._best_of_search()) is not None:
            return searched
        ranked = by_objective(
            (run, run.record) for run in self.completed if run.objective is not None
        )
        if not ranked:
            raise RunFailed("no run of the sweep has completed and measured its objective")
        if len(names := {run.record["objective"]["name"] for run in ranked}) > 1:
            raise RunFailed(
                f"the runs were chosen by {' and '.join(sorted(names))}: none is best by all"
            )
        return ranked[0]

    def _best_of_search(self) -> Result | None:
        """None where the runs are not those of one search."""
        if len({run.folder.parent for run in self}) != 1 or not any(
            "search" in run.record for run in self
        ):
            return None
        from expt.search.conclusion import search_in  # late: a grid has no need of it

        found = self._found()
        search = search_in(self[0].folder.parent, found)
        best = search.best(found) if search else None
        if search is not None and best is None:
            raise RunFailed(
                "no run of the search has completed, measured its objectives and kept its"
                " constraints"
            )
        return next(
            (run for run in self if best is not None and run.folder == best["folder"]), None
        )

    def _found(self) -> list[FoundRecord]:
        return [
            {
                **run.record,
                "folder": run.folder,
                "status": run.status,
                **({"error": run.error} if run.error else {}),
            }
            for run in self
        ]

    def __repr__(self) -> str:
        if not self:
            return "expt.SweepResult of no runs"
        text = io.StringIO()
        Console(file=text, width=WIDTH, force_jupyter=False).print(leaderboard(self._found()))
        told = f", {len(self.paused)} paused" if self.paused else ""
        told += f", {len(self.failed)} failed" if self.failed else ""
        failures = [f"{run.folder.name}: {in_one_line(run.error or '')}" for run in self.failed]
        return "\n".join(
            [f"expt.SweepResult of {len(self)} runs{told}", text.getvalue().rstrip(), *failures]
        )

    def _repr_html_(self) -> str:
        from expt.runs.view import html  # late: for a notebook alone

        return html.of_sweep(self._found())
