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
from typing import Any, NamedTuple

from expt.data.checksums import of_files
from expt.errors import ConfigError, DataError, first_line, require
from expt.models.published_files import fetched, is_name

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
    """Copy a tokenizer's files into a folder."""
    source = folder_of(name)
    folder.mkdir(exist_ok=True)
    for each in _files(source):
        if not (folder / each).is_file():
            shutil.copyfile(source / each, folder / each)


class Encoded(NamedTuple):
    """The tokens of some texts."""

    ids: list[list[int]]
    counted: list[list[int]]
    """1 for each token that is to be predicted; empty where none is"""
    cut: int
    """how many texts are longer"""


class Tokenizer:
    """A tokenizer, and the way in which it reads the columns of a role."""

    def __init__(self, name: str, role: str, *, is_causal: bool, max_tokens: int | None) -> None:
        """Raise DataError where it can't be loaded, ConfigError where it has no such template."""
        self._at, self._role, self._is_causal = f"dataset.tokenizer={name}", role, is_causal
        self._own = _load(name, fingerprint(name))
        limit = self._own.model_max_length
        self.max_tokens = max_tokens or (limit if limit < _MOST else None)
        """None where texts may have any length."""
        template = self._own.chat_template
        if role == "messages" and not re.search(r"{%-?\s*generation\b", str(template)):
            has = "has no chat template" if template is None else "its chat template lacks these"
            raise ConfigError(
                f"{self._at}: {has}; a template that puts {{% generation %}} and"
                " {% endgeneration %} around responses says which tokens are predicted"
            )

    @property
    def sizes(self) -> dict[str, Any]:
        """The fields of a feature that it knows."""
        own = self._own
        pads = (own.pad_token_id, own.eos_token_id, 0)
        pad = next(each for each in pads if each is not None)
        return {"vocab_size": len(own), "pad_id": pad, "max_tokens": self.max_tokens}

    def encode(self, columns: Sequence[Sequence[Any]]) -> Encoded:
        """Return the tokens of some rows, given by column, the longest cut at the end."""
        make = {"prompt": self._responses, "messages": self._conversations}.get(self._role)
        try:
            ids, counted = (make or self._texts)(*columns)
        except Exception as error:  # of a template, or of Rust
            raise DataError(f"{self._at}: cannot read the texts ({first_line(error)})") from error
        most = self.max_tokens
        cut = [] if most is None else [at for at, each in enumerate(ids) if len(each) > most]
        for at in cut:
            if self._is_causal:
                ids[at], counted[at] = ids[at][:most], counted[at][:most]
            else:  # special tokens at the end stay
                (ids[at],) = self._ids([columns[0][at]], truncation=True, max_length=most)
        whole = [each or [self.sizes["pad_id"]] for each in ids]  # attention needs a token
        return Encoded(whole, [each or [0] for each in counted], len(cut))

    def _ids(self, texts: Sequence[str], **how: Any) -> list[list[int]]:
        only = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        found: list[list[int]] = self._own([*texts], **only, **how)["input_ids"]
        return found

    def _texts(self, texts: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
        if not self._is_causal:
            return self._ids(texts), []
        return self._responses([""] * len(texts), texts)

    def _responses(
        self, prompts: Sequence[str], responses: Sequence[str]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the first token of a text, a prompt, a response and the last, which count."""
        own, parts = self._own, (prompts, responses)
        first = [each for each in self._ids([""])[0] if each == own.bos_token_id][:1]
        last = [] if own.eos_token_id is None else [own.eos_token_id]
        asked, said = (self._ids(each, add_special_tokens=False) for each in parts)
        pairs = [*zip(asked, said, strict=True)]
        counted = [[0] * len(first + p) + [1] * len(r + last) for p, r in pairs]
        return [first + p + r + last for p, r in pairs], counted

    def _conversations(self, several: Sequence[Any]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of the template, which has its own special ones."""
        found = self._own.apply_chat_template(
            [json.loads(each) if isinstance(each, str) else each for each in several],
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        return found["input_ids"], found["assistant_masks"]


@functools.lru_cache(maxsize=1)  # a prediction has several pieces
def _load(name: str, _digest: str) -> Any:
    require(f"dataset.tokenizer={name}", "transformers", extra="transformers")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else it warns after each fork
    try:
        library: Any = importlib.import_module("transformers")
        library.logging.set_verbosity_error()
        return library.AutoTokenizer.from_pretrained(folder_of(name), trust_remote_code=False)
    except Exception as error:  # the library raises many kinds
        raise DataError(
            f"dataset.tokenizer={name}: cannot be read as a tokenizer ({first_line(error)})"
        ) from error
