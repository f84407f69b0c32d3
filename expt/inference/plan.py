"""What is asked of a run's model, checked before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.errors import ConfigError, warn
from expt.inference.files import (
    ARRAYS,
    PICTURES,
    ROWS,
    TABLES,
    TEXTS,
    kind_of,
    list_files,
    open_samples,
)
from expt.runs.named_checkpoint import Which, found

SPLITS = ("train", "val", "test")


class Plan:
    """What is read, with what of a run; see `python -m expt predict --help`."""

    def __init__(
        self,
        run: Path,
        paths: Sequence[Path] = (),
        *,
        which: Which = "best",
        split: str | None = None,
        batch_size: int | None = None,
        device: str = "auto",
        amp: Any = "recorded",
        top: int | None = None,
    ) -> None:
        """Raise ConfigError for no run, and for samples that it does not take."""
        self.run, self.which, self.split, self.batch_size = run, which, split, batch_size
        self.device, self.amp, self.top = device, amp, top
        self.record, _ = found(run, which)
        self.config: RunConfig = recorded(self.record["config"])
        self._check(paths)
        dataset, data = self.config.dataset, self.data
        self.kind = kind_of(dataset, data)
        self.files = list_files(self.kind, paths)
        if self.kind is PICTURES and self.files and dataset.custom_class:
            warn(
                f"{dataset.custom_class}: what this class does to a picture is not known: it is"
                f" scaled to {data['image_size']}, counted in [0, 1] and normalised by dataset.mean"
                " and std; --split has its own"
            )
        several = TABLES if self.kind is ROWS else () if self.kind is TEXTS else ARRAYS
        of_several = [path for path in self.files if path.lower().endswith(several)]
        self.samples = [open_samples(path, self.kind, dataset, data) for path in of_several]
        """Of arrays and tables."""

    def _check(self, paths: Sequence[Path]) -> None:
        split, top, task = self.split, self.top, self.config.task
        if bool(paths) == bool(split):
            raise ConfigError(
                "name files or folders, or --split test for a part of the run's dataset"
            )
        there = [name for name in SPLITS if self.data.get(f"{name}_size")]
        if split is not None and split not in there:
            raise ConfigError(f"--split {split}: the run's dataset has {', '.join(there)}")
        if top is not None and task.TARGETS != "class":
            raise ConfigError(f"--top {top}: is of classes, and the task is {task.name}")
        if top is not None and not 1 <= top <= self.data["num_classes"]:
            raise ConfigError(f"--top {top}: the run has {self.data['num_classes']} classes")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"--batch-size {self.batch_size}: must be 1 or more")

    @property
    def data(self) -> dict[str, Any]:
        """What the record says of the run's dataset."""
        return self.record["data"]

    @property
    def total(self) -> int | None:
        """The number of samples, where it is known before they are read."""
        if self.split is not None:
            return int(self.data[f"{self.split}_size"])
        if self.samples:
            return sum(len(each.array) for each in self.samples)
        return len(self.files) if self.kind is PICTURES else None

    @property
    def noun(self) -> str:
        """What a sample is called."""
        if self.split is None:
            return self.kind.noun
        return str(type(self.config.dataset).noun(self.record["config"]["dataset"]))

    @property
    def target_names(self) -> Sequence[str]:
        """The names of what is predicted; none where the dataset has none."""
        if names := self.data.get("target_names"):
            return list(names)
        named = getattr(self.config.dataset, "targets", ())
        return [named] if isinstance(named, str) else list(named)

    @property
    def masks_root(self) -> str:
        """The folder below which all pictures lie, absolute."""
        if self.split is None:
            return os.path.commonpath([os.path.dirname(os.path.abspath(f)) for f in self.files])
        root = os.path.abspath(getattr(self.config.dataset, "root", ""))
        part = os.path.join(root, self.split)
        return os.path.join(part if os.path.isdir(part) else os.path.join(root, "train"), "images")
