"""A case of each task with ignored targets, its loss by torch and its metrics by torchmetrics."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import expt
from expt.config.constraints import Target
from expt.config.schema import RunConfig
from expt.data.kinds.custom import Custom
from expt.data.loading import Batch
from expt.features import NO_TARGET
from expt.late import Late
from expt.models.transformer import Transformer
from expt.models.vision import MLP, UNet
from expt.tasks.custom import Config as TargetTask
from tests.conftest import Configured

measured: Any = Late("torchmetrics.functional")

SIZE, TRAINED_ON, TESTED_ON, BATCH, EPOCHS, LR, SEED = 53, 50, 11, 12, 1, 0.1, 4
"""Three validate, so that of four workers one has none, and the last batch has two."""
CLASSES, SIDE, VOCAB, LONGEST, IGNORED = 4, 4, 7, 9, 255
Samples = tuple[Any, Any]


class Rows(Dataset[Samples]):
    """What the datasets share: their samples are made at once.

    The test set is not a multiple of the workers.
    """

    def __init__(self, train: bool) -> None:
        generator = torch.Generator().manual_seed(int(train))
        self.samples = [
            self.sample(index, generator) for index in range(SIZE if train else TESTED_ON)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Samples:
        return self.samples[index]

    def sample(self, index: int, generator: torch.Generator) -> Samples:
        raise NotImplementedError


class Images(Rows):
    def sample(self, index: int, generator: torch.Generator) -> Samples:
        image = torch.rand(1, SIDE, SIDE, generator=generator)
        return image, int(image[0, :2, :2].mean() * 2.99 + (index % 7 == 0))


class Labels(Rows):
    def sample(self, index: int, generator: torch.Generator) -> Samples:
        row = torch.randn(6, generator=generator)
        return row, (row[:3] + row[3:] > 0.5).float()


class Numbers(Rows):
    """Two targets each, of which one is large."""

    def sample(self, index: int, generator: torch.Generator) -> Samples:
        row = torch.randn(6, generator=generator)
        return row, torch.stack([row.sum(), 3 + row[0] * row[1]])


class Masks(Rows):
    """The share of pixels that count grows from sample to sample; some have none."""

    def sample(self, index: int, generator: torch.Generator) -> Samples:
        image = torch.rand(2, 8, 8, generator=generator)
        mask = (image[0] * 2 + image[1]).long()
        mask[torch.rand(8, 8, generator=generator) < index / SIZE] = IGNORED
        return image, torch.full_like(mask, IGNORED) if index % 9 == 0 else mask


class Lines(Rows):
    """The longer, the easier; some are nothing but padding."""

    vocab_size, context = VOCAB, LONGEST

    def sample(self, index: int, generator: torch.Generator) -> Samples:
        if index % 3:
            line = torch.full((LONGEST + 1,), index % 3)
        else:
            line = torch.randint(VOCAB, (2 + index % 4,), generator=generator)
        return line[:-1], torch.full_like(line[1:], NO_TARGET) if index % 10 == 0 else line[1:]

    @staticmethod
    def collate(samples: list[Samples]) -> Samples:
        tokens, targets = zip(*samples, strict=True)
        return pad_sequence(list(tokens), True), pad_sequence(list(targets), True, NO_TARGET)


class Weighted(Rows):
    """Samples whose weights differ by much; a third has none."""

    def sample(self, index: int, generator: torch.Generator) -> Samples:
        row = torch.randn(6, generator=generator)
        weight = torch.rand((), generator=generator) ** 4 * float(index % 3 > 0)
        return {"row": row}, (row.sum(), weight)


class ByWeight(expt.Task):
    def forward(self, model: Callable[..., Any], batch: Batch) -> Any:
        return model(batch.inputs["row"])[:, 0]

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        targets, weights = batch.targets
        return (weights * (outputs - targets) ** 2).sum(), weights.sum()

    def measure(self, outputs: Tensor, batch: Batch) -> Mapping[str, tuple[Tensor, float]]:
        return {"mae": ((outputs - batch.targets[0]).abs().sum(), len(outputs))}


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 1)


OWN = {
    "task": TargetTask(target=f"{__name__}.ByWeight", metrics={"mae": "min"}, kwargs={}),
    "model": Target(target=f"{__name__}.Linear", kwargs={}),
}


class Case(NamedTuple):
    words: tuple[str, ...]
    dataset: type[Rows]
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    """Of a batch's outputs and targets, as torch itself means it"""
    metrics: Callable[[Any, Any], Mapping[str, Any]]
    """Of all outputs and targets of a set, by torchmetrics"""
    refused: Sequence[Sequence[float]] = ()
    """Samples' targets each of which an evaluation refuses"""


def of_classes(logits: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
    return {
        "accuracy": measured.classification.multiclass_accuracy(
            logits, labels, CLASSES, average="micro"
        ),
        "auroc": measured.classification.multiclass_auroc(logits.softmax(1), labels, CLASSES),
    }


def of_labels(logits: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
    chances, given = logits.sigmoid(), labels.long()
    return {
        "accuracy": measured.classification.multilabel_accuracy(
            chances, given, 3, threshold=0.4, average="micro"
        ),
        "f1": measured.classification.multilabel_f1_score(
            chances, given, 3, threshold=0.4, average="micro"
        ),
        "ap": measured.classification.multilabel_average_precision(chances, given, 3),
    }


def of_numbers(outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
    ours, theirs = outputs.double().flatten(), targets.double().flatten()
    error = (outputs.double() - targets.double()).reshape(len(targets), -1)
    return {
        "mae": measured.mean_absolute_error(ours, theirs),
        "rmse": error.square().mean(0).sqrt().mean(),
        "r2": measured.r2_score(
            *(each.double().reshape(len(each), -1).squeeze(1) for each in (outputs, targets))
        ),
    }


def of_masks(logits: Tensor, masks: Tensor) -> Mapping[str, Tensor]:
    here = masks != IGNORED
    predicted, classes = logits.argmax(1)[here], masks[here]
    dice = measured.classification.multiclass_f1_score(predicted, classes, 3, average="none")
    return {
        "mean_iou": measured.classification.multiclass_jaccard_index(
            logits, masks, 3, ignore_index=IGNORED
        ),
        "accuracy": measured.classification.multiclass_accuracy(
            predicted, classes, 3, average="micro"
        ),
        "dice": (
            dice[[number for number in range(3) if number in predicted or number in classes]].mean()
        ),
    }


def of_tokens(logits: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
    perplexity = measured.text.perplexity(logits.double(), targets, ignore_index=NO_TARGET)
    here = targets != NO_TARGET
    return {
        "perplexity": perplexity,
        "bits_per_token": perplexity.log2(),
        "accuracy": (logits.argmax(-1)[here] == targets[here]).double().mean(),
    }


def of_weights(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
    return {"mae": measured.mean_absolute_error(outputs[:, 0], targets[0])}


def by_weight(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    wanted, weights = targets
    return (weights * (outputs[:, 0] - wanted) ** 2).sum() / weights.sum()


def extra(name: str, target: str, **arguments: object) -> str:
    shown = "".join(f", {key}: {value}" for key, value in arguments.items())
    return f"+task.metrics.{name}={{_target_: torchmetrics.{target}, better: max{shown}}}"


MLP_WORDS = ("model.hidden=[5]",)
CASES = {
    "classification": Case(
        (*MLP_WORDS, extra("auroc", "classification.MulticlassAUROC", num_classes=CLASSES)),
        Images,
        lambda: MLP(channels=1, image_size=(SIDE, SIDE), num_classes=CLASSES, hidden=(5,)),
        functional.cross_entropy,
        of_classes,
    ),
    "multilabel": Case(
        (
            *("task=multilabel", "task.threshold=0.4", "dataset=table", "dataset.path=x",
                "dataset.targets=x"),
            *(*MLP_WORDS, extra("ap", "classification.MultilabelAveragePrecision", num_labels=3)),
        ),
        Labels,
        lambda: MLP(channels=1, image_size=(1, 6), num_classes=3, hidden=(5,)),
        functional.binary_cross_entropy_with_logits,
        of_labels,
        refused=((1, 0.5, 0), (-1, 1, 1)),
    ),
    "regression": Case(
        ("task=regression", "task.loss=huber", "dataset=diabetes", *MLP_WORDS),
        Numbers,
        lambda: MLP(channels=1, image_size=(1, 6), num_classes=2, hidden=(5,)),
        functional.huber_loss,
        of_numbers,
    ),
    "segmentation": Case(
        (
            *("task=segmentation", "dataset=segmentation_folder", "dataset.root=x",
                "dataset.num_classes=3"),
            "task.num_classes=3",
            *("model=unet", "model.widths=[3,4]", "model.batch_norm=false"),
        ),
        Masks,
        lambda: UNet(channels=2, image_size=(8, 8), num_classes=3, widths=(3, 4), batch_norm=False),
        functools.partial(functional.cross_entropy, ignore_index=IGNORED),
        of_masks,
    ),
    "language_model": Case(
        (
            *("task=language_model", "dataset=text", "dataset.root=x"),
            *("model=transformer", "model.layers=1", "model.heads=2", "model.width=8"),
        ),
        Lines,
        lambda: Transformer(vocab_size=VOCAB, context=LONGEST, layers=1, heads=2, width=8),
        lambda logits, targets: functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET
        ),
        of_tokens,
    ),
    "own": Case((), Weighted, Linear, by_weight, of_weights),
}  # fmt: skip


def config_of(name: str, configured: Configured) -> RunConfig:
    """On one worker, of this case."""
    case, sizes = CASES[name], (f"batch_size={BATCH}", f"epochs={EPOCHS}", f"seed={SEED}")
    config = configured(
        *case.words, *sizes, "optimizer=plain_sgd", f"optimizer.lr={LR}", "threads=1"
    )
    classes = CLASSES if case.dataset is Images else None
    target = f"{__name__}.{case.dataset.__name__}"
    dataset = Custom(
        target=target, num_classes=classes, num_workers=0, val_fraction=3 / SIZE, kwargs={}
    )
    own: dict[str, Any] = {"objective": "mae/val", **OWN} if name == "own" else {}
    return dataclasses.replace(config, dataset=dataset, **own)
