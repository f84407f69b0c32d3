"""Where things are: the configuration that expt ships, and the files of a run.

The one place that knows their names.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path

EVENT_FILES = "events.out.tfevents."
"""What the names of TensorBoard's files start with; the seconds of their beginning follow."""


def make_unused_folder(name: str) -> str:
    """Make a folder `name`, or `name_2` and so on; two processes never get the same."""
    for number in itertools.count(1):
        folder = Path(name if number == 1 else f"{name}_{number}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(
            FileExistsError, FileNotFoundError
        ):  # or `remove_empty` has come between
            folder.mkdir()
            return str(folder)
    raise AssertionError


def remove_empty(folder: Path) -> None:
    """Remove an empty folder, and the empty ones around it up to `outputs`.

    Raises OSError where one is not empty.
    """
    folder.rmdir()
    outputs = Path("outputs").absolute()
    for around in folder.absolute().parents:
        if around.is_relative_to(outputs):
            around.rmdir()


RESULT = "result.json"
SWEEP_RECORD = "multirun.yaml"
"""What Hydra writes into a sweep's folder before it starts a run."""
_FORKED = "forked-"
SWEEP_INDEX = ".index.json"
"""What the records of a large sweep's runs say, see expt.runs.sweep_index."""


def is_sweep(folder: Path) -> bool:
    """Whether `folder` is that of a sweep, and not one where single runs lie side by side."""
    return (folder / SWEEP_RECORD).is_file()


@dataclass(frozen=True)
class RunPaths:
    """The files of one run, below its folder."""

    folder: Path

    @property
    def result(self) -> Path:
        """Status and final numbers; see expt.runs.result."""
        return self.folder / RESULT

    @property
    def metrics(self) -> Path:
        """One JSON object a line: step, epoch, tag, value."""
        return self.folder / "metrics.jsonl"

    def event_files(self) -> list[Path]:
        """TensorBoard's: one, and one more for each time that the run went on."""
        return sorted(self.folder.glob(f"{EVENT_FILES}*"))

    @property
    def lock(self) -> Path:
        """Held by the command that is at work in this folder."""
        return self.folder / ".lock"

    @property
    def sent(self) -> Path:
        """The folder of what other dashboards have of the run, a file for each; see
        expt.dashboards.cursor.
        """
        return self.folder / ".sent"

    @property
    def before(self) -> Path:
        """The folder of what the record was before the run goes on, until that is accepted; see
        expt.runs.undo.
        """
        return self.folder / ".before"

    @property
    def checkpoints(self) -> Path:
        """The folder of `last` and `best`."""
        return self.folder / "checkpoints"

    @property
    def last(self) -> Path:
        """The newest checkpoint."""
        return self.checkpoints / "last.pt"

    @property
    def within_epoch(self) -> Path:
        """What a longer run goes on from where `last` is of an epoch that `max_steps` has ended
        before its time.
        """
        return self.checkpoints / "within_epoch.pt"

    @property
    def forked(self) -> Path:
        """The checkpoint of another run that this one is a fork of, until it has one of its own."""
        return self.checkpoints / "fork.pt"

    def forked_after(self, epoch: int) -> Path:
        """The checkpoint of the end of that epoch, where it is kept for its forks; see
        expt.runs.forkable.keep.
        """
        return self.checkpoints / f"{_FORKED}{epoch}.pt"

    @property
    def kept_for_forks(self) -> list[Path]:
        """All checkpoints that are."""
        return sorted(self.checkpoints.glob(f"{_FORKED}*.pt"))

    @property
    def kept_for_itself(self) -> list[Path]:
        """All other files and folders beside them."""
        return [path for path in self.checkpoints.glob("*") if not path.name.startswith(_FORKED)]

    @property
    def best(self) -> Path:
        """The checkpoint with the best objective so far."""
        return self.checkpoints / "best.pt"

    @property
    def parts(self) -> list[Path]:
        """The folders of what each worker has written of checkpoints; see expt.runs.parts."""
        return sorted(self.checkpoints.glob("step-*.parts"))

    def checkpoint(self, which: str) -> Path:
        """The file of `best` or `last`."""
        return {"best": self.best, "last": self.last}[which]

    @property
    def evaluations(self) -> Path:
        """What its weights were measured on later: a folder for each evaluation, with files named
        as a run's.
        """
        return self.folder / "evaluations"

    def exported(self, format: str) -> Path:
        """Its model for other programs, in the format `torch_export` or `onnx`."""
        return self.folder / {"torch_export": "model.pt2", "onnx": "model.onnx"}[format]

    @property
    def code(self) -> Path:
        """Own classes of a notebook or a script, as modules; see expt.config.main_code."""
        return self.folder / "code"

    @property
    def trace(self) -> Path:
        """What torch.profiler saw of a few steps, for Perfetto."""
        return self.folder / "trace.json.gz"

    @property
    def operators(self) -> Path:
        """The most expensive operators of the trace, as a table."""
        return self.folder / "operators.txt"

    @property
    def hydra(self) -> Path:
        """What Hydra writes: config.yaml, overrides.yaml, hydra.yaml."""
        return self.folder / ".hydra"

    @property
    def hydra_settings(self) -> Path:
        """Hydra's own settings for the run, and where it looked for YAML."""
        return self.hydra / "hydra.yaml"

    @property
    def overrides(self) -> Path:
        """The words of the command that began the run, as Hydra keeps them."""
        return self.hydra / "overrides.yaml"

    def next_attempt(self) -> int:
        """The number of the next attempt: every one before has left logs, of which older ones may
        be removed.
        """
        return max(self.attempts(), default=-1) + 1

    def attempts(self) -> list[int]:
        """The numbers of those whose logs are there."""
        return [int(path.name) for path in self.logs(0).parent.glob("*") if path.name.isdecimal()]

    def clear_records(self) -> None:
        """Remove what earlier attempts recorded, but their logs, for one that starts from the
        beginning.
        """
        for path in (self.metrics, *self.event_files()):
            path.unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Remove what workers that were killed have left of a checkpoint that they were writing."""
        for path in self.checkpoints.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def remove_checkpoints(self) -> None:
        """Remove all that are not kept for forks: the run can then go on from its beginning alone."""
        if not self.kept_for_forks:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        for path in self.kept_for_itself:
            if path.is_file():  # folders hold parts, which may be those of a fork's checkpoint
                path.unlink(missing_ok=True)

    def is_new(self) -> bool:
        """Whether the folder holds nothing yet, but what Hydra and the lock have put there."""
        return not self.folder.exists() or {*self.folder.iterdir()} <= {self.hydra, self.lock}

    def holds_refusal_alone(self) -> bool:
        """Whether the folder holds nothing but the record of a run that could not start."""
        return {*self.folder.iterdir()} <= {
            self.result,
            self.lock,
            self.sent,
            self.code,
            *self.event_files(),
        }

    def has_trained(self) -> bool:
        """Whether there is a checkpoint, or a number."""
        return self.checkpoints.exists() or (
            self.metrics.exists() and self.metrics.stat().st_size > 0
        )

    def remove_refused(self) -> None:
        """Remove what a run has left that was refused before it had come to anything; its folder
        was new.
        """
        for folder in (self.logs(0).parent, self.sent, self.code):
            shutil.rmtree(folder, ignore_errors=True)
        for path in (self.result, self.metrics, *self.event_files()):
            path.unlink(missing_ok=True)

    def logs(self, attempt: int) -> Path:
        """The folder of one attempt's logs, one folder a rank in it."""
        return self.folder / "logs" / str(attempt)

    def stdout(self, attempt: int, rank: int) -> Path:
        """What a worker printed."""
        return self.logs(attempt) / str(rank) / "stdout.log"

    def stderr(self, attempt: int, rank: int) -> Path:
        """What a worker printed to stderr, its traceback included."""
        return self.logs(attempt) / str(rank) / "stderr.log"

    def error(self, attempt: int, rank: int) -> Path:
        """The exception that ended a worker, as torch's `record` writes it."""
        return self.logs(attempt) / str(rank) / "error.json"
