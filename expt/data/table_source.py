"""Rows of a table as a source: fitted to those that are trained on, or as in a run's record."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from expt.data import indexing, overlap
from expt.data.columns import base, filled_gaps
from expt.data.encoding import Encoder, encodings, scales_of
from expt.data.loader import Load, loading
from expt.data.memory import InMemory
from expt.data.rows import Chosen, places_of, targets_as_trained
from expt.data.source import NOTHING, Part, Source
from expt.errors import DataError
from expt.features import Classes, Columns, Feature, Features, Numbers, Text, Tokens

if TYPE_CHECKING:
    from expt.data.kinds import Opening
    from expt.data.rows import Rows


def parts_of(rows: Rows, test_fraction: float, how: str) -> dict[str, np.ndarray]:
    """Return the places of the rows for training and for the test, as `indexing.split` has them."""
    classes = torch.from_numpy(rows.targets) if isinstance(rows.targets, np.ndarray) else None
    groups = None if rows.groups is None else torch.from_numpy(rows.groups)
    number = rows.features.shape[0]
    train, test = indexing.split(number, test_fraction, None, classes, how=how, groups=groups)
    return {"train": train.numpy(), "test": test.numpy()}


def of_rows(
    dataset: Any,
    rows: Rows,
    parts: Mapping[str, np.ndarray],
    opening: Opening,
    notes: Sequence[str] = (),
) -> Source:
    """Return the rows at the indices of the parts `train`, and `val` and `test` if they are there.

    They are standardised by those that are trained on, or as in the record of a run.
    """
    takes, device = getattr(opening.task, "takes", Numbers), opening.device
    if opening.trained_on is not None:
        rows = as_trained_on(opening.trained_on, rows)
        found = _source(rows, takes, parts, device)
        return dataclasses.replace(found, notes=[*found.notes, *_filled(rows)])

    def fitted(chosen: Tensor) -> Source:
        training = parts["train"][chosen.numpy()]
        encoded = encodings(rows, training)
        numbers = scales_of(rows.features, rows.feature_names, training, encoded)
        scales = dict(numbers) if dataset.standardise else {}
        if dataset.standardise_targets and isinstance(rows.targets, Chosen):
            scales |= scales_of(rows.targets, rows.target_names, training, {})
        means = {x: mean for x, (mean, _) in numbers.items() if x not in scales}
        own = rows._replace(encoded=encoded, scales=scales, means=means)
        found = _source(own, takes, parts, device)
        return dataclasses.replace(found, notes=[*notes, *found.notes])

    return dataclasses.replace(_source(rows, takes, parts, device), fitted=fitted)


def _source(
    rows: Rows, takes: type[Feature], parts: Mapping[str, np.ndarray], device: torch.device
) -> Source:
    own = rows.feature_names, rows.encoded, rows.scales, rows.texts, rows.gaps, rows.means
    features, has_classes = Encoder(*own), isinstance(rows.targets, np.ndarray)
    targets = Encoder(() if has_classes else rows.target_names, {}, rows.scales)

    def held(index: np.ndarray) -> Any:
        """Return the samples at `index`, with their `example`."""
        answers = (
            torch.from_numpy(rows.targets[index])
            if isinstance(rows.targets, np.ndarray)
            else _floats(rows.targets, index, targets)
        )
        if rows.read:
            return rows.read.held(index, answers)
        return InMemory(_floats(rows.features, index, features), answers, device)

    def part(index: np.ndarray) -> Part:
        @functools.cache  # one for all loaders, made for the first
        def load() -> Load:
            return loading(held(index))

        return Part(len(index), lambda chosen, how: load()(chosen, how))

    there = {name: part(index) for name, index in parts.items() if len(index)}
    read, train = rows.read, parts.get("train", np.arange(0))
    groups = rows.groups
    of_parts = {} if groups is None else {x: torch.from_numpy(groups[parts[x]]) for x in parts}
    return Source(
        features=Features(_inputs(rows, features.number), _targets(rows, takes)),
        example=held(np.arange(1)).example,
        classes=torch.from_numpy(rows.targets[train]) if rows.class_names else None,
        lengths=torch.from_numpy(read.lengths[train]) if read else None,
        groups=of_parts,
        digests=lambda name: (
            read.digests(parts[name]) if read else overlap.digests_of_rows(rows, parts[name])
        ),
        targets_of=lambda chosen: targets(torch.from_numpy(rows.targets[train[chosen.numpy()]])),
        notes=read.notes if read else features.notes,
        train=there.get("train", NOTHING),
        val=there.get("val"),
        test=there.get("test"),
    )


def _inputs(rows: Rows, width: int) -> Feature:
    if rows.read:
        feature: Feature = rows.read.feature
        return feature
    names, scales = rows.feature_names, rows.scales
    return Columns(
        names=names,
        width=width,
        scales={name: scales[name] for name in names if name in scales},
        encoded=rows.encoded,
        means=rows.means,
        left_out=rows.left_out,
    )


def _targets(rows: Rows, takes: type[Feature]) -> Feature:
    if rows.read and len(rows.read.counted):
        return Tokens(vocab_size=rows.read.feature.vocab_size, context=0)
    if rows.class_names:
        return Classes(names=rows.class_names, are_names=True, column=rows.target_names[0])
    feature = takes.of_columns(rows.target_names, rows.scales)
    if isinstance(feature, Numbers) and isinstance(rows.targets, Chosen):
        return dataclasses.replace(feature, transform=rows.targets.transform or "")
    return feature


def _filled(rows: Rows) -> Iterator[str]:
    """Return warnings of gaps in columns that had none in training."""
    found = dict[str, int]()
    for place, name in enumerate(rows.feature_names):
        if name in rows.gaps and not {"median", "categories"} & {*rows.encoded.get(name, ())}:
            found[base(name, rows.ways.get(name, ""))] = int(
                np.isnan(rows.features.columns([place])[:]).sum()
            )
    return itertools.starmap(filled_gaps, found.items())


def _floats(columns: Chosen, index: np.ndarray, encoder: Encoder) -> Tensor:
    """Return encoded rows, float32 [N, W]."""
    found, start = torch.empty(len(index), encoder.number), 0
    for block in columns.blocks(index):
        found[start : start + len(block)] = encoder(torch.from_numpy(block))
        start += len(block)
    return found


def as_trained_on(trained_on: Features, rows: Rows) -> Rows:
    """Return the rows with a run's columns, in its order, names and scales, from its record.

    A single target may have another name. Rows stay as they are where the run had none: `fit`
    refuses them. Raise ConfigError where a column is missing.
    """
    inputs = trained_on.inputs
    if not isinstance(inputs, Columns | Text):
        return rows
    known = inputs if isinstance(inputs, Columns) else Columns(names=(), width=0)
    own, encoded = known.names, known.encoded
    places = places_of(own, rows.feature_names, "dataset.features")
    rows = rows._replace(features=rows.features.columns(places), feature_names=tuple(own))
    rows = targets_as_trained(trained_on.targets, rows, "dataset.targets")
    for name in own:
        if "categories" in encoded.get(name, {}):
            continue
        if name in rows.texts or (name in rows.gaps and name not in known.filled):
            cells = "texts" if name in rows.texts else "gaps"
            raise DataError(f"column {name}: has {cells}, and had none in training; correct it")
    scales = {**inputs.scales, **trained_on.targets.scales}
    return rows._replace(encoded=encoded, scales=scales, means=known.means)
