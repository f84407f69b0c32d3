"""Texts of a table as tokens: read once, mapped from the cache, and padded in batches."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from expt import progress
from expt.data.cache import digest, read_or_fill
from expt.data.columns import texts_of
from expt.data.loading import Held
from expt.data.overlap import COPIES, UNLIKE, Digests
from expt.data.table_files import Table, Uses
from expt.data.tokenizer import Encoded, Tokenizer, fingerprint
from expt.errors import DataError
from expt.features import NO_TARGET, Feature, Text
from expt.late import pa

_ARRAYS = ("ids", "counted", "types", "bounds")
_AT_A_TIME = 1000
"""Texts that a tokenizer gets."""
_SHORT = 8
"""Tokens of a text below which equal ones are no copies."""


class Texts(NamedTuple):
    """The texts of a table."""

    feature: Text
    ids: np.ndarray
    """The tokens of all, one text after the other."""
    counted: np.ndarray
    """1 for each token that is to be predicted; empty where targets are others."""
    types: np.ndarray
    """The segment of each token; empty where all are of the first."""
    bounds: np.ndarray
    """The places where each begins and ends among these, int64 [N + 1]."""
    notes: Sequence[str] = ()

    @property
    def are_targets(self) -> bool:
        """True if the tokens that follow are predicted."""
        return len(self.counted) > 0

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each, int64 [N]."""
        return np.diff(self.bounds)

    def of(self, values: np.ndarray, index: np.ndarray) -> list[np.ndarray]:
        """Return those of `ids`, `counted` or `types` for each text at `index`, if it has some."""
        if not len(values):
            return []
        pairs = zip(self.bounds[index].tolist(), self.bounds[index + 1].tolist(), strict=True)
        return [values[start:stop] for start, stop in pairs]

    def held(self, index: np.ndarray, targets: Tensor) -> PaddedTexts:
        """Return the texts at `index`, and their `targets` unless these are tokens."""
        return PaddedTexts(self, index, targets)

    def digests(self, index: np.ndarray) -> Digests:
        """Return the digests of texts; those of a few tokens may be equal by chance."""
        found = [
            hash(each.tobytes()) if len(each) >= _SHORT else next(UNLIKE)
            for each in self.of(self.ids, index)
        ]
        return Digests(np.array(found, np.int64).astype(np.uint64), most=COPIES)


def read(dataset: Any, open_table: Callable[[], Table], content: str, *, is_causal: bool) -> Texts:
    """Return the texts of a configured table, whose files have the digest `content`.

    Tokens are kept in the cache. Raise DataError or ConfigError where they can't be read.
    """
    (role, columns), name, most = dataset.texts, dataset.tokenizer, dataset.max_tokens
    own = fingerprint(name)
    how = _ARRAYS, role, own, is_causal, most, getattr(dataset, "splits", None)
    words = digest([str(Path(dataset.path).resolve()), *columns, *map(str, how)])

    def write(folder: Path) -> None:
        reader = Tokenizer(name, role, most, is_causal=is_causal)
        about = _write(open_table(), columns, reader, folder)
        (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")

    def mapped(folder: Path) -> Texts:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        known = {"names": columns, "role": role, "tokenizer": name, "digest": own}
        feature: Any = Feature.read({"feature": Text.__name__, **known, **about["feature"]})
        ids, counted, types, bounds = (np.load(folder / f"{x}.npy", mmap_mode="r") for x in _ARRAYS)
        return Texts(feature, ids, counted, types, bounds, about["notes"])

    if found := read_or_fill(f"texts-{words}.{content}", write, mapped):
        return found
    with tempfile.TemporaryDirectory() as folder:  # mapped files outlive it
        write(Path(folder))
        return mapped(Path(folder))


def _write(table: Table, columns: Sequence[str], reader: Tokenizer, folder: Path) -> Any:
    """Write the tokens of a table's columns into a folder; return their description."""
    written = _Writer(np.uint16 if reader.sizes["vocab_size"] <= 1 << 16 else np.uint32)
    with progress.phase(f"reading the texts of {table.path}", table.size) as here:
        for whole in table.batches(columns, uses=Uses(texts=columns)):
            for start in range(0, whole.num_rows, _AT_A_TIME):
                cells = [whole.column(name).slice(start, _AT_A_TIME) for name in columns]
                written.gaps += sum(column.null_count for column in cells)
                written.add(reader.encode([*map(cells_of, cells, columns)]))
                here.done = len(written.lengths)
    if written.silent == len(written.lengths):
        raise DataError(f"{table.path}: no row has a token to predict; use more dataset.max_tokens")
    written.save(folder)
    notes = [f"column {', '.join(columns)}: {note}" for note in written.notes()]
    return {"feature": {**reader.sizes, **written.sizes}, "notes": notes}


class _Writer:
    """Collects the tokens of rows, and counts the odd ones."""

    def __init__(self, kind: type[np.unsignedinteger[Any]]) -> None:
        self._arrays = {"ids": [np.empty(0, kind)]}
        self._arrays |= {name: [np.empty(0, np.uint8)] for name in ("counted", "types")}
        self.lengths = list[int]()
        self.gaps = self.silent = self._cut = 0

    def add(self, rows: Encoded) -> None:
        for name, parts in self._arrays.items():
            tokens = itertools.chain(*getattr(rows, name))
            parts.append(np.fromiter(tokens, parts[0].dtype))
        self.lengths += map(len, rows.ids)
        self.silent += sum(not any(counted[1:]) for counted in rows.counted)
        self._cut += rows.cut

    def save(self, folder: Path) -> None:
        for name, parts in self._arrays.items():
            np.save(folder / f"{name}.npy", np.concatenate(parts))
        np.save(folder / "bounds.npy", np.cumsum([0, *self.lengths]))

    @property
    def sizes(self) -> dict[str, Any]:
        """The fields of a feature that it knows."""
        lengths = min(self.lengths), max(self.lengths), float(np.mean(self.lengths))
        return {"lengths": lengths, "cut": self._cut}

    def notes(self) -> Iterator[str]:
        number = len(self.lengths)
        if self.gaps:
            cells = f"{self.gaps} of {number} cells"
            yield f"{cells} are empty, or NA or such, and are read as empty texts"
        if self.silent:
            yield f"{self.silent} of {number} rows have no token to predict, after they are cut"


def cells_of(cells: Any, name: str) -> list[Any]:
    """Return the texts of a column, or its messages, as a tokenizer takes them."""
    if not pa.types.is_nested(cells.type):
        return texts_of(cells)
    if pa.types.is_struct(getattr(cells.type, "value_type", None)) and not cells.null_count:
        found: list[Any] = cells.to_pylist()
        return found
    has = "a gap, and" if cells.null_count else f"{cells.type}, and"
    raise DataError(f"column {name}: holds {has} each cell is to be a text, or a conversation")


def padded(
    feature: Text, ids: Sequence[Any], counted: Sequence[Any] = (), types: Sequence[Any] = ()
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of some texts [B, T], and the token that follows each, if it counts."""
    shape = len(ids), max(map(len, ids))
    tokens, mask = np.full(shape, feature.pad_id, np.int64), np.zeros(shape, np.int64)
    following, segments = np.full(shape, NO_TARGET), np.full(shape, feature.pad_type or 0)
    for row, each in enumerate(ids):
        there = slice(-len(each), None) if feature.pads_left else slice(len(each))
        tokens[row, there], mask[row, there] = each, 1
        if len(types):
            segments[row, there] = types[row]
    for row, counts in enumerate(counted):
        number = len(counts)
        following[row, : number - 1] = np.where(counts, tokens[row, :number], NO_TARGET)[1:]
    inputs = {"input_ids": tokens, "attention_mask": mask}
    inputs |= {"token_type_ids": segments} if len(types) else {}
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    return tensors, torch.from_numpy(following)


class PaddedTexts(Held):
    """Some texts; each batch is as long as its longest."""

    def __init__(self, texts: Texts, index: np.ndarray, targets: Tensor) -> None:
        self._texts, self._index, self._targets = texts, index, targets
        self.tokens = texts.feature.lengths[1]

    def __len__(self) -> int:
        return len(self._index)

    @property
    def example(self) -> tuple[dict[str, Tensor], Tensor]:
        """The inputs of the longest text, and targets that are all zeros."""
        inputs, following = self._padded(np.array([self._texts.lengths.argmax()]))
        targets = following if self._texts.are_targets else self._targets
        return {name: one[0] for name, one in inputs.items()}, torch.zeros_like(targets[0])

    def _padded(self, index: np.ndarray) -> tuple[dict[str, Tensor], Tensor]:
        texts = self._texts
        arrays = texts.ids, texts.counted, texts.types
        return padded(texts.feature, *(texts.of(values, index) for values in arrays))

    def gather(self, indices: Tensor) -> tuple[Any, Tensor]:
        """See Held."""
        inputs, following = self._padded(self._index[indices.numpy()])
        return inputs, following if self._texts.are_targets else self._targets[indices]
