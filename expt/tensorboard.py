"""TensorBoard: one writer and one event file a run, and every tag's name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expt.paths import RunPaths

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LR = "lr"
SAMPLES_PER_S = "speed/samples_per_s"
EPOCH_S = "speed/epoch_s"
DATA_WAIT_S = "speed/data_wait_s"
"""Seconds of the epoch that rank 0 waited for its next batch."""
SKIPPED_STEPS = "skipped_steps"
"""Steps left out so far, because a loss or gradient was not finite (`on_nan=skip`)."""


def loss(split: str) -> str:
    """Tag of the mean loss on `split`: train, val or test."""
    return f"loss/{split}"


def accuracy(split: str) -> str:
    """Tag of the fraction of `split` classified correctly."""
    return f"accuracy/{split}"


def best(objective: str) -> str:
    """Tag of the best value so far of the tag `objective`."""
    return f"best/{objective}"


class Writer:
    """Rank 0's event file in the run folder; `continued_at` hides what older files there hold after that step."""

    def __init__(
        self,
        folder: Path,
        hyperparameters: Mapping[str, bool | int | float | str],
        tags: Sequence[str],
        *,
        continued_at: int | None = None,
    ) -> None:
        self._folder, self._continued_at = folder, continued_at
        self._hyperparameters, self._tags = dict(hyperparameters), tags
        self._writer: SummaryWriter | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one value to each tag."""
        for tag, value in values.items():
            self._open().add_scalar(tag, value, step)

    def flush(self) -> None:
        """Let a running TensorBoard see what was written."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, *, complete: bool = True) -> None:
        """Write what is left; the HPARAMS tab then says that the run is `complete`."""
        if complete:
            self._summarise(2)
        if self._writer is not None:
            self._writer.close()

    def _summarise(self, *parts: int) -> None:
        """Add the HPARAMS tab's description of the run (parts 0 and 1), or of its end (2)."""
        # SummaryWriter.add_hparams would make a second run of it, in a folder below (pytorch issue 32651).
        from torch.utils.tensorboard.summary import hparams

        summaries = hparams(self._hyperparameters, dict.fromkeys(self._tags, 0.0))
        for part in parts:
            self._open()._get_file_writer().add_summary(summaries[part])

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            # Imported at the first log point: 0.3 s that the first step need not wait for.
            from torch.utils.tensorboard import SummaryWriter

            if self._continued_at is None:
                self._writer = SummaryWriter(str(self._folder))
                self._summarise(0, 1)
            else:
                _let_the_second_pass(self._folder)
                self._writer = SummaryWriter(str(self._folder), purge_step=self._continued_at + 1)
        return self._writer


def _let_the_second_pass(folder: Path) -> None:
    """TensorBoard reads event files by the second in their names: a file that continues another must have a later."""
    seconds = [int(path.name.split(".")[3]) for path in RunPaths(folder).event_files()]
    while seconds and int(time.time()) <= max(seconds):
        time.sleep(0.01)
