"""A text, by bytes or by the tokens of a tokenizer: its beginning trains, its end tests."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic.dataclasses import dataclass

from expt.config.constraints import STRICT, Count, Folder
from expt.data.cache import Arrays, decoded, digest
from expt.data.checksums import of_content, state_of
from expt.data.folders import files_below, left_out, report_left_out
from expt.data.kinds import DatasetConfig, HeldOut, Mean, Opening, Place, Std
from expt.data.plain_text import head_of, opened, refuse_unreadable
from expt.errors import DataError, collected, first_line, require, warn_once
from expt.features import Features, Tokens
from expt.late import np

if TYPE_CHECKING:
    from expt.data.source import Source

_FIRST = 20
"""Characters that are shown of a word."""
_AT_A_TIME = 1 << 20
"""Bytes of a text that a tokenizer gets, whole lines."""


class Extent(NamedTuple):
    """Tokens `start` to `stop` of a text, its `files` one after the other."""

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    """of the files [tokens]; one for all of them where a tokenizer has read them"""
    start: int
    stop: int


class _Tokens(NamedTuple):
    """The tokens of a text, and the characters that no token stands for."""

    tokens: np.ndarray
    lost: int
    seen: int
    first: str
    """the first word with a lost character"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Text(DatasetConfig):
    """Windows of a plain file, or of all *.txt below a folder."""

    name: Literal["text"]
    root: Place
    tokens: Folder  # bytes, or a file of tokenizers
    context: Count
    test_fraction: HeldOut
    mean: Mean = None
    std: Std = None

    OFFERS = (Tokens,)

    @property
    def are_bytes(self) -> bool:
        """True if no tokenizer makes its tokens."""
        return self.tokens == "bytes"

    @property
    def counted_as(self) -> Mapping[str, str]:
        return {} if self.are_bytes else {"tokens": "tokenizer"}

    def problems(self, task: Any) -> list[str]:
        if self.val_fraction + self.test_fraction >= 1:
            other = f"with dataset.test_fraction={self.test_fraction}"
            fault = f"{other} it leaves nothing to train on; use less"
            return [f"dataset.val_fraction={self.val_fraction}: {fault}"]
        if not self.are_bytes and not self.tokens.endswith(".json"):
            fault = "is neither bytes nor a tokenizer's .json; use dataset.tokens=bytes"
            return [f"dataset.tokens={self.tokens}: {fault}"]
        return []

    def prepare(self, task: Any = None, *, learns: bool = True) -> None:
        self.extents()
        if not self.are_bytes:
            text = self._read_once()
            _report_lost(self.root, text.lost, text.seen, text.first)
        below = files_below(self.root)
        report_left_out(self.root, left_out(below, map(str, self.files())), "text")

    def measured(self) -> Literal["test", "all"]:
        return "all"

    def fingerprint(self) -> str:
        self.extents()
        return self._content()

    def _sources(self) -> tuple[Path, ...]:
        return self.files() if self.are_bytes else (*self.files(), Path(self.tokens))

    def _content(self) -> str:
        return of_content(self._sources(), f"text-{digest([str(Path(self.root).resolve())])}")

    def open(self, how: Opening) -> Source:
        from expt.data.memory import of_extents

        tokens = None if self.are_bytes else self._read_once().tokens
        return of_extents(self.extents(), self.known_features(), tokens)

    def known_features(self, vocabulary: int | None = None) -> Features:
        tokens = Tokens(vocab_size=vocabulary or self.vocab_size(), context=self.context)
        return Features(tokens, tokens)

    def extents(self) -> tuple[Extent, Extent | None, Extent | None]:
        """Return the parts that train, validate and test, which share no token; None without one.

        Raise DataError for a text that is missing, no plain one, or too short: each part must hold
        a token and its next.
        """
        files, unit = self.files(), "bytes" if self.are_bytes else "tokens"
        if self.are_bytes:
            sizes = tuple(collected(_size, files))
        else:
            sizes = (len(self._read_once().tokens),)
        total = sum(sizes)
        test, val = round(total * self.test_fraction), round(total * self.val_fraction)
        bounds = [0, total - val - test, total - test, total]
        train, *others = (Extent(files, sizes, *pair) for pair in itertools.pairwise(bounds))
        val_part = others[0] if self.val_fraction > 0 else None
        test_part = others[1] if self.test_fraction > 0 else None
        for name, extent in (("train", train), ("val", val_part), ("test", test_part)):
            if extent and extent.stop - extent.start < 2:
                left = f"of its {total} {unit} {extent.stop - extent.start} are left for {name}"
                fault = f"{left}, which needs 2 or more; give a longer text"
                raise DataError(f"dataset.root={self.root}: {fault}")
        if self.context > train.stop - 1:
            fault = f"only {train.stop} {unit} are left to train on; use less"
            raise DataError(f"dataset.context={self.context}: {fault}")
        return train, val_part, test_part

    def files(self) -> tuple[Path, ...]:
        """Return the file, or all below the folder, in order. Raise DataError for none."""
        root = Path(self.root)
        files = sorted(map(Path, files_below(root, (".txt",)))) if root.is_dir() else [root]
        if not files or not root.exists():
            fix = "give a plain text, or a folder of *.txt"
            raise DataError(f"dataset.root={root}: no text is there; {fix}")
        return tuple(files)

    @property
    def _coding(self) -> _Bytes | _OfTokenizer:
        return _Bytes() if self.are_bytes else _OfTokenizer(self.tokens)

    def vocab_size(self) -> int:
        """Return how many tokens there are."""
        return self._coding.vocab_size

    def encode(self, text: str) -> list[int]:
        return self._coding.encode(text)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 are replaced."""
        return self._coding.decode(tokens)

    def lines(self, path: str) -> Iterator[tuple[int, np.ndarray]]:
        return self._coding.lines(path)

    def _read_once(self) -> _Tokens:
        """Return the tokens that the tokenizer makes of all files."""
        files, coding = self.files(), _OfTokenizer(self.tokens)

        def read() -> Arrays:
            kind = np.uint16 if coding.vocab_size <= 1 << 16 else np.uint32
            found: list[Any] = [np.empty(0, kind)]

            def read_one(path: Path) -> None:
                with opened(path) as file:
                    while lines := file.readlines(_AT_A_TIME):
                        found.append(np.array(coding.read("".join(lines)), kind))

            collected(read_one, files)
            about = [coding.lost, coding.seen, *map(ord, coding.first)]
            return Arrays(np.concatenate(found), np.array(about, np.int64))

        tokens, about = decoded("text", self._sources(), self._content(), read)
        lost, seen, *first = about.tolist()
        return _Tokens(tokens, lost, seen, "".join(map(chr, first)))


def _size(path: Path) -> int:
    with refuse_unreadable(path):
        head_of(path)
        return path.stat().st_size


class _Bytes:
    """Tokens that are the bytes of UTF-8."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="surrogateescape"))

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def lines(self, path: str) -> Iterator[tuple[int, np.ndarray]]:
        with refuse_unreadable(path), open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield number, np.frombuffer(line.rstrip(b"\r\n"), np.uint8)


class _OfTokenizer:
    """Tokens of the tokenizer in a file; `read` counts the characters that it has no token for."""

    def __init__(self, file: str) -> None:
        self._tokenizer = _load(file, tuple(state_of(file)) if os.path.exists(file) else ())
        self.lost, self.seen, self.first = 0, 0, ""

    @property
    def vocab_size(self) -> int:
        return 1 + int(max(self._tokenizer.get_vocab(with_added_tokens=True).values()))

    @functools.cached_property
    def _unknown(self) -> int | None:
        """The token of unknown characters, if there is one."""
        model = self._tokenizer.model
        if type(model).__name__ == "Unigram":  # its attributes have no number of it
            found: int | None = json.loads(self._tokenizer.to_str())["model"]["unk_id"]
            return found
        named = getattr(model, "unk_token", None)
        return self._tokenizer.token_to_id(named) if named else None

    def encode(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids]

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def lines(self, path: str) -> Iterator[tuple[int, np.ndarray]]:
        with refuse_unreadable(path), opened(Path(path)) as text:
            for number, words in enumerate(text, 1):
                yield number, np.array(self.read(words.rstrip("\r\n")), np.int64)
        _report_lost(path, self.lost, self.seen, self.first)

    def read(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = found.ids
        tokens, offsets = np.array(ids), np.array(found.offsets, np.int64).reshape(-1, 2)
        bounds = np.zeros(len(text) + 1, np.int64)
        for places, step in zip(offsets[tokens != self._unknown].T, (1, -1), strict=True):
            np.add.at(bounds, places, step)
        # Blanks may lie between the tokens of words.
        lost = [at for at in np.flatnonzero(bounds.cumsum()[:-1] <= 0) if not text[at].isspace()]
        if lost and not self.first:
            self.first = text[lost[0] :].split(maxsplit=1)[0][:_FIRST]
        self.lost += len(lost)
        self.seen += len(text)
        return ids


@functools.lru_cache(maxsize=1)  # a prediction has a text for each line
def _load(file: str, _state: tuple[int, ...]) -> Any:
    require(f"dataset.tokens={file}", "tokenizers", extra="tokenizers")
    try:
        library: Any = importlib.import_module("tokenizers")
        found = library.Tokenizer.from_file(file)
    except Exception as error:  # the library raises no other
        raise DataError(
            f"dataset.tokens={file}: cannot be read as a tokenizer ({first_line(error)})"
        ) from error
    found.no_truncation()  # its file may have both, for the samples of another model
    found.no_padding()
    return found


def _report_lost(where: object, lost: int, seen: int, first: str) -> None:
    """Warn of characters of a text that no token stands for, if there are any."""
    if lost:
        warn_once(
            f"{where}: {lost} of {seen} characters ({lost / seen:.2%}) are lost, since the"
            f" tokenizer has no token for them, such as in {first!r}"
        )
