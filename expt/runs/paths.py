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
"""The beginning of the names of TensorBoard's files; the time [s] follows."""
RESULT = "result.json"
SWEEP_RECORD = "multirun.yaml"
"""The file that Hydra writes into a sweep's folder before it starts a run."""
GRID_RECORD = "grid.json"
"""The record of a sweep's newest grid."""
SUMMARY_CSV = "summary.csv"
SUMMARY_TABLE = "summary.md"
PATIENCE_S = 1.0
"""The wait for the workers of a command that has just been killed."""
# JSON has no words for numbers that are not finite: nan is null, and infinity a number larger than
# a float holds, which is read as such. The words stand for them while all else is written.
_INFINITE = {"\0inf": "1e999", "\0-inf": "-1e999"}


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


def foreign(path: Path, key: str = "hydra.run.dir") -> ConfigError:
    """Return the error for a file that a run or a sweep would take for its own."""
    fix = f"move it away, or choose another folder by {key}=FOLDER"
    return ConfigError(f"{path}: no record next to it says that it is expt's; {fix}")


def refuse_foreign(folder: Path) -> None:
    """Raise ConfigError where a sweep would replace files, and none has been in the folder."""
    names = (SUMMARY_CSV, SUMMARY_TABLE, GRID_RECORD, SWEEP_RECORD)
    found = [*filter(os.path.lexists, (folder / name for name in names))]
    # That of another program of Hydra names its own job and launcher.
    is_own = is_sweep(folder) and b"expt" in (folder / SWEEP_RECORD).read_bytes()
    if found and not is_own:
        raise foreign(found[0], "hydra.sweep.dir")


def refuse_mixed(folder: Path, key: str) -> None:
    """Raise ConfigError for a new run in a sweep's folder, or a sweep in a run's.

    Each would be missing in the other's tables, or be counted there.
    """
    kinds = {"run": lambda one: RunPaths(one).result.is_file(), "sweep": is_sweep}
    other = "sweep" if key == "hydra.run.dir" else "run"
    if found := next(filter(kinds[other], (folder.absolute(), folder.absolute().parent)), None):
        raise ConfigError(f"{key}={folder}: {found} is the folder of a {other}; choose another")


class _Place:
    """A file or folder that has the same place below the folder of each run."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __get__(self, paths: RunPaths, _: object = None) -> Path:
        return paths.folder.joinpath(*self.names)


@dataclass(frozen=True)
class RunPaths:
    """The files of one run, below its folder."""

    folder: Path
    result = _Place(RESULT)
    """Status and final numbers; see expt.runs.result."""
    metrics = _Place("metrics.jsonl")
    """One JSON object a line: step, epoch, tag, value."""
    lock = _Place(".lock")
    """The lock of the command that is at work in this folder."""
    sent = _Place(".sent")
    """The folder of the state of other dashboards, a file for each."""
    before = _Place(".before")
    """The folder of the files before a resume, until the workers accept it."""
    checkpoints = _Place("checkpoints")
    """The folder of `last` and `best`."""
    last = _Place("checkpoints", "last.safetensors")
    """The newest checkpoint."""
    best = _Place("checkpoints", "best.safetensors")
    """The checkpoint with the best objective so far."""
    before_end = _Place("checkpoints", "before_end.safetensors")
    """The checkpoint of a longer run, where the end has ended an epoch or was evaluated."""
    forked = _Place("checkpoints", "fork.safetensors")
    """The checkpoint of another run that this one is a fork of, until it has its own."""
    evaluations = _Place("evaluations")
    """A folder for each later evaluation of its weights, with files named as a run's."""
    code = _Place("code")
    """Custom classes of a notebook or a script, as modules; see expt.config.kept_code."""
    tokenizer = _Place("tokenizer")
    """The files of the tokenizer of its texts."""
    trace = _Place("trace.json.gz")
    """The trace of a few steps by torch.profiler, for Perfetto."""
    operators = _Place("operators.txt")
    """The most expensive operators of the trace, as a table."""
    hydra = _Place(".hydra")
    """Hydra's config.yaml, overrides.yaml and hydra.yaml."""
    hydra_settings = _Place(".hydra", "hydra.yaml")
    """Hydra's own settings for the run, and where it looked for YAML."""
    overrides = _Place(".hydra", "overrides.yaml")
    """The words of the command that began the run, as Hydra keeps them."""

    def event_files(self) -> list[Path]:
        """Return TensorBoard's files: the run's, and those from before it was resumed."""
        return sorted(self.folder.glob(f"{EVENT_FILES}*"))

    @property
    def parts(self) -> list[Path]:
        """The folders of the parts of checkpoints that each worker has written."""
        return sorted(self.checkpoints.glob("step-*.parts"))

    def checkpoint(self, which: str) -> Path:
        """Return the file of `best`, `last`, `best-40`, ..."""
        return self.last.with_stem(which)

    def exported(self, format: str) -> Path:
        """Return the file of its model for other programs, or the folder for Hugging Face's."""
        names = {"torch_export": "model.pt2", "onnx": "model.onnx", "huggingface": "huggingface"}
        return self.folder / names[format]

    def write_hydra(self, files: Mapping[str, str]) -> None:
        """Write `.hydra`, from the text of each file by its name."""
        for name, text in files.items():
            self.hydra.mkdir(parents=True, exist_ok=True)
            (self.hydra / f"{name}.yaml").write_text(text, encoding="utf-8")

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
        """Return the file of lines that a worker printed."""
        return self.logs(attempt) / str(rank) / "stdout.log"

    def stderr(self, attempt: int, rank: int) -> Path:
        """Return the file of lines that a worker printed to stderr, its traceback included."""
        return self.logs(attempt) / str(rank) / "stderr.log"

    def error(self, attempt: int, rank: int) -> Path:
        """Return the file of the exception that ended a worker, as torch's `record` writes it."""
        return self.logs(attempt) / str(rank) / "error.json"

    def moved(self) -> str:
        """Return words on a folder that is gone while a run is at work there; "" if it is not."""
        if self.folder.is_dir():
            return ""
        again = "hydra.run.dir=FOLDER resume=auto continues it in another place"
        return f"{self.folder} was renamed or removed meanwhile; {again}"

    def is_new(self) -> bool:
        """Return whether the folder holds no file that is named as a run's, but Hydra's."""
        return {*self.found()} <= {self.hydra}

    def found(self, *, hidden: bool = True) -> list[Path]:
        """Return the files that have the name of one of a run, but for the lock."""
        places = (each for each in vars(RunPaths).values() if isinstance(each, _Place))
        names = {"logs", *(each.names[0] for each in places)} - {self.lock.name}
        found = [self.folder / name for name in sorted(names) if hidden or name[0] != "."]
        return [*filter(os.path.lexists, found), *self.event_files()]

    def holds_run(self) -> bool:
        """Return whether there is a record, a number, a checkpoint or a log of a run."""
        kept = self.result, self.metrics, self.overrides, self.checkpoints
        return any(map(Path.exists, kept)) or bool(self.attempts())

    def holds_only_refusal(self) -> bool:
        """Return whether the folder holds only the record of a run that could not start."""
        known = {self.result, self.lock, self.sent, self.code, self.tokenizer, *self.event_files()}
        return {*self.folder.iterdir()} <= known

    def has_trained(self) -> bool:
        """Return whether there is a checkpoint, or a number."""
        return self.checkpoints.exists() or self.num_bytes() > 0

    def num_bytes(self) -> int:
        """Return the size of metrics.jsonl."""
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def clear_records(self) -> None:
        """Remove the records of earlier attempts, but their logs, for a new beginning."""
        for path in (self.metrics, *self.event_files()):
            path.unlink(missing_ok=True)

    def remove_refused(self) -> None:
        """Remove the files of a run in a new folder that was refused before it began."""
        from expt.config import kept_code  # late: pydantic

        for folder in (*map(self.logs, self.attempts()), self.sent, self.tokenizer):
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # there is none, or it holds other files
            self.logs(0).parent.rmdir()
        kept_code.remove(self.code)
        self.result.unlink(missing_ok=True)
        self.clear_records()

    def remove_lock(self) -> None:
        """Remove the lock, which is empty, but no other file of this name."""
        if self.lock.is_file() and not (self.lock.is_symlink() or self.lock.stat().st_size):
            self.lock.unlink(missing_ok=True)

    def remove_checkpoints(self) -> None:
        """Remove all checkpoints: the run can then only start from the beginning."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged file, so that nothing reads it; return its new name."""
    names = (path.with_name(f"{path.name}.corrupt{number or ''}") for number in itertools.count())
    new = next(name for name in names if not name.exists())
    path.rename(new)
    return new


def write_atomically(path: Path, text: str, *, may_exist: bool = True) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the new one, never a part.

    Raises FileExistsError where there is an old one and none `may_exist`.
    """
    with written(path, may_exist=may_exist) as file:
        file.write(text.encode())


@contextlib.contextmanager
def written(path: Path, *, may_exist: bool = True, follow: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that takes the name `path` if the block ends well, and is removed if not.

    A link is replaced, unless to `follow` it. Raises FileExistsError then where there is an old one
    and none `may_exist`.
    """
    place = Path(os.path.realpath(path)) if follow else path
    temporary = place.with_name(f".tmp.{os.getpid()}.{path.name}")  # torch looks at the suffix
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if may_exist:
            temporary.replace(place)
        else:
            take_name(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


def take_name(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path`. Raises FileExistsError where there is such a file."""
    try:
        path.hardlink_to(temporary)  # unlike a rename it replaces nothing
    except FileExistsError:
        raise
    except OSError:  # a disk without hard links: the folder's lock has to do
        if path.exists():
            raise FileExistsError(path) from None
        temporary.replace(path)


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


def in_use(word: str) -> FolderInUse:
    """Return the error for the folder that a word names, in which another command is at work."""
    return FolderInUse(f"{word}: another command is at work there; wait for it")


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
                    raise in_use(f"hydra.run.dir={paths.folder}")
                time.sleep(0.02)
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir={paths.folder}: {error.strerror}; choose another folder"
            ) from error
        self.descriptor = descriptor
        """The file that keeps the lock as long as a process has it open."""

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
