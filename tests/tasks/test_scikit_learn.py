"""Metrics by class, of several targets and far from 0, and tables, are scikit-learn's.

Torchmetrics' are those of training/test_every_task.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from expt.data.loading import Batch
from expt.tasks.classification import Classification
from expt.tasks.regression import Regression
from expt.tasks.segmentation import Segmentation
from expt.tasks.sums import Sums
from expt.tasks.task import Task
from tests.facade import dataset
from tests.late import Late

metrics: Any = Late("sklearn.metrics")
datasets: Any = Late("sklearn.datasets")

CPU = torch.device("cpu")
SIZES, CLASSES, IGNORED, FAR = (40, 7, 1, 23), 4, 255, 1e6
DRAWN = torch.Generator().manual_seed(0)


class Case(NamedTuple):
    task: Task
    outputs: Tensor
    targets: Tensor
    expected: Callable[[Any, Any], Mapping[str, float]]
    """By scikit-learn, of outputs and targets as arrays"""


def normal(*size: int) -> Tensor:
    return torch.randn(sum(SIZES), *size, generator=DRAWN)


def classes(*size: int, number: int = CLASSES) -> Tensor:
    return torch.randint(number, (sum(SIZES), *size), generator=DRAWN)


def without(targets: Tensor, nothing: int) -> Tensor:
    """A third counts for nothing."""
    return targets.masked_fill(torch.rand(targets.shape, generator=DRAWN) < 1 / 3, nothing)


def chances(logits: Any) -> Any:
    return torch.tensor(logits).double().softmax(1).numpy()


def of_uneven_classes(logits: Any, labels: Any) -> Mapping[str, float]:
    found = logits.argmax(1)
    return {
        "loss": metrics.log_loss(labels, chances(logits), labels=range(CLASSES + 1)),
        "accuracy": metrics.accuracy_score(labels, found),
        "f1": metrics.f1_score(labels, found, average="macro"),
        "balanced_accuracy": metrics.recall_score(labels, found, average="macro", labels=[0, 1]),
    }


def of_numbers(outputs: Any, targets: Any) -> Mapping[str, float]:
    ours, theirs = outputs.astype(float).ravel(), targets.astype(float).ravel()
    return {
        "loss": metrics.mean_squared_error(theirs, ours),
        "mae": metrics.mean_absolute_error(theirs, ours),
        "rmse": metrics.root_mean_squared_error(theirs, ours),
        "r2": metrics.r2_score(theirs, ours),
    }


def of_pixels(logits: Any, masks: Any) -> Mapping[str, float]:
    here = masks != IGNORED
    rows, right = np.moveaxis(logits, 1, -1)[here], masks[here]
    predicted = rows.argmax(1)
    return {
        "loss": metrics.log_loss(right, chances(rows)),
        "mean_iou": metrics.jaccard_score(right, predicted, average="macro"),
        "accuracy": metrics.accuracy_score(right, predicted),
        "dice": metrics.f1_score(right, predicted, average="macro"),
    }


CASES = {
    "classification by class": Case(
        Classification(
            metrics={"accuracy": "max", "f1": "max", "balanced_accuracy": "max"},
            num_classes=CLASSES + 1,
        ),
        torch.nn.functional.pad(normal(CLASSES), (0, 1), value=-9),
        classes(number=2),
        of_uneven_classes,
    ),
    "regression of several targets": Case(
        Regression(origin=(0.0, FAR)),
        normal(2) + torch.tensor([0, FAR]),
        normal(2) + torch.tensor([0, FAR]),
        lambda ours, theirs: {
            **of_numbers(ours, theirs),
            "rmse": metrics.root_mean_squared_error(theirs.astype(float), ours.astype(float)),
            "r2": metrics.r2_score(theirs.astype(float), ours.astype(float)),
        },
    ),
    "regression of pictures": Case(Regression(), normal(2, 3, 3), normal(2, 3, 3), of_numbers),
    "regression far from 0": Case(
        Regression(origin=FAR + 1), normal(1) + FAR, normal(1) + FAR, of_numbers
    ),
    "a class that is nowhere": Case(
        Segmentation(CLASSES + 1, IGNORED),
        torch.nn.functional.pad(normal(CLASSES, 3, 5), (0, 0, 0, 0, 0, 1), value=-100),
        without(classes(3, 5), IGNORED),
        lambda logits, masks: of_pixels(logits[:, :CLASSES], masks),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_scikit_learns_of_the_whole_set(name: str) -> None:
    task, outputs, targets, expected = CASES[name]
    sums = Sums(task, CPU)
    for given, wanted in zip(outputs.split(SIZES), targets.split(SIZES), strict=True):
        batch = Batch(given, wanted, len(given))
        sums.add(task.loss(given, batch), given, batch)
    found = sums.averages(sums.values).values
    assert found == pytest.approx(expected(outputs.numpy(), targets.numpy()), abs=1e-6)


def test_the_diabetes_are_scikit_learns() -> None:
    rows = dataset("dataset=diabetes task=regression").load(None)
    table = datasets.load_diabetes(scaled=False)
    assert list(rows.feature_names) == table.feature_names
    assert np.array_equal(rows.features[:], table.data)
    assert np.array_equal(rows.targets[:][:, 0], table.target)


def test_the_digits_are_scikit_learns() -> None:
    config = dataset("dataset=digits")
    order, table = np.random.default_rng(0).permutation(1797), datasets.load_digits()
    for part, chosen in (("test", np.sort(order[:360])), ("train", np.sort(order[360:]))):
        images, labels = config.load(part)
        assert np.array_equal(images[:, 0], np.round(table.images[chosen] * 255 / 16))
        assert np.array_equal(labels, table.target[chosen])
