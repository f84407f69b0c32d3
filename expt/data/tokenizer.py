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
from typing import Any, TypeAlias

from expt.data.checksums import of_files
from expt.errors import ConfigError, DataError, first_line, require
from expt.models.published_files import fetched, is_name

Rows: TypeAlias = list[list[int]]
_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*.model", "*.spm", "*.tiktoken", "config.json",
)  # fmt: skip
"""The files of a model's folder that a tokenizer may read."""
_MOST = 1 << 20
"""Beyond it the limit of a tokenizer is the number that stands for none."""


@functools.lru_cache(maxsize=4)  # of a name it takes a request
def folder_of(name: str) -> Path:
    """Return a folder, or that of a name on the hub. Raise DataError where it has no tokenizer."""
    folder, at = Path(name), f"dataset.tokenizer={name}"
    if not folder.is_dir() and is_name(name):
        require(at, "transformers", extra="transformers")
        folder = fetched(at, name, None, *_FILES)
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
        limit = max_tokens or (own.model_max_length if own.model_max_length < _MOST else None)
        self.sizes: dict[str, Any] = {
            "vocab_size": vocab_size,
            "pad_id": next(each for each in pads if each is not None),
            "max_tokens": limit,
        }
        """The fields of a feature that it knows."""
        template = own.chat_template
        if role == "messages" and not re.search(r"{%-?\s*generation\b", str(template)):
            has = "has no chat template" if template is None else "its chat template lacks these"
            raise ConfigError(
                f"{self._at}: {has}; a template that puts {{% generation %}} and"
                " {% endgeneration %} around responses says which tokens are predicted"
            )

    def encode(self, columns: Sequence[Sequence[Any]]) -> tuple[Rows, Rows, int]:
        """Return the tokens of rows, given by column, the longest cut at their end.

        Also 1 for each token that is to be predicted, if it is causal, and how many were cut.
        """
        try:
            ids, counted = self._read(*columns)
        except Exception as error:  # of a template, of JSON, of Rust
            raise DataError(f"{self._at}: cannot read the texts ({first_line(error)})") from error
        most = self.sizes["max_tokens"]
        cut = [] if most is None else [at for at, each in enumerate(ids) if len(each) > most]
        for at in cut:
            if self.is_causal:
                ids[at], counted[at] = ids[at][:most], counted[at][:most]
            else:  # special tokens at the end stay
                (ids[at],) = self._ids([columns[0][at]], truncation=True, max_length=most)
        whole = [each or [self.sizes["pad_id"]] for each in ids]  # attention needs a token
        return whole, [each or [0] for each in counted], len(cut)

    def _ids(self, texts: Sequence[str], **how: Any) -> Rows:
        only = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        found: Rows = self._own([*texts], **only, **how)["input_ids"]
        return found

    def _read(self, first: Sequence[Any], second: Sequence[str] = ()) -> tuple[Rows, Rows]:
        own = self._own
        if self._role == "messages":  # the template has its own special tokens
            found = own.apply_chat_template(
                [json.loads(each) if isinstance(each, str) else each for each in first],
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
            )
            return found["input_ids"], found["assistant_masks"]
        if not self.is_causal:
            return self._ids(first), []
        asks, none = self._role == "prompt", [""] * len(first)
        prompts, responses = (first, second or none) if asks else (none, first)
        begin = [each for each in self._ids([""])[0] if each == own.bos_token_id][:1]
        is_whole = bool(second) or not asks  # a prompt alone is to be continued
        end = [own.eos_token_id] if is_whole and own.eos_token_id is not None else []
        both = (self._ids(each, add_special_tokens=False) for each in (prompts, responses))
        pairs = [(begin + asked, said + end) for asked, said in zip(*both, strict=True)]
        counted = [[0] * len(asked) + [1] * len(said) for asked, said in pairs]
        return [asked + said for asked, said in pairs], counted


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
