"""`expt evaluate`: measure a trained run on any split or dataset, by any number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expt import machine
from expt.command import terminal, trained_runs
from expt.command.words import Parser
from expt.errors import ConfigError, RunFailed
from expt.launch import forkserver
from expt.launch.launcher import refuse_in_torchrun
from expt.runs.named_checkpoint import trained_run
from expt.runs.paths import RunPaths, make_unused_folder
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED, Record, read_result

if TYPE_CHECKING:
    from expt.command.evaluation_settings import Settings

ABOUT = """\
Measure the weights of a trained run: each sample counts exactly once, on any number of workers. The
default is the run's test set, or without one its validation set. Numbers are written to
RUN/evaluations and shown in the run's TensorBoard; the run is not changed. Of several runs each is
measured, and the mean of their probabilities or values (in the first one's folder); split=val of
runs with several folds measures each sample by those that held it out."""
EXAMPLES = """settings
  split=train|val|test|all      what to measure; all: every part of a dataset
  which=best|last               which checkpoint; RUN@last and RUN@40 (of a step) name it, too
  dataset=... dataset.KEY=...   another dataset: prepared like the run's, classes matched by name
  task.metrics.NAME={_target_: torchmetrics...., better: max}     one more metric
  world_size= gpus= batch_size= amp= threads= timeout_s= ...      how it is computed

examples
  python -m expt evaluate outputs/2026-11-21/10-00-00
  python -m expt evaluate RUN split=val world_size=3
  python -m expt evaluate RUN dataset=image_folder dataset.root=new_photos
  python -m expt evaluate outputs/sweeps/2026-11-21_10-00-00 --best 3
  python -m expt evaluate SWEEP --filter model=convnet --flips
"""


def main(words: Sequence[str]) -> int:
    """Evaluate the runs of `words`.

    Raises as `evaluate`, and RunFailed where one of several has failed.
    """
    parser = Parser("evaluate", ABOUT, EXAMPLES)
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a run, or of a sweep; or several")
    add("words", nargs="*", metavar="KEY=VALUE", help="settings, see below")
    trained_runs.add_options(parser)
    add("--config-dir", type=Path, metavar="DIR", help="custom YAML for dataset=... [conf]")
    asked = parser.parse_args(words)
    runs, settings = trained_runs.named([asked.run, *asked.words])
    options = {"best": asked.best, "filters": asked.filter, "flips": asked.flips}
    evaluate(runs, settings, config_dir=asked.config_dir, **options)
    return 0


@machine.not_world_writable()
def evaluate(
    runs: Sequence[str],
    words: Sequence[str],
    *,
    best: int | None = None,
    filters: Sequence[str] = (),
    flips: bool = False,
    config_dir: Path | None = None,
    quiet: bool = False,
) -> list[RunPaths]:
    """Measure runs, and last the mean of several; return the folders of the numbers.

    Of a sweep they are the `best` ones, or all that pass the `filters`. Raises ConfigError where
    that cannot be done, RunFailed or Interrupted as a run.
    """
    refuse_in_torchrun("an evaluation")
    forkserver.warm()  # it loads while the rest is read
    from expt.command import evaluation_settings as settings  # late, as below: Hydra

    asked = settings.read(words, config_dir, flips=flips)
    console, which = terminal.console(quiet=quiet), asked.values.get("which")
    chosen = trained_runs.chosen(runs, which, console, best=best, filters=filters)
    begun = [(run, trained_run(run, which)[0], which) for run, which in chosen]
    measured = [
        settings.settings(run, record, asked._replace(which=which)) for run, record, which in begun
    ]
    measured += settings.mean_of(measured)
    from expt.launch.local import evaluate_all
    from expt.runs.view.summary import print_evaluations

    requests: list[RunRequest] = []
    try:
        requests += [_request(each, words) for each in measured]
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; copy the run to where you may write"
        ) from error
    failed = evaluate_all(requests, console)
    terminal.put_runs(((x.paths.folder, read_result(x.paths)) for x in requests), "evaluations")
    done = [each.paths for each in requests if read_result(each.paths).get("status") == COMPLETED]
    if done:
        print_evaluations(console, done)
    if failed:
        raise RunFailed(f"{len(failed)} of {len(requests)} evaluations failed: {failed[0]}")
    return done


def _request(measured: Settings, words: Sequence[str]) -> RunRequest:
    from expt.command.grammar import about_run  # late: Hydra

    run, *_, record = measured.evaluation.runs[0]
    paths = RunPaths(Path(make_unused_folder(str(RunPaths(run).evaluations / measured.name))))
    about: Record = {**about_run(paths.folder.name, list(words)), "identity": record["identity"]}
    return RunRequest(
        config=measured.config,
        identity=measured.identity,
        paths=paths,
        about=about,
        typed_at=None,
        instead=measured.evaluation,
    )
