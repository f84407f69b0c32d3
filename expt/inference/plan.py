"""What is asked of a run's model, checked before torch is imported."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expt import machine
from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.errors import ConfigError, warn
from expt.inference.files import (
    ARRAYS,
    PICTURES,
    ROWS,
    SAMPLES,
    Features,
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
class Asked:
    """What a person asks; see `python -m expt predict --help`."""

    run: Path
    paths: tuple[Path, ...] = ()
    split: str | None = None
    which: Which = "best"
    batch_size: int | None = None
    device: str = "auto"
    amp: Any = "recorded"
    """See Amp of expt.inference.load."""
    top: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is read, and what is known of the run."""

    asked: Asked
    record: Record
    config: RunConfig
    kind: Kind
    files: list[str]
    samples: list[Samples]
    """Of the files that hold arrays."""
    features: Features | None
    """Of tables."""

    @property
    def data(self) -> dict[str, Any]:
        """What the record says of the run's dataset."""
        return self.record["data"]

    @property
    def total(self) -> int | None:
        """The number of samples, where it is known before they are read."""
        if self.asked.split is not None:
            return int(self.data[f"{self.asked.split}_size"])
        if self.samples:
            return sum(len(each.array) for each in self.samples)
        return len(self.files) if self.kind is PICTURES else None

    @property
    def noun(self) -> str:
        """What a sample is called."""
        if self.asked.split is None:
            return self.kind.noun
        return str(type(self.config.dataset).noun(self.record["config"]["dataset"]))

    @property
    def target_names(self) -> Sequence[str]:
        """The names of what is predicted; none where the dataset has none."""
        if names := self.data.get("target_names"):
            return list(names)
        named = getattr(self.config.dataset, "targets", ())
        return [named] if isinstance(named, str) else list(named)


def plan(asked: Asked) -> Plan:
    """Return the plan. Raise ConfigError for no run, and for samples that it does not take."""
    record, _ = found(asked.run, asked.which)
    config, data = recorded(record["config"]), record["data"]
    _check(asked, config, data)
    kind = kind_of(config.dataset, data)
    files = list_files(kind, asked.paths)
    is_array = [Path(path).suffix.lower() in ARRAYS for path in files]
    arrays = [*itertools.compress(files, is_array)] if kind in (PICTURES, SAMPLES) else []
    features = None
    if kind is ROWS:
        number, targets = data["image_size"][1], data.get("target_names", ())
        features = Features(data.get("feature_names", ()), targets, number)
        for path in files:
            features.check(path)
    if kind is PICTURES and files and config.dataset.custom_class:
        warn(
            f"{config.dataset.custom_class}: what this class does to a picture is not known: it"
            f" is scaled to {data['image_size']}, counted in [0, 1] and normalised by dataset.mean"
            " and std; --split has its own"
        )
    samples = [open_samples(path, kind, config.dataset, data) for path in arrays]
    return Plan(
        asked=asked,
        record=record,
        config=config,
        kind=kind,
        files=files,
        samples=samples,
        features=features,
    )


def _check(asked: Asked, config: RunConfig, data: dict[str, Any]) -> None:
    if bool(asked.paths) == bool(asked.split):
        raise ConfigError("name files or folders, or --split test for a part of the run's dataset")
    there = [name for name in SPLITS if data.get(f"{name}_size")]
    if asked.split is not None and asked.split not in there:
        raise ConfigError(f"--split {asked.split}: the run's dataset has {', '.join(there)}")
    if asked.top is not None and config.task.TARGETS != "class":
        raise ConfigError(f"--top {asked.top}: is of classes, and the task is {config.task.name}")
    if asked.top is not None and not 1 <= asked.top <= data["num_classes"]:
        raise ConfigError(f"--top {asked.top}: the run has {data['num_classes']} classes")
    if asked.batch_size is not None and asked.batch_size < 1:
        raise ConfigError(f"--batch-size {asked.batch_size}: must be 1 or more")
    known = re.fullmatch(r"auto|cpu|mps|cuda(?::(\d+))?", asked.device)
    gpus = len(machine.visible_gpus()) if asked.device.startswith("cuda") else 1
    if not known or int(known[1] or 0) >= gpus:
        raise ConfigError(
            f"--device {asked.device}: use auto, cpu, mps, or cuda:N of the {gpus} GPUs here"
        )


def masks_root(plan: Plan) -> str:
    """Return the folder below which all pictures lie, absolute."""
    if plan.asked.split is None:
        return os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in plan.files])
    root = os.path.abspath(getattr(plan.config.dataset, "root", ""))
    part = os.path.join(root, plan.asked.split)
    return os.path.join(part if os.path.isdir(part) else os.path.join(root, "train"), "images")
