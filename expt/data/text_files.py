"""The files of a text, what its tokens are, and which of them train, validate and test.

Free of torch.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from expt.config import datasets
from expt.data.cache import Arrays, decoded
from expt.errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    import numpy as np

_AT_A_TIME = 1 << 20
"""Bytes of a text that a tokenizer gets, whole lines."""


class Extent(NamedTuple):
    """Tokens `start` to `stop` of a text, its `files` one after the other."""

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    """of the files [tokens]; one for all of them where a tokenizer has read them"""
    start: int
    stop: int


class Parts(NamedTuple):
    """The parts of a text, which share no token; None where a fraction is 0."""

    train: Extent
    val: Extent | None
    test: Extent | None


def parts_of(dataset: datasets.Text) -> Parts:
    """The beginning trains, what follows validates, the end tests.

    Raises DataError for a text that is missing, no plain one, or too short: a part must hold a
    token and its next."""
    files, unit = files_of(dataset), "bytes" if dataset.tokens == "bytes" else "tokens"
    sizes = tuple(map(_size, files))
    if unit == "tokens":
        sizes = (len(tokens_of(dataset)),)
    total = sum(sizes)
    test = round(total * dataset.test_fraction)
    val = round(total * dataset.val_fraction)
    bounds = [0, total - val - test, total - test, total]
    extents = [Extent(files, sizes, *pair) for pair in itertools.pairwise(bounds)]
    wanted = (True, dataset.val_fraction > 0, dataset.test_fraction > 0)
    for name, extent, is_wanted in zip(Parts._fields, extents, wanted, strict=True):
        if is_wanted and extent.stop - extent.start < 2:
            raise DataError(
                f"dataset.root={dataset.root}: of its {total} {unit} {extent.stop - extent.start}"
                f" are left for {name}, which needs 2 or more; give a longer text"
            )
    if dataset.context > extents[0].stop - 1:
        trained_on = extents[0].stop
        raise DataError(
            f"dataset.context={dataset.context}: only {trained_on} {unit} are left to train on; use"
            " less"
        )
    train, val_part, test_part = (
        extent if is_wanted else None for extent, is_wanted in zip(extents, wanted, strict=True)
    )
    assert train
    return Parts(train, val_part, test_part)


def files_of(dataset: datasets.Text) -> tuple[Path, ...]:
    """The file, or all below the folder, in order. Raises DataError where there is none."""
    root = Path(dataset.root)
    if root.is_dir():
        found = tuple(sorted(path for path in root.rglob("*.txt") if path.is_file()))
        if not found:
            raise DataError(
                f"dataset.root={root}: no file *.txt lies below it; give a plain text, or a folder"
                " of them"
            )
        return found
    if not root.exists():
        raise DataError(
            f"dataset.root={root}: there is no such file or folder; give a plain text, or a folder"
            " of *.txt"
        )
    return (root,)


def _size(path: Path) -> int:
    try:
        with path.open("rb") as file:
            if file.read(2) == b"\x1f\x8b":
                raise DataError(
                    f"{path}: is compressed; unpack it, as in gunzip --keep {path.name}"
                )
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); mend its permissions") from error


def vocab_size(dataset: datasets.Text) -> int:
    """Tokens that there are."""
    if dataset.tokens == "bytes":
        return 256
    return 1 + int(max(_tokenizer(dataset).get_vocab(with_added_tokens=True).values()))


def encoded(dataset: datasets.Text, text: str) -> list[int]:
    """The tokens of a text."""
    if dataset.tokens == "bytes":
        return list(text.encode())
    return [*_tokenizer(dataset).encode(text, add_special_tokens=False).ids]


def decoded_text(dataset: datasets.Text, tokens: Sequence[int]) -> str:
    """The text of tokens; bytes that are no UTF-8 are replaced."""
    if dataset.tokens == "bytes":
        return bytes(tokens).decode(errors="replace")
    return str(_tokenizer(dataset).decode(tokens, skip_special_tokens=False))


def tokens_of(dataset: datasets.Text) -> np.ndarray:
    """What the tokenizer makes of the files [N], mapped into memory: it reads them once, into the
    cache.

    Raises ConfigError and DataError where there is no such tokenizer.
    """
    import numpy as np

    files, tokenizer = files_of(dataset), _tokenizer(dataset)

    def read() -> Arrays:
        kind = np.uint16 if vocab_size(dataset) <= 1 << 16 else np.uint32
        found = [np.array(ids, kind) for path in files for ids in _read(path, tokenizer)]
        return Arrays(np.concatenate([np.empty(0, kind), *found]), np.empty(0, np.int64))

    return decoded("tokens", [*files, Path(dataset.tokens)], read).images


def _read(path: Path, tokenizer: Any) -> list[list[int]]:
    found = []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        while lines := file.readlines(_AT_A_TIME):
            found.append(tokenizer.encode("".join(lines), add_special_tokens=False).ids)
    return found


def _tokenizer(dataset: datasets.Text) -> Any:
    try:
        library: Any = importlib.import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(
            f"dataset.tokens={dataset.tokens}: needs tokenizers; pip install 'expt[tokenizers]'"
        ) from error
    if not Path(dataset.tokens).is_file():
        raise DataError(
            f"dataset.tokens={dataset.tokens}: there is no such file; name a tokenizer.json, or use"
            " bytes"
        )
    try:
        found = library.Tokenizer.from_file(dataset.tokens)
    except Exception as error:  # the library raises no other
        told = first_line(error)
        raise DataError(
            f"dataset.tokens={dataset.tokens}: cannot be read as a tokenizer ({told}); mend it"
        ) from error
    found.no_truncation()  # its file may have both, for the samples of another model
    found.no_padding()
    return found
