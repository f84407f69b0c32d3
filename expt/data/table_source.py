"""Rows of a table as numbers for a model, and as a source of samples.

They are encoded by categories, fills of gaps and scales: of the rows that are trained on, or of a
run's record.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from expt.data import indexing, overlap
from expt.data.columns import base, filled_gaps, unknown_texts
from expt.data.loader import Load, loading
from expt.data.memory import InMemory
from expt.data.rows import Chosen, Rows, places_of, targets_as_trained
from expt.data.source import NOTHING, Part, Source
from expt.errors import DataError
from expt.features import Classes, Columns, Encoding, Feature, Features, Numbers, Text, Tokens

if TYPE_CHECKING:
    from expt.data.kinds import Opening

Scale: TypeAlias = tuple[float, float]
"""A mean and a deviation."""


def encodings(rows: Rows, training: np.ndarray) -> dict[str, Encoding]:
    """Return the encodings of columns of texts, or with gaps, by the rows at `training`.

    Raise DataError for a column that has no value there.
    """
    found = dict[str, Encoding]()
    for place, name in enumerate(rows.feature_names):
        how: Encoding = {"flags": rows.flags[name]} if name in rows.flags else {}
        if name in rows.ways:
            how["way"] = rows.ways[name]
        if name in rows.texts or name in rows.gaps:
            how |= _encoding(name, rows.features.columns([place])[training][:, 0], rows.texts)
        if how:
            found[name] = how
    # A target has no encoding, but a line that says how it is written.
    return found | {x: {"way": rows.ways[x]} for x in rows.target_names if x in rows.ways}


def _encoding(name: str, cells: np.ndarray, texts: Mapping[str, Sequence[str]]) -> Encoding:
    is_gap = np.isnan(cells)
    there, gaps = cells[~is_gap], int(is_gap.sum())
    if name in texts:
        known = [texts[name][code] for code in np.unique(there).astype(int)]
        return {"categories": [*known, None] if gaps else known}
    if not len(there):
        raise DataError(
            f"column {name}: has no value in the {len(cells)} rows that are trained on; leave it"
            " out of dataset.features"
        )
    return {"median": float(np.median(there)), "gaps": gaps}


class _Output(NamedTuple):
    """A number of an encoded row, by one of the columns."""

    column: int
    is_number: bool
    """True for the column's own number, else it is 1 where the cell is the value"""
    value: float
    """the fill of gaps, or that value"""
    scale: Scale = (0.0, 1.0)
    is_gap: bool = False
    """True if it is 1 for gaps, too"""


class Encoder:
    """Encodes rows [N, F] of numbers, places of texts, and nan for gaps, for a model [N, W].

    A column of texts becomes a column of 0 and 1 for each category: 1 where the row has it, and so
    for gaps where training rows had some. A column of numbers has the median in its gaps and is
    standardised; where training rows had gaps, a column follows that is 1 at gaps and else 0.
    """

    def __init__(
        self,
        names: Sequence[str],
        encoded: Mapping[str, Encoding],
        scales: Mapping[str, Scale],
        texts: Mapping[str, Sequence[str]] | None = None,
        gaps: Collection[str] = (),
        means: Mapping[str, float] | None = None,
    ) -> None:
        """Take the places of `texts` by their columns, of others those of the categories.

        Gaps of a column that has no median become its mean.
        """
        outputs, self.notes = list[_Output](), list[str]()
        for place, name in enumerate(names):
            how = encoded.get(name, {})
            if "categories" in how:
                known = (texts or {}).get(name, how["categories"])
                seen = [*known, None] if name in gaps else known
                if unknown := [text for text in seen if text not in how["categories"]]:
                    self.notes.append(unknown_texts(name, unknown))
                # Who encodes by the categories of a record may give None its place there.
                places = {None: len(known)} | {text: at for at, text in enumerate(known)}
                codes = [(text, float(places.get(text, -2))) for text in how["categories"]]
                outputs += [_Output(place, False, x, is_gap=text is None) for text, x in codes]
                continue
            mean = scales[name][0] if name in scales else (means or {}).get(name, math.nan)
            fill = how.get("median", mean)
            outputs.append(_Output(place, True, fill, scales.get(name, (0.0, 1.0))))
            if how.get("gaps"):
                outputs.append(_Output(place, False, math.nan, is_gap=True))
        self.number = len(outputs)
        self._is_plain = not any(map(encoded.get, names))
        self._columns = torch.tensor([each.column for each in outputs], dtype=torch.int32)
        self._are_numbers = torch.tensor([each.is_number for each in outputs])
        self._are_gaps = torch.tensor([each.is_gap for each in outputs])
        self._values = torch.tensor([each.value for each in outputs], dtype=torch.float64)
        scale = torch.tensor([each.scale for each in outputs], dtype=torch.float64)
        self._means, self._deviations = scale.reshape(-1, 2).T

    def __call__(self, rows: Tensor) -> Tensor:
        """Return them in float64."""
        if self._is_plain:
            there: Tensor = torch.where(rows.isnan(), self._values, rows)
            return there.sub(self._means).div(self._deviations)
        cells = rows.index_select(1, self._columns)
        gaps = cells.isnan()
        numbers = (torch.where(gaps, self._values, cells) - self._means) / self._deviations
        is_one = (cells == self._values) | (gaps & self._are_gaps)
        return torch.where(self._are_numbers, numbers, is_one.double())


def scales_of(
    columns: Chosen, names: Sequence[str], rows: np.ndarray, encoded: Mapping[str, Encoding]
) -> dict[str, Scale]:
    """Return the mean and deviation of the columns of numbers, to the bit NumPy's of all at once.

    Their gaps count as their fills. A column of one value is only shifted.
    """
    ways = [encoded.get(name, {}) for name in names]
    fills = np.array([how.get("median", 0.0) for how in ways])

    def blocks() -> Iterator[np.ndarray]:
        for block in columns.blocks(rows):
            yield np.where(np.isnan(block), fills, block) if fills.any() or encoded else block

    largest = total = squares = np.zeros(len(names))
    for block in blocks():
        largest = np.maximum(largest, np.abs(block).max(0))
        block[0] += total
        total = block.sum(0)
    mean = total / len(rows)
    for block in blocks():
        apart = np.square(block - mean)
        apart[0] += squares
        squares = apart.sum(0)
    std = np.sqrt(squares / len(rows))
    # A column of one value has no deviation but that of rounding.
    std = np.where(std > 1e-12 * largest, std, 1.0)
    each = zip(names, mean.tolist(), std.tolist(), ways, strict=True)
    return {name: (mean, std) for name, mean, std, how in each if "categories" not in how}


def parts_of(rows: Rows, test_fraction: float, how: str) -> dict[str, np.ndarray]:
    """Return the places of the rows for training and for the test, as `indexing.split` has them."""
    number = rows.features.shape[0]
    if how == "last":
        train, test = indexing.split_last(number, test_fraction, None)
    else:
        classes = torch.from_numpy(rows.targets) if isinstance(rows.targets, np.ndarray) else None
        groups = None if rows.groups is None else torch.from_numpy(rows.groups)
        train, test = indexing.split(number, test_fraction, None, classes, groups)
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
    if rows.read and rows.read.are_targets:
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
