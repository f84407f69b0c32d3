"""What is asked of a run's model, checked before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.errors import ConfigError, warn
from expt.inference.files import (
    ARRAYS,
    PICTURES,
    ROWS,
    TEXTS,
    Kind,
    Samples,
    kind_of,
    list_files,
    open_samples,
)
from expt.runs.named_checkpoint import Which, found
from expt.runs.result import Record

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is read, with what of a run; see `python -m expt predict --help`."""

    run: Path
    which: Which
    split: str | None
    batch_size: int | None
    device: str
    amp: Any
    """See Amp of expt.inference.load."""
    top: int | None
    record: Record
    config: RunConfig
    kind: Kind
    files: list[str]
    samples: list[Samples]
    """Of arrays and tables."""

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


def plan(
    run: Path,
    paths: Sequence[Path] = (),
    *,
    which: Which = "best",
    split: str | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    amp: Any = "recorded",
    top: int | None = None,
) -> Plan:
    """Return the plan. Raise ConfigError for no run, and for samples that it does not take."""
    record, _ = found(run, which)
    config, data = recorded(record["config"]), record["data"]
    if bool(paths) == bool(split):
        raise ConfigError("name files or folders, or --split test for a part of the run's dataset")
    there = [name for name in SPLITS if data.get(f"{name}_size")]
    if split is not None and split not in there:
        raise ConfigError(f"--split {split}: the run's dataset has {', '.join(there)}")
    if top is not None and config.task.TARGETS != "class":
        raise ConfigError(f"--top {top}: is of classes, and the task is {config.task.name}")
    if top is not None and not 1 <= top <= data["num_classes"]:
        raise ConfigError(f"--top {top}: the run has {data['num_classes']} classes")
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"--batch-size {batch_size}: must be 1 or more")
    kind = kind_of(config.dataset, data)
    files = list_files(kind, paths)
    if kind is PICTURES and files and config.dataset.custom_class:
        warn(
            f"{config.dataset.custom_class}: what this class does to a picture is not known: it"
            f" is scaled to {data['image_size']}, counted in [0, 1] and normalised by dataset.mean"
            " and std; --split has its own"
        )
    several = kind is not TEXTS and [f for f in files if kind is ROWS or f.lower().endswith(ARRAYS)]
    return Plan(
        run=run,
        which=which,
        split=split,
        batch_size=batch_size,
        device=device,
        amp=amp,
        top=top,
        record=record,
        config=config,
        kind=kind,
        files=files,
        samples=[open_samples(path, kind, config.dataset, data) for path in several or ()],
    )
