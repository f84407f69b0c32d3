"""Runs whose predictions are averaged, and how their samples are read; free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from expt.config.constraints import plain, word
from expt.config.keys import varying
from expt.errors import ConfigError
from expt.features import Feature
from expt.runs.request import Trained

_NOT_OF_TEST = ("val_fraction", "train_limit", "folds", "fold")
"""Keys of held out samples that leave the test set as it is."""
_SHOWN = 120
"""The longest description of a feature [characters]."""


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
