"""Whether an IterableDataset gives its samples in one order: of it val is held out by their places."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from expt.config import datasets
from expt.data.files import DatasetConfig
from expt.data.iterable import IterableLoader
from expt.data.loading import Loader
from expt.data.stream import seeded
from expt.data.tree import leaves
from expt.errors import ConfigError, warn

COMPARED = 64
"""Of its first samples, as an evaluation and the first epochs get them."""
_EPOCHS = (1, 2)


class _Sample(NamedTuple):
    whole: bytes
    """A digest of its bits, and one of its targets' alone."""
    targets: bytes
    has_class: bool
    """Whether its target is one integer, which no augmentation changes."""


def refuse_shuffled(dataset: DatasetConfig, held_out: Loader | None, seed: int) -> None:
    """Raise ConfigError where the samples of a stream change places between epochs: the `held_out`
    are trained on then.

    Warns where it can't be told whether they do, or are augmented alone. `seed` is the run's.
    """
    if not isinstance(held_out, IterableLoader) or not isinstance(dataset, datasets.TargetDataset):
        return
    evaluated, *trained = (
        _first(held_out, *seeds) for seeds in ((0, 0), *((seed, epoch) for epoch in _EPOCHS))
    )
    found = {_order(evaluated, epoch) for epoch in trained}
    key, without = f"dataset._target_={dataset.target}", "dataset.val_fraction=0 eval_split=test"
    without = (
        without if dataset.folds is None else f"dataset.folds=null dataset.fold=null {without}"
    )
    if "another" in found:
        raise ConfigError(
            f"{key}: gives its samples in another order in each epoch, and val is held out by their"
            f" places, so that they would be trained on; use a map-style Dataset, or {without}, or"
            " don't shuffle in __iter__"
        )
    if "unknown" in found:
        warn(
            f"{key}: its first samples are others in each epoch; should __iter__ shuffle, and not"
            " augment alone, val, which is held out by their places, is trained on: use a"
            f" map-style Dataset then, or {without}"
        )


def _first(loader: IterableLoader, seed: int, epoch: int) -> list[_Sample]:
    with seeded(0):  # for a `collate` that draws
        return [_digested(*sample) for sample in loader.first_samples(COMPARED, seed, epoch)]


def _digested(inputs: Any, targets: Any) -> _Sample:
    has_class = (
        isinstance(targets, Tensor) and targets.numel() == 1 and not targets.is_floating_point()
    )
    return _Sample(_digest((inputs, targets)), _digest(targets), has_class)


def _digest(tree: Any) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for tensor in leaves(tree):
        found.update(f"{tensor.dtype} {[*tensor.shape]}".encode())
        found.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.digest()


def _order(
    one: Sequence[_Sample], other: Sequence[_Sample]
) -> Literal["same", "another", "unknown"]:
    """Of the `other` beside that of `one`, of as many samples."""
    pairs = list(zip(one, other, strict=True))
    if all(before.whole == after.whole for before, after in pairs):
        return "same"
    times, there = Counter(sample.whole for sample in one), {sample.whole for sample in other}
    if any(
        times[before.whole] == 1 and before.whole != after.whole and before.whole in there
        for before, after in pairs
    ):
        return "another"
    if any(before.targets != after.targets for before, after in pairs):
        return "another" if all(sample.has_class for sample in one) else "unknown"
    # Augmented inputs, by what they are to be known by; nothing is known where all have one target.
    return "same" if len({sample.targets for sample in one}) > 1 else "unknown"
