"""The run folder: the names of its files, its lock, and files that are written as a whole."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from expt.errors import ConfigError, FolderInUse

EVENT_FILES = "events.out.tfevents."
"""How the names of TensorBoard's files begin; the seconds of their beginning follow."""
RESULT = "result.json"
SWEEP_RECORD = "multirun.yaml"
"""What Hydra writes into a sweep's folder before it starts a run."""
SWEEP_INDEX = ".index.json"
"""The records of a large sweep's runs, see expt.runs.sweep."""


def make_unused_folder(name: str) -> str:
    """Make a folder `name`, or `name_2` and so on; two processes never get the same."""
    for number in itertools.count(1):
        folder = Path(name if number == 1 else f"{name}_{number}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        # FileNotFoundError: `remove_empty` has come between.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
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


def is_sweep(folder: Path) -> bool:
    """Return whether `folder` is that of a sweep, not one where single runs lie side by side."""
    return (folder / SWEEP_RECORD).is_file()


def refuse_mixed(folder: Path, key: str) -> None:
    """Raise ConfigError for a new run in a sweep's folder, or a sweep in a run's.

    Each would be missing in the other's tables, or be counted there.
    """
    kinds = {"run": lambda one: RunPaths(one).result.is_file(), "sweep": is_sweep}
    other = "sweep" if key == "hydra.run.dir" else "run"
    if found := next(filter(kinds[other], (folder.absolute(), folder.absolute().parent)), None):
        raise ConfigError(f"{key}={folder}: {found} is the folder of a {other}; choose another")


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
        """TensorBoard's: one, and before it one of what a resumed run had written."""
        return sorted(self.folder.glob(f"{EVENT_FILES}*"))

    @property
    def lock(self) -> Path:
        """Held by the command that is at work in this folder."""
        return self.folder / ".lock"

    @property
    def sent(self) -> Path:
        """The folder of what other dashboards have of the run, a file for each."""
        return self.folder / ".sent"

    @property
    def before(self) -> Path:
        """The folder of what was there before the run is resumed, until its workers accept it."""
        return self.folder / ".before"

    @property
    def checkpoints(self) -> Path:
        """The folder of `last` and `best`."""
        return self.folder / "checkpoints"

    @property
    def last(self) -> Path:
        """The newest checkpoint."""
        return self.checkpoints / "last.safetensors"

    @property
    def best(self) -> Path:
        """The checkpoint with the best objective so far."""
        return self.checkpoints / "best.safetensors"

    @property
    def before_end(self) -> Path:
        """The checkpoint of a longer run, where the end has ended an epoch or was evaluated."""
        return self.checkpoints / "before_end.safetensors"

    @property
    def forked(self) -> Path:
        """The checkpoint of another run that this one is a fork of, until it has its own."""
        return self.checkpoints / "fork.safetensors"

    @property
    def parts(self) -> list[Path]:
        """The folders of what each worker has written of checkpoints."""
        return sorted(self.checkpoints.glob("step-*.parts"))

    def checkpoint(self, which: str) -> Path:
        """Return the file of `best`, `last`, `best-40`, ..."""
        return self.last.with_stem(which)

    @property
    def evaluations(self) -> Path:
        """A folder for each later evaluation of its weights, with files named as a run's."""
        return self.folder / "evaluations"

    def exported(self, format: str) -> Path:
        """Its model for other programs, in the format `torch_export` or `onnx`."""
        return self.folder / {"torch_export": "model.pt2", "onnx": "model.onnx"}[format]

    @property
    def code(self) -> Path:
        """Custom classes of a notebook or a script, as modules; see expt.config.kept_code."""
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
        """Hydra's config.yaml, overrides.yaml and hydra.yaml."""
        return self.folder / ".hydra"

    def write_hydra(self, files: Mapping[str, str]) -> None:
        """Write `.hydra`, from the text of each file by its name."""
        for name, text in files.items():
            self.hydra.mkdir(parents=True, exist_ok=True)
            (self.hydra / f"{name}.yaml").write_text(text, encoding="utf-8")

    @property
    def hydra_settings(self) -> Path:
        """Hydra's own settings for the run, and where it looked for YAML."""
        return self.hydra / "hydra.yaml"

    @property
    def overrides(self) -> Path:
        """The words of the command that began the run, as Hydra keeps them."""
        return self.hydra / "overrides.yaml"

    def next_attempt(self) -> int:
        """Return the number of the next attempt, after those that have left logs."""
        return max(self.attempts(), default=-1) + 1

    def attempts(self) -> list[int]:
        """Return the numbers of attempts whose logs are there."""
        return [int(path.name) for path in self.logs(0).parent.glob("*") if path.name.isdecimal()]

    def logs(self, attempt: int) -> Path:
        """Return the folder of one attempt's logs, with one folder a rank."""
        return self.folder / "logs" / str(attempt)

    def stdout(self, attempt: int, rank: int) -> Path:
        """Return the file of what a worker printed."""
        return self.logs(attempt) / str(rank) / "stdout.log"

    def stderr(self, attempt: int, rank: int) -> Path:
        """Return the file of what a worker printed to stderr, its traceback included."""
        return self.logs(attempt) / str(rank) / "stderr.log"

    def error(self, attempt: int, rank: int) -> Path:
        """Return the file of the exception that ended a worker, as torch's `record` writes it."""
        return self.logs(attempt) / str(rank) / "error.json"

    def is_new(self) -> bool:
        """Return whether the folder holds nothing but the lock and Hydra's files."""
        return not self.folder.exists() or {*self.folder.iterdir()} <= {self.hydra, self.lock}

    def holds_only_refusal(self) -> bool:
        """Return whether the folder holds only the record of a run that could not start."""
        known = {self.result, self.lock, self.sent, self.code, *self.event_files()}
        return {*self.folder.iterdir()} <= known

    def has_trained(self) -> bool:
        """Return whether there is a checkpoint, or a number."""
        has_number = self.metrics.exists() and self.metrics.stat().st_size > 0
        return self.checkpoints.exists() or has_number

    def clear_records(self) -> None:
        """Remove what earlier attempts recorded, but their logs, for a new beginning."""
        for path in (self.metrics, *self.event_files()):
            path.unlink(missing_ok=True)

    def remove_refused(self) -> None:
        """Remove what a run in a new folder has left that was refused before it began."""
        for folder in (self.logs(0).parent, self.sent, self.code):
            shutil.rmtree(folder, ignore_errors=True)
        self.result.unlink(missing_ok=True)
        self.clear_records()

    def remove_checkpoints(self) -> None:
        """Remove all checkpoints: the run can then only start from the beginning."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)


# JSON has no words for numbers that are not finite: nan is null, and infinity a number beyond what
# a float holds, which is read as such. The words stand for them while all else is written.
_INFINITE = {"\0inf": "1e999", "\0-inf": "-1e999"}


def write_atomically(path: Path, text: str, *, may_exist: bool = True) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the new one, never a part.

    Raises FileExistsError where there is an old one and none `may_exist`.
    """
    with written(path, may_exist=may_exist) as file:
        file.write(text.encode())


@contextlib.contextmanager
def written(path: Path, *, may_exist: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that takes the name `path` if the block ends well, and is removed if not.

    Raises FileExistsError then where there is an old one and none `may_exist`.
    """
    beside = path.with_name(f".tmp.{os.getpid()}.{path.name}")  # torch looks at the suffix
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if may_exist:
            beside.replace(path)
        else:
            take_name(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def take_name(beside: Path, path: Path) -> None:
    """Rename `beside` to `path`. Raises FileExistsError where there is such a file."""
    try:
        path.hardlink_to(beside)  # unlike a rename it replaces nothing
    except FileExistsError:
        raise
    except OSError:  # a disk without hard links: the folder's lock has to do
        if path.exists():
            raise FileExistsError(path) from None
        beside.replace(path)


def dumps(content: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """Return `content` as JSON."""
    try:
        return json.dumps(content, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:
        plain = _without_infinite(content)
        text = json.dumps(plain, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
        for word, number in _INFINITE.items():
            text = text.replace(json.dumps(word), number)
        return text


def _without_infinite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_infinite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_infinite(value) for value in content]
    if not isinstance(content, float) or math.isfinite(content):
        return content
    return None if math.isnan(content) else f"\0{content}"


PATIENCE_S = 1.0
"""Wait for the workers of a command that has just been killed."""


class FolderLock:
    """The lock of one run's folder, held until `release`."""

    def __init__(self, paths: RunPaths, patience_s: float | None = None) -> None:
        """Raise FolderInUse where another holds it, ConfigError where the folder can't be made."""
        self._paths = paths
        deadline = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        try:
            paths.folder.mkdir(parents=True, exist_ok=True)
            while (descriptor := self._try()) is None:
                if time.monotonic() > deadline:
                    raise FolderInUse(
                        f"hydra.run.dir={paths.folder}: another command is at work there; wait"
                        " for it"
                    )
                time.sleep(0.02)
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir={paths.folder}: {error.strerror}; choose another folder"
            ) from error
        self.descriptor = descriptor
        """The lock is held as long as a process has it open."""

    def release(self) -> None:
        """Release the lock."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)

    def _try(self) -> int | None:
        descriptor = os.open(self._paths.lock, os.O_RDWR | os.O_CREAT, 0o666)
        # It may be held; or removed by its last holder, and so not the folder's.
        ours = False
        try:
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ours = os.path.samestat(os.fstat(descriptor), os.stat(self._paths.lock))
            return descriptor if ours else None
        finally:
            if not ours:
                os.close(descriptor)


@contextlib.contextmanager
def at_work(paths: RunPaths) -> Iterator[FolderLock]:
    """Keep other commands out of the run's folder. Raises as FolderLock does."""
    lock = FolderLock(paths)
    try:
        yield lock
    finally:
        lock.release()


def is_held(paths: RunPaths) -> bool:
    """Return whether a process of this machine is, or may be, at work in the run's folder."""
    try:
        descriptor = os.open(paths.lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or a disk without locks
        return True
    finally:
        os.close(descriptor)
    return False
