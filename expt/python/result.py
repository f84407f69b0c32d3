"""What a run has come to, as a notebook or a script asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expt.config.tasks import metrics_of
from expt.errors import did_you_mean
from expt.runs.paths import RunPaths
from expt.runs.result import Best, Record, read_result
from expt.runs.view.curves import History, figure
from expt.runs.view.query import ListedRun

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from expt.inference.load import TrainedModel


class Metrics(dict[str, float]):
    """The last value of every tag, as in `metrics["accuracy/test"]`; a notebook completes the tags."""

    def __missing__(self, tag: str) -> float:
        raise KeyError(f"{tag}: the run has no such metric.{did_you_mean(tag, self)}")

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


@dataclass(frozen=True, repr=False)
class Result:
    """A run: its folder, and what result.json says of it."""

    folder: Path
    """Absolute."""
    record: Record
    """All that result.json says."""

    @classmethod
    def of(cls, folder: Path) -> Result:
        """That of the run in `folder`."""
        return cls(folder.absolute(), read_result(RunPaths(folder)))

    def __repr__(self) -> str:
        numbers: dict[str, float] = self.record.get("metrics", {})
        shown = metrics_of(self.config.get("task"))
        named = ((tag, value) for tag, value in numbers.items() if tag.partition("/")[0] in shown)
        metrics = ", ".join(f"{tag} {value:.4f}" for tag, value in named) or "none"
        best, seconds = self.best, sum(self.record.get("epoch_s") or [])
        reached = (
            f"{best['metric']} {best['value']:.4f} in epoch {best['epoch']}" if best else "none"
        )
        return (
            f"expt.Result {self.status}\n  folder   {self.folder}\n  metrics  {metrics}\n"
            f"  best     {reached}\n  trained  {seconds:.1f} s; more in .record"
        )

    def _repr_html_(self) -> str:
        from expt.runs.view import html  # late: for a notebook alone

        return html.of_run(self.folder, self.record, self.history)

    @property
    def status(self) -> str:
        """`completed`, `failed`, `interrupted`, `paused`, `running`, or `none` of a folder without
        a record.
        """
        return self.record.get("status", "none")

    @property
    def metrics(self) -> Metrics:
        """The final value of every tag, as in `metrics["accuracy/test"]`; empty where none was
        measured yet.
        """
        return Metrics(self.record.get("metrics", {}))

    @property
    def history(self) -> History:
        """The epochs in order: `history[0]["loss/val"]`, `history["loss/val"]`, `.to_pandas()`.

        Read anew.
        """
        return History.of(RunPaths(self.folder))

    @property
    def config(self) -> dict[str, Any]:
        """Every setting that the run had, nested, as in `config["optimizer"]["lr"]`."""
        return self.record.get("config") or {}

    @property
    def best(self) -> Best | None:
        """The best epoch by the run's objective: `metric`, `value`, `epoch`; None where none was
        measured.
        """
        return self.record.get("best")

    @property
    def objective(self) -> float | None:
        """The value that the run was to optimise; None where it was not measured."""
        objective = self.record.get("objective")
        return objective["value"] if objective else None

    @property
    def error(self) -> str | None:
        """Why the run has failed; None where it has not."""
        return self.record.get("error")

    def load(
        self, which: Literal["best", "last"] = "best", *, device: str | torch.device = "cpu"
    ) -> TrainedModel:
        """The run's model, ready to use, as `expt.load(result.folder, which)` gives it; raises what
        that raises.
        """
        from expt.inference.load import load  # late: it imports torch

        return load(self.folder, which, device=device)

    def plot(self, file: str | Path | None = None) -> Figure:
        """The loss and the metrics by epoch, as a figure of matplotlib, which a notebook shows;
        written to `file` too.

        Raises ConfigError without matplotlib.
        """
        drawing = figure(self.record, self.history)
        if file is not None:
            drawing.savefig(file)
        return drawing


class Runs(list[Result]):
    """Runs as `expt report` lists them, the newest first."""

    def to_pandas(self) -> DataFrame:
        """A row for each run: what `expt report` shows, every setting by its key, and the last
        value of every tag.

        Raises ImportError without pandas.
        """
        from pandas import DataFrame

        return DataFrame([ListedRun(result.folder, result.record).values for result in self])
