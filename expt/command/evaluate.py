"""`expt evaluate`: measure a trained run on any split or dataset, by any number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expt import machine
from expt.command import terminal
from expt.command.words import Parser, positive
from expt.errors import ConfigError, RunFailed
from expt.launch import forkserver
from expt.launch.launcher import refuse_in_torchrun
from expt.runs.found import in_newest, results, without_copies
from expt.runs.named_checkpoint import trained_run
from expt.runs.paths import RunPaths, is_sweep, make_unused_folder
from expt.runs.request import RunRequest
from expt.runs.result import COMPLETED, Record, read_result

if TYPE_CHECKING:
    from expt.command.evaluation_settings import Settings

ABOUT = """\
Measure the weights of a trained run: each sample counts exactly once, on any number of workers. The
default is the run's test set, or without one its validation set. Numbers are written to
RUN/evaluations and shown in the run's TensorBoard; the run is not changed."""
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
"""


def main(words: Sequence[str]) -> int:
    """Evaluate the runs of `words`.

    Raises as `evaluate`, and RunFailed where one of several has failed.
    """
    parser = Parser("evaluate", ABOUT, EXAMPLES)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a run, or of a sweep")
    add("words", nargs="*", metavar="KEY=VALUE", help="settings, see below")
    add("--best", type=positive, metavar="N", help="of a sweep: N runs of its best settings [1]")
    add("--config-dir", type=Path, metavar="DIR", help="custom YAML for dataset=... [conf]")
    asked = parser.parse_intermixed_args(list(words))
    evaluate(asked.run, asked.words, best=asked.best, config_dir=asked.config_dir)
    return 0


@machine.not_world_writable()
def evaluate(
    folder: Path,
    words: Sequence[str],
    *,
    best: int | None = None,
    config_dir: Path | None = None,
    quiet: bool = False,
) -> list[RunPaths]:
    """Measure the run of `folder`, or the `best` of a sweep; return the folders of the numbers.

    Raises ConfigError where that cannot be done, RunFailed or Interrupted as a run.
    """
    refuse_in_torchrun("an evaluation")
    forkserver.warm()  # it loads while the rest is read
    from expt.command import evaluation_settings as settings  # late, as below: Hydra

    asked = settings.read(words, config_dir, run=folder)
    begun = [(run, trained_run(run, asked.which)[0]) for run in _chosen(asked.run, best)]
    measured = [(run, record, settings.settings(run, record, asked)) for run, record in begun]
    from expt.launch import one_run
    from expt.runs.view.summary import print_evaluations

    requests: list[RunRequest] = []
    try:
        requests += [_request(run, record, each, words) for run, record, each in measured]
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; copy the run to where you may write"
        ) from error
    console = terminal.console(quiet=quiet)
    failed = one_run.carry_out(requests, console)
    terminal.put_runs(((x.paths.folder, read_result(x.paths)) for x in requests), "evaluations")
    done = [each.paths for each in requests if read_result(each.paths).get("status") == COMPLETED]
    print_evaluations(console, done)
    if failed:
        raise RunFailed(f"{len(failed)} of {len(requests)} evaluations failed: {failed[0]}")
    return done


def _chosen(folder: Path, best: int | None) -> list[Path]:
    """Return the run, or the best ones of a sweep; `trained_run` refuses anything else."""
    if not is_sweep(folder) and (best is None or not folder.exists()):
        return [folder]
    if RunPaths(folder).result.exists():
        raise ConfigError(f"--best {best}: is for a sweep, and {folder} is a run; leave it out")
    from expt.search.conclusion import ranked  # late: Rich's tables

    rows = ranked(folder, in_newest(folder, without_copies(results(folder))[0])[0])
    if not rows:
        raise ConfigError(
            f"{folder}: no completed run has one objective and keeps all constraints; name a run"
        )
    return [run.folder for row in rows for run in row.counted][: best or 1]


def _request(run: Path, record: Record, measured: Settings, words: Sequence[str]) -> RunRequest:
    from expt.command.grammar import about_run  # late: Hydra

    paths = RunPaths(
        Path(make_unused_folder(str(RunPaths(run.absolute()).evaluations / measured.name)))
    )
    about: Record = {**about_run(paths.folder.name, list(words)), "identity": record["identity"]}
    return RunRequest(
        config=measured.config,
        identity=measured.identity,
        paths=paths,
        about=about,
        typed_at=None,
        instead=measured.evaluation,
    )
