"""Tokenizers of Hugging Face's models: their files, and the tokens that they make. No torch."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from expt.data.checksums import of_files
from expt.errors import ConfigError, DataError, first_line, require
from expt.models.published_files import fetched, is_name

Rows: TypeAlias = list[list[int]]
_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*.model", "*.spm", "*.tiktoken", "config.json",
)  # fmt: skip
"""The files of a model's folder that a tokenizer may read."""
_SHOWN = 60
"""The most characters of a cell in a message."""
_MOST = 1 << 20
"""Beyond it the limit of a tokenizer is the number that stands for none."""


class Encoded(NamedTuple):
    """Rows as tokens."""

    ids: Rows
    counted: Rows
    """1 for each token that is to be predicted; empty unless the task is causal"""
    types: Rows
    """the segment of each token; empty where all are of the first"""
    cut: int
    """the number of rows that were longer"""


@functools.lru_cache(maxsize=4)  # of a name it takes a request
def folder_of(name: str) -> Path:
    """Return a folder, or that of NAME or NAME@REVISION on the hub.

    Raise DataError where it has no tokenizer.
    """
    folder, at = Path(name), f"dataset.tokenizer={name}"
    hub, _, revision = name.partition("@")
    if not folder.is_dir() and is_name(hub):
        require(at, "transformers", extra="transformers")
        folder = fetched(at, hub, revision or None, *_FILES)
    if not _files(folder):
        raise DataError(f"{at}: holds no tokenizer; give a folder that save_pretrained has written")
    return folder


def _files(folder: Path) -> list[str]:
    """Return the names of a tokenizer's files; none where there are only those of others."""
    found = {each.name for pattern in _FILES for each in folder.glob(pattern) if each.is_file()}
    return sorted(found) if found - {"config.json"} else []


def fingerprint(name: str) -> str:
    """Return a digest of a tokenizer's files."""
    folder = folder_of(name)
    return of_files(folder, _files(folder))


def keep(name: str, folder: Path) -> None:
    """Copy a tokenizer's files into a folder, unless they are there."""
    folder.mkdir(exist_ok=True)
    for each in _files(folder_of(name)):
        if not (folder / each).is_file():
            shutil.copyfile(folder_of(name) / each, folder / each)


class Tokenizer:
    """A tokenizer, and the way in which it reads the columns of a role."""

    def __init__(self, name: str, role: str, max_tokens: int | None, *, is_causal: bool) -> None:
        """Raise DataError where it can't be loaded, ConfigError where it has no such template."""
        self._at, self._role, self.is_causal = f"dataset.tokenizer={name}", role, is_causal
        own, vocab_size = _load(name, fingerprint(name))
        self._own = own
        pads = own.pad_token_id, own.eos_token_id, 0
        least = 0 if is_causal else own.num_special_tokens_to_add()
        if max_tokens is not None and max_tokens <= least:
            why = f"its tokenizer adds {least} tokens to each text, which leaves none; give more"
            raise ConfigError(f"dataset.max_tokens={max_tokens}: {why}")
        limit = max_tokens or (own.model_max_length if own.model_max_length < _MOST else None)
        has_segments = not is_causal and _has_segments(own)
        self.sizes: dict[str, Any] = {
            "vocab_size": vocab_size,
            "pad_id": next(each for each in pads if each is not None),
            "max_tokens": limit,
            # decoders find the last token on both sides, and some count positions from the left
            "pads_left": has_segments and own.padding_side == "left",
            "pad_type": own.pad_token_type_id if has_segments else None,
        }
        """The fields of a feature that it knows."""
        template = own.chat_template
        if role == "messages" and not re.search(r"{%-?\s*generation\b", str(template)):
            lacks = "has no chat template with {% generation %} and {% endgeneration %} around"
            raise ConfigError(
                f"{self._at}: {lacks} responses, which says which tokens are predicted; add it"
            )

    def encode(self, columns: Sequence[Sequence[Any]]) -> Encoded:
        """Return the tokens of rows, given by column, the longest cut at their end."""
        try:
            ids, counted, types = self._read(*columns)
        except Exception as error:  # of a template, of JSON, of Rust
            if len(columns[0]) > 1:  # the first row that is wrong by itself
                for row in zip(*columns, strict=True):
                    self.encode([[cell] for cell in row])
            cells = ", ".join(str(column[0])[:_SHOWN] for column in columns)
            why = f"cannot read the texts ({first_line(error)}), such as {cells}"
            raise DataError(f"{self._at}: {why}") from error
        most = self.sizes["max_tokens"]
        cut = [] if most is None else [at for at, each in enumerate(ids) if len(each) > most]
        for at in cut:
            if self.is_causal:
                ids[at], counted[at] = ids[at][:most], counted[at][:most]
            else:  # special tokens at the end stay
                shorter = self._ids([columns[0][at]], truncation=True, max_length=most)
                (ids[at],), types[at : at + 1] = shorter
        pad = [self.sizes["pad_id"]]  # attention needs a token
        counted, types = ([each or [0] for each in rows] for rows in (counted, types))
        return Encoded([each or pad for each in ids], counted, types, len(cut))

    def _ids(self, texts: Sequence[str], **how: Any) -> tuple[Rows, Rows]:
        """Return the tokens of texts, and their segments if the model needs these."""
        has_types = self.sizes["pad_type"] is not None
        found = self._own(
            [*texts],
            return_attention_mask=False,
            return_token_type_ids=has_types,
            verbose=False,
            **how,
        )
        return found["input_ids"], found["token_type_ids"] if has_types else []

    def _read(self, first: Sequence[Any], second: Sequence[str] = ()) -> tuple[Rows, Rows, Rows]:
        """Return rows of tokens, 1 for those that are to be predicted, and their segments."""
        own = self._own
        if self._role == "messages":  # the template has its own special tokens
            found = own.apply_chat_template(
                [json.loads(each) if isinstance(each, str) else each for each in first],
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
            )
            return found["input_ids"], found["assistant_masks"], []
        if not self.is_causal:
            ids, types = self._ids(first)
            return ids, [], types
        asks, none = self._role == "prompt", [""] * len(first)
        prompts, responses = (first, second or none) if asks else (none, first)
        begin = [each for each in self._ids([""])[0][0] if each == own.bos_token_id][:1]
        is_whole = bool(second) or not asks  # a prompt alone is to be continued
        end = [own.eos_token_id] if is_whole and own.eos_token_id is not None else []
        both = (self._ids(each, add_special_tokens=False)[0] for each in (prompts, responses))
        pairs = [(begin + asked, said + end) for asked, said in zip(*both, strict=True)]
        counted = [[0] * len(asked) + [1] * len(said) for asked, said in pairs]
        return [asked + said for asked, said in pairs], counted, []


def _has_segments(own: Any) -> bool:
    """Return whether tokens of a single text are of several segments, as those of XLNet."""
    takes = "token_type_ids" in own.model_input_names
    return takes and any(own([""], return_token_type_ids=True)["token_type_ids"][0])


@functools.lru_cache(maxsize=1)  # a prediction has several pieces
def _load(name: str, _digest: str) -> tuple[Any, int]:
    """Return a tokenizer, and one more than its highest token: its numbers may have holes."""
    require(f"dataset.tokenizer={name}", "transformers", extra="transformers")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else it warns after each fork
    try:
        library: Any = importlib.import_module("transformers")
        library.logging.set_verbosity_error()
        own = library.AutoTokenizer.from_pretrained(folder_of(name), trust_remote_code=False)
        return own, max(len(own), *(token + 1 for token in own.get_vocab().values()))
    except Exception as error:  # the library raises many kinds
        raise DataError(
            f"dataset.tokenizer={name}: cannot be read as a tokenizer ({first_line(error)})"
        ) from error
