"""Writes checkpoints of which each worker has a part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from expt.errors import CheckpointError
from expt.runs import checkpoint, checkpoint_file, parts, parts_folder


class ShardedWriter(checkpoint.InThread):
    """One worker's side of it.

    The file that names the parts is written last, by rank 0: until then the checkpoint before it
    stands."""

    def __init__(self, last: Path, best: Path, *, keep: int, group: Any) -> None:
        """`group` is a process group of gloo's that nothing else uses."""
        super().__init__(last, best, keep=keep)
        self._group = group

    def save(
        self,
        state: Mapping[str, Any] | None,
        tensors: Mapping[str, Tensor],
        folder: str,
        *,
        is_best: bool = False,
        keeps_best: bool = False,
        target: Path | None = None,
    ) -> None:
        """Return while `tensors`, of all workers, are written into `folder`; then rank 0's `state`,
        as `target`.

        None for that is the last checkpoint. The others give no `state`. See checkpoint.Writer for
        the best."""
        self._begin(self._write, state, tensors, folder, is_best, keeps_best, target)

    def _write(
        self,
        state: Mapping[str, Any] | None,
        tensors: Mapping[str, Tensor],
        name: str,
        is_best: bool,
        keeps_best: bool,
        target: Path | None,
    ) -> None:
        folder = self._last.parent / name
        try:
            with checkpoint_file.full_disk_in_words(folder):
                parts.write(folder, tensors, self._group)
            if state is None:
                return
            known = {**state, parts_folder.PARTS: parts_folder.described(folder)}
            if target is not None:
                checkpoint.save(target, known)
            else:
                checkpoint.publish(
                    known,
                    self._last,
                    self._best,
                    keep=self._keep,
                    is_best=is_best,
                    keeps_best=keeps_best,
                )
            checkpoint_file.remove_unnamed(self._last.parent)
        except Exception as error:
            self._error = error
        except (
            BaseException
        ) as error:  # torch's CheckpointException, which says what happened to each worker, is none
            told = str(error).strip().splitlines() or [type(error).__name__]
            self._error = CheckpointError(checkpoint_file.not_written(folder, told[-1]))
        if self._error and state is not None:
            checkpoint_file.remove_unnamed(
                self._last.parent
            )  # what is half written takes room, and nothing names it
