"""Rows of a table as numbers for a model: categories, fills of gaps, and scales."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from expt.data.columns import unknown_texts
from expt.errors import DataError

if TYPE_CHECKING:
    from expt.data.rows import Chosen, Rows

Encoding: TypeAlias = Mapping[str, Any]
"""The encoding of a column: the `categories` of texts (None: a gap), or the `median` for gaps among
numbers and how many `gaps` training rows have; and the texts of `flags`, which are 0 and 1."""
Scale: TypeAlias = tuple[float, float]
"""A mean and a deviation."""


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
