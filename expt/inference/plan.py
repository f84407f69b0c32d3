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

_HELD_OUT = ("val_fraction", "train_limit", "folds", "fold")
_MAY_DIFFER = {"test": _HELD_OUT, "all": _HELD_OUT, "val": ("fold",)}
"""The keys of a dataset in which runs may differ that are to have equal samples in a split."""
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
        first = self.runs[0]
        self.config, self.record, self.features = first.config, first.record, first.features
        self._check([*paths, *texts])
        if flips:
            refuse_flips(first)
        refuse_unlike(self.runs, split)
        form = self.config.task.outputs(self.features.targets)
        self.form: Feature = form if top is None else form.likeliest(top)
        self.ways, self.rounds = shared(self.runs, split)
        each = ((way, self.runs[way]) for way in dict.fromkeys(self.ways))
        self.readers = {way: inputs_of(run.config.dataset, run.features) for way, run in each}
        for reader in self.readers.values():
            if texts:
                reader.take(texts)
            if paths:
                reader.open(paths)
        self.inputs = self.readers[0]

    def _check(self, given: Sequence[object]) -> None:
        """Raise ConfigError unless either samples are `given` or the run has the split."""
        split = self.split
        if bool(given) == bool(split):
            raise ConfigError(
                "name files or folders, or --split test for a part of the run's dataset"
            )
        there = [name for name in SPLITS if self.record["data"].get(f"{name}_size", 0) != 0]
        if split is not None and split not in there:
            raise ConfigError(f"--split {split}: the run's dataset has {', '.join(there)}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"--batch-size {self.batch_size}: must be 1 or more")

    @property
    def total(self) -> int | None:
        """The number of samples, where it is known before they are read."""
        return self.inputs.size if self.split is None else self.record["data"][f"{self.split}_size"]

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


def refuse_flips(run: Trained) -> None:
    """Raise ConfigError where the inputs of a run are no images, which alone can be flipped."""
    inputs, targets = run.features
    if not (inputs.is_image and targets.each in ("sample", "pixel")):
        raise ConfigError(
            f"--flips: {run.run} takes {_shown(inputs)} and predicts {_shown(targets)}; only"
            " images are flipped, and the outputs of a custom task are not; leave it out"
        )


def refuse_unlike(runs: Sequence[Trained], split: str | None) -> None:
    """Raise ConfigError, naming a run, for runs of other features than the first.

    Of a `split` of their dataset all must have the same samples, but for the folds of val.
    """
    first, *others = runs
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
    found: dict[str, Any] = {
        "task": word(run.config.task),
        "inputs": _shown(inputs),
        "targets": _shown(targets, meaning),
        "standardised targets": ", ".join(targets.scales) or "none",
    }
    if run.config.task.name == "_target_":  # expt does not know which outputs have their scales
        found["means and deviations"] = dict(targets.scales)
    if targets.each == "token":  # those of another tokenizer are other texts
        found["tokenizer"] = getattr(inputs, "digest", getattr(run.config.dataset, "tokens", None))
    if split is None:
        return found
    for key in varying("split", "repetition"):
        group, _, name = key.partition(".")
        if group == "dataset" and name not in _MAY_DIFFER.get(split, ()):
            found[key] = getattr(run.config.dataset, name, None)
    return {**found, "data": run.record.get("content", {}).get("data")}


def _shown(feature: Feature, more: Sequence[str] = ()) -> str:
    sizes = (f"{key} {size}" for key, size in feature.shapes.items())
    return f"{type(feature).__name__.lower()} ({', '.join([*(feature.names or sizes), *more])})"


def shared(runs: Sequence[Trained], split: str | None) -> tuple[list[int], list[list[int]]]:
    """Return the way of each run in which its samples are prepared, and the ways read together.

    A way is the number of the first run that has it. Of val, where runs have held out several
    folds, one fold is read after the other.
    """
    ways, firsts = list[int](), dict[str, int]()
    rounds: dict[int | None, list[int]] = {}
    for number, run in enumerate(runs):
        fold = run.config.dataset.fold if split == "val" else None
        dataset = {**plain(run.config.dataset), "fold": fold}
        way = firsts.setdefault(repr((dataset, run.features.inputs.record)), number)
        ways.append(way)
        if way == number:
            rounds.setdefault(fold, []).append(way)
    return ways, [*rounds.values()]
