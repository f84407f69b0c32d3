"""A text's windows, read where its tokens lie."""

from __future__ import annotations

import functools

import torch

from expt.config import datasets
from expt.data.source import Part, Source
from expt.data.text import TextLoader, Windows
from expt.data.text_files import parts_of, tokens_of, vocab_size


def windows(dataset: datasets.Text) -> Source:
    """Its parts, by windows of `context` tokens.

    Raises ConfigError and DataError, see text_files.
    """
    read = None if dataset.tokens == "bytes" else tokens_of(dataset)
    train, val, test = (
        part and _of_text(Windows(part, dataset.context, read)) for part in parts_of(dataset)
    )
    assert train
    tokens = torch.zeros(dataset.context, dtype=torch.int64)
    shapes = {"vocab_size": vocab_size(dataset), "context": dataset.context}
    return Source(shapes, (), (tokens, tokens), train, test, torch.zeros(train.size), val=val)


def _of_text(windows: Windows) -> Part:
    return Part(len(windows), functools.partial(TextLoader, windows))
