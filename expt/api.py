"""expt from a notebook or a script: the command line as a function."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expt.command import terminal
from expt.command.evaluate import evaluate as evaluate_as
from expt.command.main import command
from expt.command.rerun import rerun as rerun_of
from expt.config.tasks import metrics_of
from expt.errors import ConfigError, warn
from expt.launch import forkserver
from expt.runs.paths import RunPaths
from expt.runs.result import Record, read_result
from expt.runs.view.query import ListedRun, in_order, runs_below

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class Result:
    """A run: its folder, and what result.json says of it."""

    folder: Path
    """Absolute."""
    record: Record

    @classmethod
    def of(cls, folder: Path) -> Result:
        """That of the run in `folder`."""
        return cls(folder.absolute(), read_result(RunPaths(folder)))

    def __repr__(self) -> str:
        shown = metrics_of(self.record.get("config", {}).get("task"))
        named = ((tag, value) for tag, value in self.metrics.items() if tag.partition("/")[0] in shown)
        metrics = ", ".join(f"{tag} {value:.4f}" for tag, value in named) or "none"
        best, seconds = self.record.get("best"), sum(self.record.get("epoch_s") or [])
        reached = f"{best['metric']} {best['value']:.4f} in epoch {best['epoch']}" if best else "none"
        return (
            f"expt.Result {self.record.get('status', 'none')}\n  folder   {self.folder}\n  metrics  {metrics}\n"
            f"  best     {reached}\n  trained  {seconds:.1f} s; more in .record"
        )

    @property
    def metrics(self) -> dict[str, float]:
        """The final value of every tag, as in `metrics["accuracy/test"]`; empty where none was measured yet."""
        return self.record.get("metrics", {})

    @property
    def objective(self) -> float | None:
        """The value that the run was to optimise; None where it was not measured."""
        objective = self.record.get("objective")
        return objective["value"] if objective else None


class Predictions(list[dict[str, Any]]):
    """Of each sample, in order: where it is from, and what the run's model says of it; keys as in a .jsonl."""

    skipped: Sequence[str] = ()
    """What could not be read, a line each; it is left out of the list."""

    def to_pandas(self) -> DataFrame:
        """A row for each sample, with the columns of a .csv. Raises ImportError without pandas."""
        from pandas import DataFrame

        from expt.inference.writing import flat

        return DataFrame([flat(record) for record in self])


class Runs(list[Result]):
    """Runs as `expt report` lists them, the newest first."""

    def to_pandas(self) -> DataFrame:
        """A row for each run: what `expt report` shows, every setting by its key, and the last value of every tag.

        Raises ImportError without pandas.
        """
        from pandas import DataFrame

        return DataFrame([ListedRun(result.folder, result.record).values for result in self])


def list_runs(folder: str | Path = "outputs") -> Runs:
    """Every run below `folder`, of any status. Raises ConfigError where there is no such folder."""
    return Runs(Result(found.folder.absolute(), found.result) for found in in_order(runs_below(Path(folder))))


def predict(
    run: str | Path,
    paths: str | Path | Sequence[str | Path] = (),
    *,
    split: Literal["train", "val", "test"] | None = None,
    which: Literal["best", "last"] = "best",
    batch_size: int | None = None,
    device: str = "auto",
    amp: bool | Literal["recorded", "bf16", "fp16"] = "recorded",
    top: int | None = None,
) -> Predictions:
    """Do what `python -m expt predict RUN PATHS` does, and return it: `predict("RUN", "photos")[0]["class"]`.

    Warns of each file that can't be read. Raises ConfigError for what the run's model can't be asked about.
    """
    from expt.inference.plan import Asked, plan

    given = (paths,) if isinstance(paths, str | Path) else paths
    chosen = plan(
        Asked(
            run=Path(run),
            paths=tuple(map(Path, given)),
            split=split,
            which=which,
            batch_size=batch_size,
            device=device,
            amp=amp,
            top=top,
        )
    )
    from expt.inference.predict import Predictor  # late: torch

    predictor = Predictor(chosen)
    found = Predictions(record for answers in predictor for record in predictor.form.records(answers))
    found.skipped = predictor.skipped
    for line in found.skipped:
        warn(line)
    return found


def run(*arguments: str) -> Result:
    """Do what `python -m expt ARGUMENTS` does for one run, as in `run("model=resnet18", "gpus=4")`.

    Raises ConfigError, RunFailed or Interrupted (see expt.errors). The processes that workers are forked from stay
    warm: the next call starts in a fraction of a second.
    """
    if several := [word for word in arguments if word in ("-m", "--multirun") or word.startswith("sweep=")]:
        raise ConfigError(f"{several[0]}: makes several runs; use expt.sweep, which returns a list of results")
    forkserver.warm(forkserver.libraries_in(arguments))
    (result,) = _results(arguments, may_sweep=False)
    return result


def sweep(*arguments: str) -> list[Result]:
    """Do what `python -m expt -m ARGUMENTS` does, as in `sweep("model=mlp,convnet", "seed=range(3)")`.

    Returns every completed run, those of an earlier command too. Raises SweepFailed at the end, with all other runs
    completed, where one has failed: `[expt.Result.of(folder) for folder in error.completed]` are those.
    """
    forkserver.warm([*forkserver.SWEEP_MODULES, *forkserver.libraries_in(arguments)])
    return _results(["-m", *arguments])


def rerun(folder: str | Path, into: str | Path | None = None) -> Result:
    """Repeat the run of `folder`, one of a sweep too, with all its recorded settings, in a new folder.

    The numbers are the same to the last bit on the same machine with the same code. Warns of what is other now, and
    where the numbers are. Raises as `run` does.
    """
    forkserver.warm()
    paths = rerun_of(Path(folder), None if into is None else Path(into), typed_at=time.monotonic())
    return Result.of(paths.folder)


def evaluate(folder: str | Path, *settings: str) -> dict[str, float]:
    """The metrics of the run of `folder`, measured anew, as in `evaluate(RUN, "split=val")["accuracy/val"]`.

    With `"dataset=...", "dataset.root=..."` those on another dataset; see `python -m expt evaluate --help`. They are
    kept in RUN/evaluations too. Raises as `run` does.
    """
    forkserver.warm()
    with terminal.quietly(settings) as words:
        (paths,) = evaluate_as(Path(folder), words)
    return read_result(paths)["metrics"]


def _results(arguments: Sequence[str], *, may_sweep: bool = True) -> list[Result]:
    with terminal.quietly(arguments) as words:
        completed = command(words, typed_at=time.monotonic(), may_sweep=may_sweep)
    return [Result.of(paths.folder) for paths in completed]
