"""Every token counts alike: the curve is that of a plain loop by tokens, however workers and parts
cut the batches."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from expt.config.schema import RunConfig
from expt.data import indexing
from expt.data.kinds.custom import Custom
from expt.data.loading import Batch
from expt.data.memory import NO_TARGET
from expt.errors import DataError
from expt.models.transformer import Transformer
from expt.tasks.language_model import LanguageModel
from tests.conftest import Configured
from tests.ranks import together
from tests.training.plain import trained_on

VOCAB, LONGEST, BATCH, EPOCHS, LR, SEED = 11, 24, 12, 3, 0.2, 4
MODEL = {"layers": 1, "heads": 2, "width": 16}
CPU = torch.device("cpu")


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """The longer, the easier: one token again and again, or a few drawn ones."""

    vocab_size, context = VOCAB, LONGEST

    def __init__(self, train: bool) -> None:
        drawn = torch.Generator().manual_seed(int(train))
        self._lines = [
            (
                torch.full((LONGEST + 1,), index % 3)
                if index % 3
                else torch.randint(VOCAB, (2 + index % 4,), generator=drawn)
            )
            for index in range(47)
        ]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._lines[index][:-1], self._lines[index][1:]

    @staticmethod
    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        tokens, targets = zip(*samples, strict=True)
        return pad_sequence(list(tokens), True), pad_sequence(list(targets), True, NO_TARGET)


class Found(NamedTuple):
    losses: list[float]
    val: dict[str, float]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other in tensors as small as these
    yield
    torch.set_num_threads(before)


@pytest.fixture
def config(configured: Configured) -> RunConfig:
    model = ("model=transformer", *(f"model.{key}={value}" for key, value in MODEL.items()))
    sizes = (
        f"batch_size={BATCH}",
        f"epochs={EPOCHS}",
        f"seed={SEED}",
        "threads=1",
        "drop_last=false",
    )
    optimizer = ("optimizer=plain_sgd", f"optimizer.lr={LR}")
    text = configured(
        "task=language_model", "dataset=text", "dataset.root=x", *model, *sizes, *optimizer
    )
    own = Custom(target=f"{__name__}.Sentences", num_workers=0, val_fraction=0.2, kwargs={})
    return dataclasses.replace(text, dataset=own)


@functools.cache
def plain_loop(workers: int | None) -> Found:
    """By tokens of the whole batch; or, with `workers`, the average of each one's average by
    tokens."""
    torch.manual_seed(SEED)
    model, lines = Transformer(vocab_size=VOCAB, context=LONGEST, **MODEL), Sentences(train=True)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    train, val = indexing.split(len(lines), 0.2, None)
    losses = []
    for epoch in range(1, EPOCHS + 1):
        for batch in train[indexing.permutation(len(train), SEED, epoch)].split(BATCH):
            parts = (
                [batch]
                if workers is None
                else [part for part in batch.tensor_split(workers) if len(part)]
            )
            loss = torch.stack([mean_loss(model, lines, part) for part in parts]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        total = (
            torch.cat([token_losses(model, lines, index) for index in val.tolist()])
            .double()
            .mean()
            .item()
        )
        hits = (
            torch.cat([right(model, lines, index) for index in val.tolist()]).double().mean().item()
        )
    expected = {
        "loss": total,
        "perplexity": math.exp(total),
        "bits_per_token": total / math.log(2),
        "accuracy": hits,
    }
    return Found(losses, expected)


def mean_loss(model: nn.Module, lines: Sentences, indices: Tensor) -> Tensor:
    return torch.cat([token_losses(model, lines, index) for index in indices.tolist()]).mean()


def token_losses(model: nn.Module, lines: Sentences, index: int) -> Tensor:
    """One line by itself: there is nothing to pad."""
    tokens, targets = lines[index]
    return functional.cross_entropy(model(tokens[None])[0], targets, reduction="none")


def right(model: nn.Module, lines: Sentences, index: int) -> Tensor:
    tokens, targets = lines[index]
    found: Tensor = model(tokens[None])[0].argmax(-1) == targets
    return found


THREE = pytest.param(3, 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(("world_size", "parts"), [(1, 1), (2, 1), THREE, (4, 1), (1, 3), (4, 3)])
def test_the_curve_is_that_of_a_plain_loop_by_tokens(
    world_size: int, parts: int, config: RunConfig, tmp_path: Path
) -> None:
    """38 lines in batches of 12: the last has 2, so that of 4 workers two have none."""
    ours = dataclasses.replace(config, world_size=world_size, gradient_accumulation=parts)
    exact = plain_loop(None)
    for found in together(tmp_path, world_size, functools.partial(trained_on, config=ours)):
        assert [values["loss"] for values in found["steps"]] == pytest.approx(
            exact.losses, abs=1e-4
        )
        assert found["val"] == pytest.approx(exact.val, rel=1e-5)


def test_an_average_of_the_workers_averages_would_be_another_curve() -> None:
    exact, averaged = plain_loop(None), plain_loop(4)
    assert len(exact.losses) == 4 * EPOCHS
    assert (
        max(abs(one - other) for one, other in zip(exact.losses, averaged.losses, strict=True))
        > 1e-2
    )
    assert abs(exact.val["loss"] - averaged.val["loss"]) > 1e-2


def test_padding_counts_nothing() -> None:
    task, logits = (
        LanguageModel(),
        torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(0)),
    )
    targets = torch.tensor([[1, 2, 3, 4, 5], [6, 7, NO_TARGET, NO_TARGET, NO_TARGET]])
    total, weight = task.loss(logits, Batch(None, targets, 2))
    kept = torch.cat([logits[0], logits[1, :2]]), torch.cat([targets[0], targets[1, :2]])
    assert total.item() == pytest.approx(
        functional.cross_entropy(*kept, reduction="sum").item(), rel=1e-6
    )
    assert int(weight) == 7
    hits, of = task.measure(logits, Batch(None, targets, 2))["accuracy"]
    assert (int(hits), int(of)) == (int((kept[0].argmax(-1) == kept[1]).sum()), 7)
    nothing, of_none = task.loss(logits, Batch(None, torch.full_like(targets, NO_TARGET), 2))
    assert (nothing.item(), int(of_none)) == (0.0, 0)


def test_a_model_for_other_targets_is_told() -> None:
    with pytest.raises(
        DataError, match=r"the model gives \[2, 7\] for targets \[2, 5\]; let it give logits"
    ):
        LanguageModel().loss(
            torch.zeros(2, 7), Batch(None, torch.zeros(2, 5, dtype=torch.int64), 2)
        )


def test_a_loss_beyond_measure_has_an_infinite_perplexity() -> None:
    assert LanguageModel().derive({"loss": 1000.0})["perplexity"] == math.inf
    assert math.isnan(LanguageModel().derive({"loss": math.nan})["perplexity"])
