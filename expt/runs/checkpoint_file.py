"""A checkpoint's files, without torch: their names, whether they are whole, all but the tensors.

The parts of a sharded checkpoint, one by each worker, are in a folder that it names.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from expt.errors import CheckpointError, ConfigError, RunFailed, first_line
from expt.runs import safetensors

T = TypeVar("T")
PARTS = "parts"
"""Key of a checkpoint: the name of the folder of its parts, and the checksum of each file there."""
TRIES = 5
"""Attempts to read a file that is replaced each time."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space, no quota, or a file larger than allowed."""


def read(path: Path) -> dict[str, Any]:
    """Return the header of a run's checkpoint, without weights and states.

    Raises CheckpointError for another file, or a damaged header; see `check`.
    """
    state = safetensors.File(path).state(without=("model", "ema", "optimizer", "workers"))
    if not {"position", "config"} <= state.keys():
        raise CheckpointError(f"{path}: is not a checkpoint of a run")
    return state


def check(path: Path) -> None:
    """Raise CheckpointError where a run's checkpoint, or a part of it, is not as it was written."""
    parts = parts_of(path, read(path).get(PARTS))
    safetensors.check(path)
    for file, digest in parts.items():
        if sha256_of(file) != digest:
            raise CheckpointError(f"{path}: {file}, a part of it, is truncated or damaged")


def damage_of(path: Path) -> CheckpointError | None:
    """Return the error of `check`; None where the file is as it was written."""
    try:
        check(path)
    except CheckpointError as error:
        return error
    return None


def read_steady(path: Path, read: Callable[[Path], T]) -> T:
    """Return the result of `read` for `path`; read again if a run has replaced the file meanwhile.

    Raises the error of `read` for a file that stays, or is replaced each time.
    """
    for _ in range(TRIES):
        before = stamp(path)
        try:
            return read(path)
        except (CheckpointError, OSError):
            if stamp(path) == before:
                raise
    return read(path)


def stamp(path: Path) -> tuple[int, int]:
    """Return numbers that differ between two files of one name; zeros where there is none."""
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return 0, 0


def candidates(last: Path) -> list[Path]:
    """Return `last` and the numbered files next to it that exist, newest first.

    Raises ConfigError where there are only those of an earlier version of expt.
    """
    beside = last.parent.glob(f"{last.stem}-*{last.suffix}")  # some may be a person's copies
    mine = (path for path in beside if path.stem.removeprefix(f"{last.stem}-").isdecimal())
    older = sorted(mine, key=lambda path: (len(path.name), path.name))
    found = [path for path in (last, *older) if path.exists()]
    if not found and (pickled := last.with_suffix(".pt")).exists():
        raise ConfigError(
            f"{pickled}: is of an earlier version of expt, and not read any more; start a new run,"
            f" which may begin with weights={pickled}"
        )
    return found


def numbered(path: Path, number: int) -> Path:
    """Return the name of another checkpoint next to `path`: an older one, or a best one's step."""
    return path.with_stem(f"{path.stem}-{number}")


def write(path: Path, by: Callable[[IO[bytes]], None], *, keep: int = 0) -> None:
    """Have `by` write a temporary file, and sync it before it replaces the one at `path`.

    `keep` older files stay, as NAME-1 (the newest) and so on. Raises RunFailed, with the old files
    as they were.
    """
    path.parent.mkdir(exist_ok=True)  # in a run's folder, which may have been renamed meanwhile
    with _replacing(path) as temporary:
        with temporary.open("wb") as file:
            by(file)
            file.flush()
            os.fsync(file.fileno())
        names = [path, *(numbered(path, number) for number in range(1, keep + 1))]
        for newer, older in reversed([*itertools.pairwise(names)]):
            if newer.exists():
                keep_as(newer, older)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file that replaces the one at `path` if the block ends well."""
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_in_words(path):
        temporary.unlink(missing_ok=True)
        try:
            yield temporary
            temporary.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        finally:
            temporary.unlink(missing_ok=True)


def keep_as(file: Path, name: Path) -> None:
    """Give a file a second `name`, so that it stays when its own is given to another.

    In another folder it has its parts, too.
    """
    if file.parent != name.parent:
        with disk_in_words(name):
            bring_parts(file, name.parent)
    with _replacing(name) as temporary:
        link(file, temporary)


def keep_among(last: Path, step: int, best: Path, steps: Sequence[int]) -> None:
    """Keep the file `last`, of `step`, among those of the best `steps`, and remove all others.

    The first of them is `best`, and any other `best-STEP`.
    """
    first, *others = steps
    if step == first and others and best.exists():  # until now the best
        keep_as(best, numbered(best, others[0]))
    keep_as(last, best if step == first else numbered(best, step))
    kept = {best, *(numbered(best, other) for other in others)}
    for file in {*candidates(best)} - kept:
        file.unlink()


def link(source: Path, target: Path) -> None:
    """Give a file a second name; where the disk has no links, make a copy."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


@contextlib.contextmanager
def disk_in_words(path: Path) -> Iterator[None]:
    """Raise RunFailed where `path` can't be written, for lack of space or of leave."""
    try:
        yield
    except FileNotFoundError:  # the folder is gone, which others say
        raise
    except (RuntimeError, OSError) as error:  # torch's word for a full disk is "unexpected pos"
        raise not_written(path, first_line(error)) from error


def not_written(path: Path, reason: str, what: str = "the checkpoint") -> RunFailed:
    """Return the error for a file that probably found no room on its disk."""
    if os.strerror(errno.EFBIG) in reason:
        fix = "files may not be so large here; raise the limit, by ulimit -f or of the file system"
    else:
        free_mb = shutil.disk_usage(path.parent).free / 1e6
        fix = f"is the disk full? {free_mb:.1f} MB are free; make room, or its folder writable, or"
        fix += " name one on another disk by hydra.run.dir"
    return RunFailed(f"{path}: {what} could not be written; {fix} ({reason[:200]})")


def parts_of(path: Path, parts: Mapping[str, Any] | None) -> dict[Path, str]:
    """Return the files that are `parts` of a checkpoint, and their checksums.

    Raises CheckpointError where one is missing, or would be elsewhere.
    """
    if parts is None:
        return {}
    if any("/" in name or name == ".." for name in (parts["folder"], *parts["files"])):
        raise CheckpointError(f"{path}: names parts outside of its folder")
    folder = path.parent / parts["folder"]
    if missing := [name for name in parts["files"] if not (folder / name).is_file()]:
        raise CheckpointError(f"{path}: {folder / missing[0]} is missing, which holds a part of it")
    return {folder / name: digest for name, digest in parts["files"].items()}


def parts_in(folder: Path) -> dict[str, Any]:
    """Return the entry of a checkpoint for the parts in `folder`."""
    files = {path.name: sha256_of(path) for path in sorted(folder.iterdir())}
    return {"folder": folder.name, "files": files}


def sha256_of(path: Path) -> str:
    """Return the checksum of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def bring_parts(path: Path, target: Path) -> None:
    """Link or copy the parts of a checkpoint, if it has any, into the folder `target`."""
    if (parts := read(path).get(PARTS)) is None:
        return
    files, goal = parts_of(path, parts), target / parts["folder"]
    if goal.exists():
        return
    temporary = goal.with_name(f".{goal.name}")  # until it is whole it is no folder of parts
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for file in files:
            link(file, temporary / file.name)
        temporary.rename(goal)
    except FileNotFoundError as error:  # a run under way has written another meanwhile
        raise CheckpointError(
            f"{error.filename}: is missing, which holds a part of a checkpoint"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def free_folder(checkpoints: Path, step: int) -> str:
    """Return a name for parts that no folder has yet."""
    names = (f"step-{step}{f'-{number}' if number else ''}.parts" for number in itertools.count())
    return next(name for name in names if not (checkpoints / name).exists())


def remove_unnamed(checkpoints: Path) -> None:
    """Remove the folders of parts that no checkpoint names; none where a checkpoint is damaged.

    A checkpoint that is set aside keeps its own, for missing ones may come back.
    """
    with contextlib.suppress(CheckpointError):
        every = [read(path).get(PARTS) for path in checkpoints.glob("*.safetensors")]
        for path in checkpoints.glob("*.safetensors.corrupt*"):
            with contextlib.suppress(CheckpointError):
                every.append(read(path).get(PARTS))
        named = {parts["folder"] for parts in every if parts}
        for folder in (*checkpoints.glob("step-*.parts"), *checkpoints.glob(".step-*.parts")):
            if folder.name not in named:
                shutil.rmtree(folder, ignore_errors=True)
