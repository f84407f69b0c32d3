"""Texts by themselves or in columns of tables, as the inputs of a run's model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from expt.data.table_files import SUFFIXES
from expt.errors import ConfigError
from expt.features import Text, Tokens
from expt.inference.arrays import as_tensor
from expt.inference.inputs import Piece, Rows, Sample
from expt.late import np


class TextRows(Rows):
    """Texts by themselves, or those of a table's columns by name."""

    noun, suffixes, below = "text", SUFFIXES, SUFFIXES
    feature: Text  # type: ignore[assignment]
    _taken: Sequence[str] = ()

    def _encode(self, columns: Sequence[Sequence[Any]]) -> Any:
        """Return the inputs and the following tokens of rows, given by column."""
        from expt.data import texts
        from expt.data.tokenizer import Tokenizer

        one, is_causal = self.feature, isinstance(self.targets, Tokens)
        tokenizer = Tokenizer(one.tokenizer, one.role, one.max_tokens, is_causal=is_causal)
        found = tokenizer.encode(columns)
        inputs, following = texts.padded(one, found.ids, found.counted, found.types)
        return inputs, following if is_causal else None

    def __call__(self, samples: Sample | Sequence[Sample]) -> Any:
        """Return the batch of texts; one that is a batch already is only moved."""
        if isinstance(samples, Mapping):
            return {name: as_tensor(one).to(self.device) for name, one in samples.items()}
        asks = self.feature.role == "prompt"
        is_pair = asks and isinstance(samples, tuple) and len(samples) == 2
        is_pair = is_pair and all(isinstance(text, str) for text in samples)
        several = [samples] if is_pair or isinstance(samples, str) else [*samples]
        first = several[0] if several else None
        columns: Sequence[Any] = [several]
        if isinstance(first, Mapping):  # a message: all are one conversation
            columns = [[several]]
        if asks and not isinstance(first, str):  # with its response
            columns = [*zip(*several, strict=True)]
        return self(self._encode(columns)[0])

    def take(self, texts: Sequence[str]) -> None:
        """See Inputs."""
        if self.feature.role != "text":
            names = ", ".join(self.feature.names)
            raise ConfigError(f"--text: give a table with {names}, which the model takes")
        self._taken = texts

    def pieces(self, size: int) -> Iterator[Piece]:
        """Yield texts with the other columns of their table, such as an ID."""
        for start in range(0, len(self._taken), size):
            some = self._taken[start : start + size]
            yield self._piece([{"text": each} for each in some], np.array(some, object)[:, None])
        yield from super().pieces(size)

    def _open(self, path: str) -> Any:
        opened = super()._open(path)
        opened.table.free = opened.taken
        return opened

    def _parts(self, name: str, cells: Any) -> Sequence[str]:
        return [name]

    def _read(self, columns: Mapping[str, Any]) -> Any:
        from expt.data.texts import cells_of

        cells = [cells_of(each, name) for name, each in columns.items()]
        rows = np.empty((len(cells[0]), len(cells)), object)
        for place, each in np.ndindex(rows.shape):
            rows[place, each] = cells[each][place]
        return rows, dict[int, str](), dict[str, Counter[str]]()

    def _piece(self, about: Sequence[Any], rows: np.ndarray, skipped: Sequence[str] = ()) -> Piece:
        if not len(rows):
            return Piece(about, (), skipped)
        inputs, following = self._encode(rows.T.tolist())
        return Piece(about, inputs, skipped, following)
