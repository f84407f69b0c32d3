"""expt from a notebook or a script: the command line as functions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from expt.command import terminal
from expt.command.evaluate import evaluate as evaluate_as
from expt.command.invoke import command
from expt.command.rerun import rerun as rerun_of
from expt.command.trained_runs import chosen as chosen_runs
from expt.command.words import Options, options_of
from expt.errors import ConfigError, SweepFailed, warn
from expt.launch import forkserver
from expt.python.arguments import folder_word, words_of
from expt.python.results import Predictions, Result, Runs, SweepResult
from expt.runs.named_checkpoint import Which
from expt.runs.result import read_result
from expt.runs.view.listing import in_order, runs_below


def list_runs(folder: str | Path = "outputs") -> Runs:
    """Every run below `folder`, of any status. Raises ConfigError where there is no such folder.

    >>> [run.status for run in expt.list_runs("outputs")]
    ['completed', 'completed']
    """
    return Runs(
        Result(found.folder.absolute(), found.record)
        for found in in_order(runs_below(Path(folder)))
    )


def run(
    *arguments: str | Mapping[str, Any],
    folder: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Result:
    """Train one run, and wait for it, as `python -m expt` does.

    Settings are keywords: `epochs=3`, a dict for keys below one (`optimizer={"lr": 0.1}`), and with
    the choice of a group as its `name` (`dataset={"name": "mnist", "root": "~/data"}`). A class of
    your own stands for an instance of it: `model=Net`, with arguments `model={"_target_": Net,
    "width": 16}` or `functools.partial(Net, width=16)`. Texts are taken as they stand. `arguments`
    are words of the command (`"optimizer.lr=0.1"`) or dicts of dotted keys; of equal keys the last
    counts.

    The run is in `folder`, or a new one of `outputs`; `quiet` keeps all but warnings from being
    printed. The processes that workers are forked from stay warm: the next call starts in a
    fraction of a second. Raises ConfigError, RunFailed or Interrupted (see expt.errors).

    >>> result = expt.run(model="mlp", optimizer={"lr": 0.1}, epochs=1, quiet=True)
    >>> result.metrics["accuracy/test"] > 0.8
    True
    >>> expt.run(epocs=3)
    Traceback (most recent call last):
    expt.errors.ConfigError: epocs=3: there is no key 'epocs'. Did you mean 'epochs'?
    """
    words = [*words_of(arguments, settings), *folder_word(folder, sweep=False)]
    forkserver.warm(forkserver.libraries_in(words))
    completed = _folders(options_of(words), quiet, may_sweep=False)
    if not completed:
        raise ConfigError("preflight=true: trains nothing that could be returned; leave it out")
    return Result.of(completed[0])


def sweep(
    *arguments: str | Mapping[str, Any],
    folder: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> SweepResult:
    """Train every combination of values, and wait for all, as `python -m expt -m` does.

    Arguments are those of `run`, and a list, a range or an array is an axis. A tuple is one value,
    as is a list inside an axis: `model={"hidden": [(), (64,), (64, 64)]}` has three models.
    `folder="latest"` resumes the newest sweep, and a folder the one that is there: completed runs
    are not made again.

    Returns the runs in the order of the grid, those of an earlier command too. Where some have
    failed, a warning says so, `failed` has them, and their `metrics` raise. Raises SweepFailed
    where all have, ConfigError or Interrupted.

    >>> axes = {"model": ["mlp", "convnet"], "optimizer": {"lr": [0.1, 0.01]}}
    >>> runs = expt.sweep(axes, epochs=1, quiet=True)
    >>> len(runs.completed)
    4
    >>> runs.best.metrics["accuracy/test"] > 0.9
    True
    """
    words = [*words_of(arguments, settings, sweep=True), *folder_word(folder, sweep=True)]
    forkserver.warm([*forkserver.SWEEP_MODULES, *forkserver.libraries_in(words)])
    try:
        return SweepResult.of(_folders(options_of(["-m", *words]), quiet))
    except SweepFailed as error:
        if not error.completed:
            raise
        warn(
            f"{error}: {', '.join(folder.name for folder in error.failed)}; `failed` of the result"
            " has their errors"
        )
        return SweepResult.of_failed(error)


def rerun(folder: str | Path, into: str | Path | None = None) -> Result:
    """Repeat the run of `folder`, one of a sweep too, with its recorded settings in a new folder.

    The numbers are the same to the last bit on the same machine with the same code. Warns of
    differences in versions, data and code, and in the numbers. Raises as `run` does.

    >>> again = expt.rerun(result.folder)
    1,293 train, 144 val, 360 test; 10 classes
    epoch 1/1  step ...
    repeated     the same numbers in all ... metrics
    >>> again.metrics["loss/test"] == result.metrics["loss/test"]
    True
    """
    forkserver.warm()
    paths = rerun_of(Path(folder), into, typed_at=time.monotonic())
    return Result.of(paths.folder)


def evaluate(
    folder: str | Path | Sequence[str | Path],
    *arguments: str | Mapping[str, Any],
    quiet: bool = False,
    flips: bool = False,
    **settings: Any,
) -> dict[str, float]:
    """Measure the run of `folder`: `evaluate(RUN, split="val")["accuracy/val"]`.

    Of several folders the mean of their predictions is measured, with `flips` also over mirror
    images. With `dataset={"name": ..., "root": ...}` on another dataset; see `python -m expt
    evaluate --help`. The metrics are kept in RUN/evaluations too. Raises as `run` does.
    """
    forkserver.warm()
    options = options_of(words_of(arguments, settings))
    folders = [str(folder)] if isinstance(folder, str | Path) else [*map(str, folder)]
    *_, paths = evaluate_as(folders, options.settings, flips=flips, quiet=quiet or options.quiet)
    return read_result(paths)["metrics"]


def predict(
    run: str | Path | Sequence[str | Path],
    paths: str | Path | Sequence[str | Path] = (),
    *,
    split: Literal["train", "val", "test"] | None = None,
    which: Which | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    amp: bool | Literal["recorded", "bf16", "fp16"] = "recorded",
    top: int | None = None,
    flips: bool = False,
    trust_code: bool = False,
    texts: Sequence[str] = (),
) -> Predictions:
    """Return predictions, as `python -m expt predict`: `predict("RUN", "photos")[0]["class"]`.

    Of a sweep it is the best run's, of several runs the mean, with `flips` also over mirror images.
    Warns of each file that can't be read. `trust_code` is that of expt.load. Raises ConfigError for
    samples that the run's model can't take.
    """
    from expt.inference.plan import Plan

    given = (paths,) if isinstance(paths, str | Path) else paths
    runs = [run] if isinstance(run, str | Path) else run
    chosen = Plan(
        chosen_runs([*map(str, runs)], which, terminal.console(quiet=True)),
        [*map(Path, given)],
        split=split,
        flips=flips,
        batch_size=batch_size,
        device=device,
        amp=amp,
        top=top,
        trust_code=trust_code,
        texts=texts,
    )
    from expt.inference.predict import Predictor  # late: torch

    predictor = Predictor(chosen)
    found = Predictions(
        record for answers in predictor for record in predictor.form.answers(answers)
    )
    found.skipped, found.form = predictor.skipped, predictor.form
    for line in found.skipped:
        warn(line)
    return found


def _folders(options: Options, quiet: bool, *, may_sweep: bool = True) -> list[Path]:
    """Return the folders of the runs that have completed or were pruned."""
    options = options._replace(quiet=quiet or options.quiet)
    ended = command(options, typed_at=time.monotonic(), may_sweep=may_sweep, from_python=True)
    return [paths.folder for paths in ended]
