"""Checkpoints: written atomically with a checksum beside, loaded with weights_only, holding all a resumed run needs."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from expt.errors import CheckpointError
from expt.runs import parts

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space, no quota, or a file larger than allowed."""


def save(path: Path, state: Mapping[str, Any], *, keep: int = 0) -> None:
    """Write `state` beside `path`, sync it to the disk, and only then take the place of the old file.

    `keep` older files stay, as NAME-1 (the newest) and so on. Raises CheckpointError, with the old files as they were.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    with full_disk_in_words(path), _removed_at_end(beside):
        _write(beside, state)
        digest = parts.sha256_of(beside)
        for number in range(keep, 0, -1):
            if older(path, number - 1).exists():
                keep_as(older(path, number - 1), older(path, number))
        _publish(beside, path, [digest])
        _sync_folder(path.parent)


def _write(beside: Path, state: Mapping[str, Any]) -> None:
    torch.save(state, str(beside))  # by name: torch then writes without holding up the training thread
    with beside.open("rb+") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def full_disk_in_words(path: Path) -> Iterator[None]:
    """Raise CheckpointError where there is no space for `path`."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in FULL:
            raise
        # Of a RuntimeError: torch's word for a full disk is "unexpected pos".
        raise CheckpointError(not_written(path, str(error).splitlines()[0])) from error


def not_written(path: Path, reason: str) -> str:
    """What to tell of a checkpoint that probably found no room on its disk."""
    free_mb = shutil.disk_usage(path.parent).free / 1e6
    before = "The checkpoint before it is kept" if any(path.parent.glob("*.pt")) else "There is none before it"
    return (
        f"{path}: the checkpoint could not be written; is the disk full? {free_mb:.1f} MB are free. {before}. Make "
        f"room, or name a folder on another disk by hydra.run.dir. ({reason[:200]})"
    )


@contextlib.contextmanager
def _removed_at_end(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def keep_as(last: Path, best: Path) -> None:
    """Give the file `last` the second name `best`; the next `last` is another file.

    In another folder it has its parts, too.
    """
    if last.parent != best.parent and (own := load(last, lazily=True).get(parts.PARTS)):
        with full_disk_in_words(best):
            parts.bring(own, last.parent, best.parent)
    beside = best.with_name(f".{best.name}.tmp")
    beside.unlink(missing_ok=True)
    with full_disk_in_words(best), _removed_at_end(beside):
        try:
            os.link(last, beside)
        except OSError:  # another disk, or one without links
            shutil.copyfile(last, beside)
        _publish(beside, best, _digests(last))
        _sync_folder(best.parent)


def load(path: Path, *, lazily: bool = False, without: Collection[str] = ()) -> dict[str, Any]:
    """The state that `save` wrote, on the CPU; `lazily` leaves tensors on the disk. No pickled code is run.

    Of a sharded checkpoint, too, unless `lazily`: that has keys in their places, see expt.runs.parts. Of that nothing
    is read of the keys `without`.
    """
    # Given explicitly: the environment can turn the default off.
    state: dict[str, Any] = torch.load(str(path), map_location="cpu", weights_only=True, mmap=lazily)
    return state if lazily else parts.filled(path, state, without=without)


def check(path: Path) -> None:
    """Raise CheckpointError if `path` isn't what was written there: truncated, changed, or no checkpoint at all."""
    digests = _digests(path)
    if digests and parts.sha256_of(path) not in digests:
        raise CheckpointError(f"{path}: is truncated or damaged, its checksum is not that of {_sidecar(path).name}")
    try:
        state = load(path, lazily=True)
    except Exception as error:  # EOFError, RuntimeError, UnpicklingError, UnicodeDecodeError, ...
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}), it is truncated or damaged") from error
    if not isinstance(state, dict) or not {"model", "position", "config", "workers"} <= state.keys():
        raise CheckpointError(f"{path}: is not a checkpoint of this version of expt")
    parts.check(path, state)


def candidates(last: Path) -> list[Path]:
    """`last` and the older ones beside it that exist, newest first."""
    older = sorted(last.parent.glob(f"{last.stem}-*{last.suffix}"), key=lambda path: (len(path.name), path.name))
    return [path for path in (last, *older) if path.exists()]


def set_aside(path: Path) -> Path:
    """Rename a file that is no good, so that nothing takes it for a checkpoint; returns its new name."""
    names = (path.with_name(f"{path.name}.corrupt{number or ''}") for number in itertools.count())
    new = next(name for name in names if not name.exists())
    path.rename(new)
    with contextlib.suppress(FileNotFoundError):
        _sidecar(path).rename(_sidecar(new))
    return new


class InThread:
    """Writes in a thread, from a copy, one at a time; a failure is raised by the next call."""

    def __init__(self, last: Path, best: Path, *, keep: int) -> None:
        self._last, self._best, self._keep = last, best, keep
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def wait(self) -> None:
        """Return when nothing is being written any more. Raises what went wrong."""
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._error:
            raise self._error

    def _begin(self, write: Callable[..., None], *arguments: Any) -> None:
        """Call `write`, which keeps what goes wrong as `_error`, once nothing is being written."""
        self.wait()
        self._thread = threading.Thread(target=write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()


class Writer(InThread):
    """Writes whole checkpoints."""

    def save(self, state: Mapping[str, Any], *, is_best: bool, keeps_best: bool = False, owned: bool = False) -> None:
        """Copy `state` and return; training may change it at once. What is `owned` is nobody else's: not copied.

        With `keeps_best` the best before it stays, under the name of an older one.
        """
        self.wait()
        copy = state if owned else _copied(state)
        copied = torch.cuda.Event() if torch.cuda.is_initialized() else None
        if copied:
            copied.record()
        self._begin(self._write, copy, copied, is_best, keeps_best, _gpu())

    def _write(
        self,
        state: Mapping[str, Any],
        copied: torch.cuda.Event | None,
        is_best: bool,
        keeps_best: bool,
        gpu: int | None,
    ) -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)  # a thread begins with the first one, and would take memory there
            if copied:
                copied.synchronize()
            publish(state, self._last, self._best, keep=self._keep, is_best=is_best, keeps_best=keeps_best)
        except Exception as error:
            self._error = error


def publish(state: Mapping[str, Any], last: Path, best: Path, *, keep: int, is_best: bool, keeps_best: bool) -> None:
    """Save `state` as `last`, and as `best` where it is; with `keeps_best` the best before it stays, as an older."""
    save(last, state, keep=keep)
    if is_best and keeps_best and best.exists():
        keep_as(best, older(best, 1))
    if is_best:
        keep_as(last, best)


def _gpu() -> int | None:
    """The GPU that this thread uses."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _copied(value: Any) -> Any:
    """A copy of nested containers with their tensors; those of a GPU in pinned memory, under way."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "cuda":
            pinned = torch.empty_like(value, device="cpu", pin_memory=True)
            return pinned.copy_(value.detach(), non_blocking=True)
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value


def older(path: Path, number: int) -> Path:
    """The name of the file that `path` was before so many others."""
    return path.with_stem(f"{path.stem}-{number}") if number else path


def _publish(beside: Path, path: Path, digests: list[str]) -> None:
    """Give `beside` the name `path`; at no moment does the file beside it not list the checksum of `path`."""
    _write_digests(path, [*digests, *(_digests(path) if path.exists() else [])])
    beside.replace(path)
    _write_digests(path, digests)


def _sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _digests(path: Path) -> list[str]:
    """The checksums that `path` may have, none where nothing is known; see `_publish`."""
    try:
        return [line.split()[0] for line in _sidecar(path).read_text(encoding="ascii").splitlines() if line.strip()]
    except (OSError, ValueError):
        return []


def _write_digests(path: Path, digests: list[str]) -> None:
    sidecar = _sidecar(path)
    beside = sidecar.with_name(f".{sidecar.name}.tmp")
    with _removed_at_end(beside):
        beside.write_text("".join(f"{digest}  {path.name}\n" for digest in digests), encoding="ascii")
        beside.replace(sidecar)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
