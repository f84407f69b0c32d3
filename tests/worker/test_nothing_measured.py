"""A split, or a stretch of training, of which all is to be ignored: that nothing was measured is
said."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import expt
from tests.facade import Capture, as_typed
from tests.worker.conftest import TrainAlone


class Padding(Dataset[tuple[Tensor, Tensor]]):
    """Tokens: of training each second sample is one of padding, else all are."""

    vocab_size, context = 5, 4

    def __init__(self, train: bool) -> None:
        self.inputs = torch.randint(5, (18, 4), generator=torch.Generator().manual_seed(0))
        self.targets = torch.full((18, 4), -100)
        if train:
            self.targets[::2] = 1

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Table(nn.Sequential):
    def __init__(self, vocab_size: int) -> None:
        super().__init__(nn.Embedding(vocab_size, vocab_size))


def test_unmeasured_split_is_told(train_alone: TrainAlone, capsys: Capture) -> None:
    own: Any = (
        f"+dataset={{_target_: {__name__}.Padding, num_workers: 0}}",
        f"+model={{_target_: {__name__}.Table}}",
    )
    words = (
        "~dataset",
        "~model",
        *own,
        *as_typed("task=language_model batch_size=1 epochs=1"),
    )
    train_alone(*words, "log_every=1", "+dataset.val_fraction=0.2")
    found = {line for line in capsys.readouterr().err.splitlines() if ": not measured" in line}
    names = ("loss", "perplexity", "bits_per_token", "accuracy")
    why = ": not measured, because every target is ignored or has no weight"
    assert found == {
        "warning: " + ", ".join(f"running/{name}" for name in names) + why,
        "warning: " + ", ".join(f"{name}/test" for name in names) + why,
    }


class Weightless(expt.Task):
    """A metric of a weight of 0, beside a loss that has one."""

    def loss(self, outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return outputs.square().sum(), len(outputs)

    def measure(self, outputs: Tensor, batch: Any) -> dict[str, tuple[Tensor, int]]:
        return {"rare": (outputs.sum(), 0)}


def test_an_objective_of_nan_is_told_once(train_alone: TrainAlone, capsys: Capture) -> None:
    words = (
        "~task",
        f"+task={{_target_: {__name__}.Weightless, metrics: {{rare: max}}}}",
        "model.hidden=[4]",
    )
    train_alone(*words, "epochs=2", "dataset.train_limit=160")
    found = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("warning: objective")
    ]
    assert len(found) == 1, found
    assert found[0].startswith(
        "warning: objective rare/val is nan after epoch 1: no epoch can be the best"
    )
