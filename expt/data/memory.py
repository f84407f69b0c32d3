"""Samples in memory or in mapped files: images, rows of a table, windows of a text."""

from __future__ import annotations

import bisect
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
from expt.data.loader import Held, Load, loading
from expt.data.loading import MIN_EVAL_BATCH, LoaderOptions
from expt.data.rows import Chosen
from expt.data.source import NOTHING, Part, Source
from expt.errors import ConfigError, DataError, did_you_mean
from expt.features import NO_TARGET, Classes, Columns, Feature, Features, Numbers, Text, Tokens

if TYPE_CHECKING:
    from expt.data.kinds import Opening
    from expt.data.kinds.text import Extent
    from expt.data.rows import Rows

Encoding: TypeAlias = Mapping[str, Any]
"""The encoding of a column: the `categories` of texts (None: a gap), or the `median` for gaps among
numbers and how many `gaps` training rows have; and the texts of `flags`, which are 0 and 1."""
Scale: TypeAlias = tuple[float, float]
"""A mean and a deviation."""

# Bytes of float32 images made at once: on a CPU those that fit its cache, on a GPU enough that
# launches cost nothing.
_BLOCK_BYTES = {"cpu": 1 << 20, "cuda": 32 << 20}
_GPU_EVAL_BATCH = 2048
"""Images that fill a GPU; fewer take as many kernels each time."""
_EVAL_TIMES = 8
"""How many images an evaluation has where a step has one, which keeps the outputs of every layer.
"""


def place(images: Tensor, device: torch.device) -> Tensor:
    """`images` on `device` if that is a GPU with twice the room, else where they are."""
    if device.type != "cuda" or images.device.type == "cuda":
        return images
    free, _ = torch.cuda.mem_get_info(device)
    return images.to(device) if images.nbytes <= free // 2 else images


class InMemory(Held):
    """Inputs and targets [N, ...], on the GPU when they fit.

    Images uint8 [N, C, H, W] are augmented and normalised; rows [N, F] are given as they are. All
    loaders share one copy on a GPU.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, device: torch.device) -> None:
        self._here = inputs, targets
        self._inputs = place(inputs, device)
        self.device = self._inputs.device
        self._targets = targets.to(self.device)

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, targets = self._here
        return inputs[index].clone(), int(targets[index])

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a sample, all zeros."""
        inputs, targets = self._here
        return torch.zeros_like(inputs[0]), torch.zeros_like(targets[0])

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """See Held."""
        return self._inputs.index_select(0, indices), self._targets.index_select(0, indices)

    def at_once(self, device: torch.device) -> int:
        """See Held: the calls of a gather cost more than the bytes that it moves."""
        return _BLOCK_BYTES.get(device.type, 0) // max(1, 4 * self._inputs[:1].numel())

    def evaluated_at_once(self, options: LoaderOptions) -> int | None:
        """See Held."""
        are_images = self._inputs.dim() == 4
        return eval_batch_size(options) if are_images else options.eval_batch_size


def eval_batch_size(options: LoaderOptions) -> int | None:
    """On a GPU larger than a step's; the numbers are the same but for rounding."""
    if options.eval_batch_size or options.device.type != "cuda":
        return options.eval_batch_size
    share = options.batch_size // options.shard.world_size
    at_a_time = options.batch_size // max(options.batch_parts, options.shard.world_size)
    return max(share, MIN_EVAL_BATCH, min(_EVAL_TIMES * at_a_time, _GPU_EVAL_BATCH))


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
        scales = dict[str, Scale]()
        numbers = _scales(rows.features, rows.feature_names, training, encoded)
        if dataset.standardise:
            scales |= numbers
        if dataset.standardise_targets and isinstance(rows.targets, Chosen):
            scales |= _scales(rows.targets, rows.target_names, training, {})
        means = {x: mean for x, (mean, _) in numbers.items() if x not in scales}
        own = rows._replace(encoded=encoded, scales=scales, means=means)
        found = _source(own, takes, parts, device)
        return dataclasses.replace(found, notes=[*notes, *found.notes])

    return _source(rows, takes, parts, device, fitted=fitted)


def _source(
    rows: Rows,
    takes: type[Feature],
    parts: Mapping[str, np.ndarray],
    device: torch.device,
    **more: Any,
) -> Source:
    def part(index: np.ndarray) -> Part:
        @functools.cache  # one for all loaders, made for the first
        def load() -> Load:
            return loading(_held(rows, index, device))

        return Part(len(index), lambda chosen, how: load()(chosen, how))

    train = parts.get("train", np.arange(0))
    there = {name: part(index) for name, index in parts.items() if len(index)}
    more |= {"train": NOTHING, **there}
    features, targets = _encoders(rows)
    groups = dict[str, Tensor]()
    if rows.groups is not None:
        groups = {name: torch.from_numpy(rows.groups[index]) for name, index in parts.items()}
    names, scales = rows.feature_names, rows.scales
    inputs: Feature = Columns(
        names=names,
        width=features.number,
        scales={name: scales[name] for name in names if name in scales},
        encoded=rows.encoded,
        means=rows.means,
        left_out=rows.left_out,
    )
    if read := rows.read:
        inputs = read.feature
        more |= {"lengths": torch.from_numpy(read.lengths[train]), "notes": read.notes}
    feature: Feature
    if read and len(read.counted):
        feature = Tokens(vocab_size=read.feature.vocab_size, context=0)
    elif rows.class_names:
        feature = Classes(names=rows.class_names, are_names=True, column=rows.target_names[0])
    else:
        feature = takes.of_columns(rows.target_names, scales)
    if isinstance(feature, Numbers) and isinstance(rows.targets, Chosen):
        feature = dataclasses.replace(feature, transform=rows.targets.transform or "")
    return Source(
        features=Features(inputs, feature),
        example=_held(rows, np.arange(1), device).example,
        classes=torch.from_numpy(rows.targets[train]) if rows.class_names else None,
        groups=groups,
        digests=lambda name: (
            read.digests(parts[name]) if read else overlap.digests_of_rows(rows, parts[name])
        ),
        targets_of=lambda chosen: targets(torch.from_numpy(rows.targets[train[chosen.numpy()]])),
        **{"notes": features.notes, **more},
    )


def _held(rows: Rows, index: np.ndarray, device: torch.device) -> Any:
    """Return the samples at `index`, with their `example`."""
    features, targets = _tensors(rows, index)
    return rows.read.held(index, targets) if rows.read else InMemory(features, targets, device)


def _encoders(rows: Rows) -> tuple[Encoder, Encoder]:
    """Return the encoders of rows and of their targets."""
    names = rows.target_names if isinstance(rows.targets, Chosen) else ()
    own = rows.feature_names, rows.encoded, rows.scales, rows.texts, rows.gaps, rows.means
    return Encoder(*own), Encoder(names, {}, rows.scales)


def _filled(rows: Rows) -> Iterator[str]:
    """Return warnings of gaps in columns that had none in training."""
    found = dict[str, int]()
    for place, name in enumerate(rows.feature_names):
        if name in rows.gaps and not {"median", "categories"} & {*rows.encoded.get(name, ())}:
            found[base(name, rows.ways.get(name, ""))] = int(
                np.isnan(rows.features.columns([place])[:]).sum()
            )
    return itertools.starmap(filled_gaps, found.items())


def _tensors(rows: Rows, index: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return features float32 [N, F] and targets float32 [N, T], or classes int64 [N]."""
    of_features, of_targets = _encoders(rows)
    features = _floats(rows.features, index, of_features)
    if isinstance(rows.targets, np.ndarray):
        return features, torch.from_numpy(rows.targets[index])
    return features, _floats(rows.targets, index, of_targets)


def _floats(columns: Chosen, index: np.ndarray, encoder: Encoder) -> Tensor:
    found, start = torch.empty(len(index), encoder.number), 0
    for block in columns.blocks(index):
        found[start : start + len(block)] = encoder(torch.from_numpy(block))
        start += len(block)
    return found


def encodings(rows: Rows, training: np.ndarray) -> dict[str, Encoding]:
    """Return the encodings of columns of texts, or with gaps, by the rows at `training`.

    Raise DataError for a column that has no value there.
    """
    found = dict[str, Encoding]()
    for place, name in enumerate(rows.feature_names):
        how: dict[str, Any] = {"flags": rows.flags[name]} if name in rows.flags else {}
        how |= {"way": rows.ways[name]} if name in rows.ways else {}
        if name in rows.texts or name in rows.gaps:
            how |= _encoding(name, rows.features.columns([place])[training][:, 0], rows.texts)
        if how:
            found[name] = how
    # A target has no encoding, but a line that says how it is written.
    return found | {x: {"way": rows.ways[x]} for x in rows.target_names if x in rows.ways}


def _encoding(name: str, cells: np.ndarray, texts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
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
                places = {text: float(at) for at, text in enumerate(known)} | {None: math.nan}
                codes = [places.get(text, -2.0) for text in how["categories"]]
                outputs += [_Output(place, False, code) for code in codes]
                continue
            mean = scales[name][0] if name in scales else (means or {}).get(name, math.nan)
            fill = how.get("median", mean)
            outputs.append(_Output(place, True, fill, scales.get(name, (0.0, 1.0))))
            if how.get("gaps"):
                outputs.append(_Output(place, False, math.nan))
        self.number = len(outputs)
        self._is_plain = not any(map(encoded.get, names))
        self._is_same = self._is_plain and not any(map(scales.get, names))
        self._columns = torch.tensor([each.column for each in outputs], dtype=torch.int32)
        self._are_numbers = torch.tensor([each.is_number for each in outputs])
        self._values = torch.tensor([each.value for each in outputs], dtype=torch.float64)
        scale = torch.tensor([each.scale for each in outputs], dtype=torch.float64)
        self._means, self._deviations = scale.reshape(-1, 2).T

    def __call__(self, rows: Tensor) -> Tensor:
        """Return them in float64."""
        if self._is_plain:
            there = torch.where(rows.isnan(), self._values, rows)
            return there if self._is_same else (there - self._means) / self._deviations
        cells = rows.index_select(1, self._columns)
        gaps = cells.isnan()
        numbers = (torch.where(gaps, self._values, cells) - self._means) / self._deviations
        is_one = (cells == self._values) | (gaps & self._values.isnan())
        return torch.where(self._are_numbers, numbers, is_one.double())


def _scales(
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
    targets = trained_on.targets.columns or rows.target_names
    if len(targets) == len(rows.target_names) == 1:
        rows = rows._replace(target_names=tuple(targets))
    for kind, wanted in (("feature", own), ("target", targets)):
        there = getattr(rows, f"{kind}_names")
        if missing := [name for name in wanted if name not in there]:
            raise ConfigError(
                f"dataset.{kind}s: there is no {missing[0]}, which the run was trained with"
                f".{did_you_mean(missing[0], there)}"
            )
        if kind == "feature" or not rows.class_names:
            values = getattr(rows, f"{kind}s").columns([there.index(name) for name in wanted])
            rows = rows._replace(**{f"{kind}s": values, f"{kind}_names": tuple(wanted)})
    for name in own:
        if "categories" in encoded.get(name, {}):
            continue
        if name in rows.texts or (name in rows.gaps and name not in known.filled):
            cells = "texts" if name in rows.texts else "gaps"
            raise DataError(f"column {name}: has {cells}, and had none in training; correct it")
    scales = {**inputs.scales, **trained_on.targets.scales}
    return rows._replace(encoded=encoded, scales=scales, means=known.means)


class Windows(Held):
    """Consecutive windows of a part of a text: `context` tokens, and of each the next.

    Each token of the part but its first is a target, once; the last window may be shorter.
    """

    def __init__(self, extent: Extent, context: int, tokens: np.ndarray | None = None) -> None:
        """Take the `tokens` [N] that a tokenizer has read, else the bytes of its files."""
        self._start, self._stop = extent.start, extent.stop
        self.context = self.tokens = context
        self._ends = list(itertools.accumulate(extent.sizes))
        # A file without a byte cannot be mapped.
        self._files: list[np.ndarray] = (
            [
                np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
                for path, size in zip(extent.files, extent.sizes, strict=True)
            ]
            if tokens is None
            else [tokens]
        )
        if [len(file) for file in self._files] != [*extent.sizes]:
            raise DataError(
                f"{extent.files[0]}: the text has changed while the run was starting; start it"
                " again"
            )

    def __len__(self) -> int:
        return -(-(self._stop - self._start - 1) // self.context)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [b, context].

        A shorter window is filled with 0, and the target NO_TARGET.
        """
        chosen = indices.tolist()
        tokens = np.full((len(chosen), self.context + 1), NO_TARGET, np.int64)
        for row, index in zip(tokens, chosen, strict=True):
            first = self._start + index * self.context
            found = self._tokens(first, min(first + self.context + 1, self._stop))
            row[: len(found)] = found
        inputs = torch.from_numpy(tokens[:, :-1].copy()).clamp_(min=0)
        return inputs, torch.from_numpy(tokens[:, 1:].copy())

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        """Return tokens of the whole text, over the ends of files."""
        first, last = bisect.bisect_right(self._ends, start), bisect.bisect_left(self._ends, stop)
        pieces = []
        for place in range(first, last + 1):
            begin = self._ends[place] - len(self._files[place])
            pieces.append(self._files[place][max(start - begin, 0) : stop - begin])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def of_extents(
    extents: Sequence[Extent | None], features: Features, tokens: np.ndarray | None
) -> Source:
    """Return a text's parts, by windows."""
    context = features.shapes["context"]
    windows = [None if extent is None else Windows(extent, context, tokens) for extent in extents]
    train, val, test = (x if x is None else Part(len(x), loading(x)) for x in windows)
    assert train
    window = torch.zeros(context, dtype=torch.int64)
    return Source(features=features, example=(window, window), train=train, val=val, test=test)
