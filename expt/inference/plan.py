"""What is asked of a run's model, checked before torch is imported."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expt import machine
from expt.config.datasets import noun_of
from expt.config.parse import recorded
from expt.config.schema import RunConfig
from expt.errors import ConfigError, warn
from expt.inference import arrays, sources
from expt.inference.arrays import Samples
from expt.inference.sources import Kind
from expt.inference.table_rows import Features
from expt.runs.named_checkpoint import Which, found
from expt.runs.result import Record

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """As a person asks; see `python -m expt predict --help`."""

    run: Path
    paths: tuple[Path, ...] = ()
    split: str | None = None
    which: Which = "best"
    batch_size: int | None = None
    device: str = "auto"
    amp: Any = "recorded"
    """see Amp of expt.inference.load"""
    top: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be read, and what is known of the run."""

    asked: Asked
    record: Record
    config: RunConfig
    kind: Kind
    files: list[str]
    samples: list[Samples]
    """of the files that hold arrays"""
    features: Features | None
    """of tables"""

    @property
    def data(self) -> dict[str, Any]:
        """What the record says of the run's dataset."""
        return self.record["data"]

    @property
    def total(self) -> int | None:
        """How many samples there are, where that is known before they are read."""
        if self.asked.split is not None:
            return int(self.data[f"{self.asked.split}_size"])
        if self.samples:
            return sum(len(each.array) for each in self.samples)
        return len(self.files) if self.kind is sources.PICTURES else None

    @property
    def masks_root(self) -> str:
        """The folder below which all pictures lie, absolute."""
        if self.asked.split is None:
            return os.path.commonpath(
                [os.path.dirname(os.path.abspath(path)) for path in self.files]
            )
        part = os.path.join(
            os.path.abspath(getattr(self.config.dataset, "root", "")), self.asked.split
        )
        return os.path.join(
            part if os.path.isdir(part) else os.path.join(os.path.dirname(part), "train"), "images"
        )

    @property
    def noun(self) -> str:
        """What a sample is called."""
        return noun_of(self.record) if self.asked.split is not None else self.kind.noun


def plan(asked: Asked) -> Plan:
    """Raises ConfigError for a run that is none, and for what its model can't be asked about."""
    record, _ = found(asked.run, asked.which)
    config = recorded(record["config"])
    kind = sources.kind_of(config.dataset, record["data"])
    if bool(asked.paths) == bool(asked.split):
        also = ", not both" if asked.split else ""
        raise ConfigError(
            f"name files or folders, or --split test for a part of the run's own dataset{also}"
        )
    if asked.split is not None:
        _check_split(asked.split, record)
    _check_top(asked.top, config, record)
    _check_device(asked.device)
    if asked.batch_size is not None and asked.batch_size < 1:
        raise ConfigError(f"--batch-size {asked.batch_size}: must be 1 or more")
    files = sources.listed(kind, asked.paths, trained_on=f"dataset={_called(record)}")
    if kind is sources.PICTURES and files:
        _warn_of_own_pictures(config, record)
    features = _features(config, record["data"]) if kind is sources.ROWS else None
    if features is not None:
        for path in files:
            features.check(path)
    chosen = Plan(
        asked=asked,
        record=record,
        config=config,
        kind=kind,
        files=files,
        samples=[],
        features=features,
    )
    return dataclasses.replace(
        chosen, samples=[_samples(chosen, path) for path in files if _is_array(kind, path)]
    )


def _called(record: Record) -> str:
    dataset = record["config"]["dataset"]
    return str(dataset.get("target") or dataset.get("_target_") or dataset.get("name"))


def _warn_of_own_pictures(config: RunConfig, record: Record) -> None:
    if config.dataset.custom_class:
        size = "x".join(map(str, record["data"]["image_size"]))
        warn(
            f"{config.dataset.custom_class}: what this class does to a picture is not known here: it is"
            f" scaled to {size}, counted in [0, 1] and normalised by dataset.mean and std; --split"
            " has its own"
        )


def _is_array(kind: Kind, path: str) -> bool:
    return (
        kind is not sources.ROWS
        and kind is not sources.TEXTS
        and Path(path).suffix.lower() in sources.ARRAYS
    )


def _samples(plan: Plan, path: str) -> Samples:
    array = arrays.opened(path)
    if array.ndim < 2 or not len(array):
        raise ConfigError(
            f"{path}: is {list(array.shape)}; give an array of samples, [samples, ...]"
        )
    if plan.kind is sources.SAMPLES:
        return arrays.any_samples(path, array, plan.data)
    own = plan.config.dataset.custom_class  # whose pixels may be anything
    return arrays.images(path, array, plan.data, in_unit_range=not own)


def _features(config: RunConfig, data: dict[str, Any]) -> Features:
    dataset: Any = config.dataset  # of rows
    number = data["image_size"][1]
    names = list(data.get("feature_names", ()))
    if (
        not names and dataset.standardise
    ):  # a record of before features had names has those of their means
        names = list(data["standardised"])[:number]
    targets: Any = data.get("target_names") or getattr(dataset, "targets", "progression")
    return Features(names, (targets,) if isinstance(targets, str) else targets, number)


def _check_split(split: str, record: Record) -> None:
    there = [name for name in SPLITS if record["data"].get(f"{name}_size")]
    if split not in SPLITS:
        raise ConfigError(f"--split {split}: not one of {', '.join(SPLITS)}")
    if split not in there:
        raise ConfigError(
            f"--split {split}: the run's dataset has no such part; it has {', '.join(there)}"
        )


def _check_top(top: int | None, config: RunConfig, record: Record) -> None:
    if top is None:
        return
    if config.task.TARGETS != "class":
        raise ConfigError(
            f"--top {top}: is of classes, and the run's task is {config.task.name}; leave it out"
        )
    number = record["data"]["num_classes"]
    if not 1 <= top <= number:
        raise ConfigError(f"--top {top}: the run has {number} classes; use 1 to {number}")


def _check_device(device: str) -> None:
    known = re.fullmatch(r"auto|cpu|mps|cuda(?::(\d+))?", device)
    if not known:
        raise ConfigError(
            f"--device {device}: not one of auto, cpu, cuda, cuda:0, cuda:1, ..., mps"
        )
    gpus = len(machine.visible_gpus()) if device.startswith("cuda") else 1
    if int(known[1] or 0) >= gpus:
        raise ConfigError(
            f"--device {device}: this machine shows {gpus} GPUs; use --device cpu, or another of"
            " them"
        )
