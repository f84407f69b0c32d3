"""TensorBoard: one writer and one event file a run, and every tag's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LR = "lr"
SAMPLES_PER_S = "speed/samples_per_s"
EPOCH_S = "speed/epoch_s"


def loss(split: str) -> str:
    """Tag of the mean loss on `split`: train, val or test."""
    return f"loss/{split}"


def accuracy(split: str) -> str:
    """Tag of the fraction of `split` classified correctly."""
    return f"accuracy/{split}"


class Writer:
    """Rank 0's event file in the run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one value to each tag."""
        for tag, value in values.items():
            self._open().add_scalar(tag, value, step)

    def flush(self) -> None:
        """Let a running TensorBoard see what was written."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            # Imported at the first log point: 0.3 s that the first step need not wait for.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        return self._writer
