"""Checkpoints: written atomically with a checksum beside, loaded with weights_only, holding all a
resumed run needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from expt.runs import checkpoint_file, parts
from expt.runs.checkpoint_file import keep_as, older


def save(path: Path, state: Mapping[str, Any], *, keep: int = 0) -> None:
    """Write `state` as `expt.runs.checkpoint_file.write` does."""
    # By name: torch then writes without holding up the training thread.
    checkpoint_file.write(path, lambda beside: torch.save(state, str(beside)), keep=keep)


def load(path: Path, *, lazily: bool = False, without: Collection[str] = ()) -> dict[str, Any]:
    """The state that `save` wrote, on the CPU; `lazily` leaves tensors on the disk.

    No pickled code is run.

    Of a sharded checkpoint, too, unless `lazily`: that has keys in their places, see
    expt.runs.parts. Of that nothing is read of the keys `without`."""
    # Given explicitly: the environment can turn the default off.
    state: dict[str, Any] = torch.load(
        str(path), map_location="cpu", weights_only=True, mmap=lazily
    )
    return state if lazily else parts.filled(path, state, without=without)


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
        self._thread = threading.Thread(
            target=write, args=arguments, name="checkpoint", daemon=True
        )
        self._thread.start()


class Writer(InThread):
    """Writes whole checkpoints."""

    def save(
        self,
        state: Mapping[str, Any],
        *,
        is_best: bool,
        keeps_best: bool = False,
        owned: bool = False,
    ) -> None:
        """Copy `state` and return; training may change it at once.

        What is `owned` is nobody else's: not copied.

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
                torch.cuda.set_device(
                    gpu
                )  # a thread begins with the first one, and would take memory there
            if copied:
                copied.synchronize()
            publish(
                state,
                self._last,
                self._best,
                keep=self._keep,
                is_best=is_best,
                keeps_best=keeps_best,
            )
        except Exception as error:
            self._error = error


def publish(
    state: Mapping[str, Any], last: Path, best: Path, *, keep: int, is_best: bool, keeps_best: bool
) -> None:
    """Save `state` as `last`, and as `best` where it is; with `keeps_best` the best before it
    stays, as an older.
    """
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
