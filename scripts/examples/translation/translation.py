"""Sequence to sequence by a transformer; sentences are of different lengths."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import expt

PAD, START, END = 0, 1, 2
VOCABULARY = 13


class Reversed(Dataset):
    """Numbers of 1 to `longest` digits, and the same read backwards."""

    def __init__(self, train, size, longest):
        drawn = torch.Generator().manual_seed(int(train))
        lengths = torch.randint(1, longest + 1, (size,), generator=drawn).tolist()
        self.numbers = [torch.randint(3, VOCABULARY, (n,), generator=drawn) for n in lengths]

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number, ends = self.numbers[index], torch.tensor([START, END])
        return number, torch.cat((ends[:1], number.flip(0), ends[1:]))

    def collate(self, samples):
        source, target = (pad_sequence(each, True, PAD) for each in zip(*samples, strict=True))
        return {"source": source, "target": target[:, :-1]}, target[:, 1:]


class Translator(nn.Module):
    """torch's transformer, with embeddings of tokens and of places."""

    def __init__(self, width, heads, layers, longest):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(longest + 2, width)
        how = {"dropout": 0.0, "batch_first": True}
        self.body = nn.Transformer(width, heads, layers, layers, 4 * width, **how)
        self.head = nn.Linear(width, VOCABULARY)

    def embed(self, tokens):
        return self.tokens(tokens) + self.places.weight[: tokens.shape[1]]

    def forward(self, source, target):
        size, padding = target.shape[1], source == PAD
        later = torch.ones(size, size, dtype=torch.bool, device=target.device).triu(1)
        how = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        return self.head(self.body(self.embed(source), self.embed(target), tgt_mask=later, **how))


class Translate(expt.Task):
    """The cross-entropy of a token, and how many sentences are right to the last one."""

    def loss(self, outputs, batch):
        how = {"ignore_index": PAD, "reduction": "sum"}
        loss = functional.cross_entropy(outputs.flatten(0, 1), batch.targets.flatten(), **how)
        return loss, (batch.targets != PAD).sum()

    def forward(self, model, batch):
        return model(**batch.inputs)

    def measure(self, outputs, batch):
        right = (outputs.argmax(2) == batch.targets) | (batch.targets == PAD)
        return {"sentences": (right.all(1).sum(), len(outputs))}
