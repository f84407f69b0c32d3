"""A language model of words, whose hidden state is carried from batch to batch."""

import math
import re
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import expt


class Columns(Dataset):
    """A part of a text in so many columns; a batch is the next window of every column.

    So its samples are read in their order (`shuffle: false`), as many at a time as columns.
    """

    def __init__(self, root, part, columns, window, words):
        text = re.findall(r"\w+|[^\w\s]", Path(root).read_text(errors="replace").lower())
        ends = {"train": (0, 80), "val": (80, 90), "test": (90, 100)}
        known, own = (
            text[len(text) * start // 100 : len(text) * stop // 100]
            for start, stop in (ends["train"], ends[part])
        )
        number = {word: at for at, (word, _) in enumerate(Counter(known).most_common(words - 1), 1)}
        tokens = torch.tensor([number.get(word, 0) for word in own])
        self.columns = tokens[: len(tokens) // columns * columns].view(columns, -1)
        self.window = window

    def __len__(self):
        return (self.columns.shape[1] - 1) // self.window * len(self.columns)

    def __getitem__(self, index):
        start, column = index // len(self.columns) * self.window, index % len(self.columns)
        tokens = self.columns[column, start : start + self.window + 1]
        return {"tokens": tokens[:-1], "goes_on": torch.tensor([start > 0])}, tokens[1:]


class Words(nn.Module):
    """An LSTM; with the outputs it returns the state in which it is after the last word."""

    def __init__(self, words, width, layers):
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.body = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, tokens, state):
        outputs, state = self.body(self.embedding(tokens), state)
        return self.head(outputs), state


class Carried(expt.Task):
    """Perplexity; training goes on with the state of the batch before, evaluations with none."""

    sums, state = {}, None

    def forward(self, model, batch):
        state = None
        if model.training and self.state is not None:
            state = [each * batch.inputs["goes_on"] for each in self.state]
        outputs, state = model(batch.inputs["tokens"], state)
        if model.training:
            self.state = [each.detach() for each in state]
        return outputs

    def loss(self, outputs, batch):
        logits, targets = outputs.flatten(0, 1), batch.targets.flatten()
        return functional.cross_entropy(logits, targets, reduction="sum"), len(targets)

    def derive(self, means):
        return {"perplexity": math.exp(means["loss"])}

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        self.state = state["state"]
