"""Plan a prediction: which samples the models of runs are applied to; free of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from expt.config.constraints import plain, word
from expt.config.keys import varying
from expt.data.folders import parts_there
from expt.errors import ConfigError
from expt.features import Feature
from expt.inference.tables import inputs_of
from expt.runs.request import Trained
from expt.runs.tags import SPLITS

_NOT_OF_TEST = ("val_fraction", "train_limit", "folds", "fold")
"""Keys of held out samples that leave the test set as it is."""
_SHOWN = 120
"""The longest description of a feature [characters]."""


class Plan:
    """The plan of a prediction; see `python -m expt predict --help`."""

    def __init__(
        self,
        runs: Sequence[tuple[Path, str]],
        paths: Sequence[Path] = (),
        *,
        flips: bool = False,
        split: str | None = None,
        batch_size: int | None = None,
        device: str = "auto",
        amp: Any = "recorded",
        top: int | None = None,
        texts: Sequence[str] = (),
        trust_code: bool = False,
    ) -> None:
        """Raise ConfigError for no run, unlike ones, and samples that they do not take.

        The `runs` are folders, each with a checkpoint.
        """
        self.split, self.batch_size, self.flips = split, batch_size, flips
        self.device, self.amp, self.trust_code = device, amp, trust_code
        self.runs = [Trained.read(*run) for run in runs]
        self.run, _, self.config, self.record = self.runs[0]
        self.data: dict[str, Any] = self.record["data"]
        self.features = self.runs[0].features
        self._check([*paths, *texts])
        check_together(self.runs, split, flips=flips)
        form = self.config.task.outputs(self.features.targets)
        self.form: Feature = form if top is None else form.likeliest(top)
        self.ways, self.rounds = shared(self.runs, split)
        first = ((way, self.runs[way]) for way in dict.fromkeys(self.ways))
        self.readers = {way: inputs_of(run.config.dataset, run.features) for way, run in first}
        for reader in self.readers.values():
            if texts:
                reader.take(texts)
            if paths:
                reader.open(paths)
        self.inputs = self.readers[0]

    def _check(self, paths: Sequence[object]) -> None:
        split = self.split
        if bool(paths) == bool(split):
            raise ConfigError(
                "name files or folders, or --split test for a part of the run's dataset"
            )
        there = [name for name in SPLITS if self.data.get(f"{name}_size", 0) != 0]
        if split is not None and split not in there:
            raise ConfigError(f"--split {split}: the run's dataset has {', '.join(there)}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"--batch-size {self.batch_size}: must be 1 or more")

    @property
    def total(self) -> int | None:
        """The number of samples, where it is known before they are read."""
        return self.inputs.size if self.split is None else self.data[f"{self.split}_size"]

    @property
    def noun(self) -> str:
        """The noun for a sample."""
        return self.inputs.noun if self.split is None else self.features.inputs.noun

    @property
    def masks_root(self) -> str:
        """The folder below which all pictures lie, absolute."""
        if self.split is None:
            folders = (os.path.dirname(os.path.abspath(file)) for file in self.inputs.files)
            return os.path.commonpath([*folders])
        root = os.path.abspath(getattr(self.config.dataset, "root", ""))
        parts = {"train": Path(root)} | parts_there(root)
        return str(parts.get(self.split, parts["train"]) / "images")


def check_together(runs: Sequence[Trained], split: str | None, *, flips: bool = False) -> None:
    """Raise ConfigError, naming a run, for runs of other features than the first.

    Of a `split` of their dataset all must have the same samples, but for the folds of val. With
    `flips` inputs must be images.
    """
    first, *others = runs
    inputs, targets = first.features
    if flips and not (inputs.is_image and targets.each in ("sample", "pixel")):
        raise ConfigError(
            f"--flips: {first.run} takes {_shown(inputs)} and predicts {_shown(targets)}; only"
            " images are flipped, and the outputs of a custom task are not; leave it out"
        )
    for one in others:
        values = _values(first, split)
        for name, own in _values(one, split).items():
            if own != values[name]:
                has, wanted = (shorten(str(value), _SHOWN) for value in (own, values[name]))
                raise ConfigError(
                    f"{one.run}: has the {name} {has}, and {first.run} {wanted}; they have no mean:"
                    f" name runs of equal {name}, or one at a time"
                )


def _values(run: Trained, split: str | None) -> Mapping[str, Any]:
    """Return the values, by name, in which runs must be equal."""
    inputs, targets = run.features
    # Without these fields, such as a column or a transform, equal numbers mean something else.
    fields = vars(targets).items()
    meaning = [f"{key} {x}" for key, x in fields if type(x) in (str, int) and x != ""]
    found = {
        "task": word(run.config.task),
        "inputs": _shown(inputs),
        "targets": _shown(targets, meaning),
        "standardised targets": ", ".join(targets.scales) or None,
    }
    if targets.each == "token":  # those of another tokenizer are other texts
        found["tokenizer"] = getattr(inputs, "digest", getattr(run.config.dataset, "tokens", None))
    if split is None:
        return found
    left_out = _NOT_OF_TEST if split in ("test", "all") else ("fold",) if split == "val" else ()
    for key in varying("split", "repetition"):
        group, _, name = key.partition(".")
        if group == "dataset" and name not in left_out:
            found[key] = getattr(run.config.dataset, name, None)
    return {**found, "data": run.record.get("content", {}).get("data")}


def _shown(feature: Feature, more: Sequence[str] = ()) -> str:
    sizes = (f"{key} {size}" for key, size in feature.shapes.items())
    return f"{type(feature).__name__.lower()} ({', '.join([*(feature.names or sizes), *more])})"


def shared(runs: Sequence[Trained], split: str | None) -> tuple[list[int], list[list[int]]]:
    """Return the number of the run whose prepared samples each takes, and those read together.

    Of val, where runs have held out several folds, one fold is read after the other.
    """
    ways, found = list[int](), dict[Any, int]()
    folds: dict[int | None, list[int]] = {}
    for place, run in enumerate(runs):
        fold = run.config.dataset.fold if split == "val" else None
        dataset = {**plain(run.config.dataset), "fold": fold}
        key = repr((dataset, run.features.inputs.record))
        if key not in found:
            folds.setdefault(fold, []).append(place)
        ways.append(found.setdefault(key, place))
    return ways, [*folds.values()]
