"""Results of runs, for a notebook or a script."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expt.config.kinds import metrics_of
from expt.errors import RunFailed, SweepFailed, decimals, did_you_mean
from expt.runs.failure import in_one_line
from expt.runs.found import FoundRun, in_newest, results
from expt.runs.paths import RunPaths, is_sweep
from expt.runs.result import COMPLETED, FAILED, PRUNED, Best, Record, objective_value, read_result
from expt.runs.view.curves import History, figure, in_html
from expt.runs.view.leaderboard import leaderboard, spread
from expt.runs.view.settings import Row
from expt.runs.view.text import Console

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from expt.features import Feature
    from expt.inference.load import TrainedModel


WIDTH = 110
"""The width of a leaderboard as a text [characters]."""


class Metrics(dict[str, float]):
    """The last value of each tag, e.g. `metrics["accuracy/test"]`; notebooks complete tags."""

    def __missing__(self, tag: str) -> float:
        raise KeyError(f"{tag}: the run has no such metric.{did_you_mean(tag, self)}")

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


@dataclass(frozen=True, repr=False)
class Result:
    """A run: its folder and its record."""

    folder: Path
    """Absolute."""
    record: Record
    """All that result.json says."""

    @classmethod
    def of(cls, folder: Path) -> Result:
        """Return the run in `folder`."""
        return cls(folder.absolute(), read_result(RunPaths(folder)))

    def __repr__(self) -> str:
        if self.error:
            error = in_one_line(self.error)
            return f"expt.Result {self.status}\n  folder   {self.folder}\n  error    {error}"
        numbers: dict[str, float] = self.record.get("metrics", {})
        shown = metrics_of(self.config.get("task"))
        named = ((tag, value) for tag, value in numbers.items() if tag.partition("/")[0] in shown)
        metrics = ", ".join(f"{tag} {decimals(value)}" for tag, value in named) or "none"
        reached = "none"
        if best := self.best:
            reached = f"{best['metric']} {decimals(best['value'])} in epoch {best['epoch']}"
        seconds = sum(self.record.get("epoch_s") or [])
        return (
            f"expt.Result {self.status}\n  folder   {self.folder}\n  metrics  {metrics}\n"
            f"  best     {reached}\n  trained  {seconds:.1f} s; more in .record"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>{in_html(self.record, self.history)}"

    @property
    def status(self) -> str:
        """`completed`, `failed`, `interrupted`, `pruned`, `running`, or `none` without a record."""
        return self.record.get("status", "none")

    @property
    def metrics(self) -> Metrics:
        """The final value of every tag, e.g. `metrics["accuracy/test"]`."""
        return Metrics(self.record.get("metrics", {}))

    @property
    def history(self) -> History:
        """The epochs, read again each time: `history[0]["loss/val"]`, `history["loss/val"]`."""
        return History.of(RunPaths(self.folder))

    @property
    def config(self) -> dict[str, Any]:
        """Every setting that the run had, nested, e.g. `config["optimizer"]["lr"]`."""
        return self.record.get("config") or {}

    @property
    def best(self) -> Best | None:
        """The best epoch by the run's objective: `metric`, `value`, `epoch`; or None."""
        return self.record.get("best")

    @property
    def objective(self) -> float:
        """The value that the run was to optimise.

        Where it failed, or has measured no number, it is the worst there is: -inf if the highest
        value is the best, else inf; so `max` and `min` never choose it.
        """
        run = FoundRun(self.folder, self.record)
        value = objective_value(self.record)
        if self.status != FAILED and not math.isnan(value):
            return value
        if not run.objective and is_sweep(self.folder.parent):  # it was refused, but others not
            found = (each for each in results(self.folder.parent) if each.objective)
            run = next(found, run)
        return -math.inf if run.is_higher_better(run.objective) else math.inf

    @property
    def error(self) -> str | None:
        """Why the run has failed; None where it has not."""
        return self.record.get("error")

    def load(
        self, which: Literal["best", "last"] = "best", *, device: str | torch.device = "cpu"
    ) -> TrainedModel:
        """Return the run's model, as `expt.load(result.folder, which)` does."""
        from expt.inference.load import load  # late: it imports torch

        return load(self.folder, which, device=device)

    def plot(self, file: str | Path | None = None) -> Figure:
        """Draw the loss and the metrics by epoch with matplotlib; write the figure to `file` too.

        Raises ConfigError without matplotlib.
        """
        drawing = figure(self.record, self.history)
        if file is not None:
            drawing.savefig(file)
        return drawing


class Runs(list[Result]):
    """Runs as `expt report` lists them, the newest first."""

    def to_pandas(self) -> DataFrame:
        """Return a row for each run: columns of `expt report`, settings, last values of tags.

        Raises ImportError without pandas.
        """
        from pandas import DataFrame

        return DataFrame([run.values for run in self._found()])

    @property
    def best(self) -> BestResult:
        """The best setting, by the mean objective of its seeds and folds: the first of its runs.

        Of a search it is the best by the first goal, and keeps all constraints. Its `repetitions`
        are all of its runs; one that lacks some comes after all others. Raises RunFailed where no
        run has completed.
        """
        from expt.search.conclusion import best_of  # late: few ask for it

        found = sorted(self._found(), key=lambda run: (run.number, run.folder))  # as a table has
        folders = {run.folder.parent for run in found}
        for folder in folders:
            found = in_newest(folder, found)[0]
        found = found or self._found()  # all are of earlier grids
        around = folders.pop() if len(folders) == 1 else Path()
        best = best_of(around, found) if found else None
        if best is None:
            raise RunFailed(
                "no run has completed, measured its objective and kept all constraints, or they"
                " were chosen by different ones"
            )
        by_folder = {run.folder: run for run in self}
        repetitions = Runs(by_folder[run.folder] for run in best.runs)
        first = by_folder[best.first.folder]
        return BestResult(first.folder, first.record, repetitions, best)

    def _found(self) -> list[FoundRun]:
        return [FoundRun(result.folder, result.record) for result in self]


@dataclass(frozen=True, repr=False)
class BestResult(Result):
    """The first run of the best setting, which was not chosen by its own numbers."""

    repetitions: Runs
    """All runs of the setting: its seeds and folds, failed ones too."""
    setting: Row
    """The row of the leaderboard."""

    def __repr__(self) -> str:
        row, shown = self.setting, super().__repr__()
        if row.total == 1:
            return shown
        of_all = f"{row.objective} {spread(row.values)}, {row.status}"
        return f"{shown}\n  setting  the first of {row.total} repetitions: {of_all}"


class FailedResult(Result):
    """A run of a sweep that has failed; its metrics raise."""

    @property
    def metrics(self) -> Metrics:
        """Raises RunFailed. Its numbers until then are in `history`."""
        raise RunFailed(
            f"{self.folder.name} failed, and has no metrics: {in_one_line(self.error or '')}"
        )


class SweepResult(Runs):
    """The runs of a sweep, in the order of its grid; metrics of failed ones raise."""

    @classmethod
    def of(cls, folders: Iterable[Path]) -> SweepResult:
        """Return the result of runs that have not failed."""
        return cls(map(Result.of, folders))

    @classmethod
    def of_failed(cls, error: SweepFailed) -> SweepResult:
        """Return the result of a sweep in which runs have failed."""
        found = {folder: Result.of(folder).record for folder in error.runs}
        for folder, why in error.failed.items():  # a full disk may have kept the record as it was
            found[folder] = {**found[folder], "status": FAILED, "error": why}
        return cls(
            (FailedResult if folder in error.failed else Result)(folder, record)
            for folder, record in found.items()
        )

    @property
    def completed(self) -> Runs:
        """Those that have completed."""
        return Runs(result for result in self if result.status == COMPLETED)

    @property
    def pruned(self) -> Runs:
        """The runs that a search has stopped early, and may continue."""
        return Runs(result for result in self if result.status == PRUNED)

    @property
    def failed(self) -> Runs:
        """Those that have failed; `error` says why."""
        return Runs(result for result in self if isinstance(result, FailedResult))

    def __repr__(self) -> str:
        if not self:
            return "expt.SweepResult of no runs"
        text = io.StringIO()
        Console(file=text, width=WIDTH, force_jupyter=False).print(leaderboard(self._found()))
        head = f"expt.SweepResult of {len(self)} runs"
        if self.pruned:
            head += f", {len(self.pruned)} pruned"
        if self.failed:
            head += f", {len(self.failed)} failed"
        failures = [f"{run.folder.name}: {in_one_line(run.error or '')}" for run in self.failed]
        return "\n".join([head, text.getvalue().rstrip(), *failures])


class Predictions(list[dict[str, Any]]):
    """Predictions of samples in order: where each is from, and keys as in a .jsonl."""

    skipped: Sequence[str] = ()
    """Runs that could not be read, a line each; the list leaves them out."""
    form: Feature
    """The feature of the targets, which gives an answer its cells."""

    def __repr__(self) -> str:
        lines = [f"expt.Predictions of {len(self):,} samples", *(f"  {each}" for each in self[:3])]
        if len(self) > 3:
            lines.append(f"  ... {len(self) - 3:,} more; .to_pandas() is a table")
        return "\n".join(lines)

    def to_pandas(self) -> DataFrame:
        """Return a row for each sample. Raises ImportError without pandas."""
        from pandas import DataFrame

        from expt.inference.writing import csv_cells

        return DataFrame([csv_cells(self.form, record) for record in self])
