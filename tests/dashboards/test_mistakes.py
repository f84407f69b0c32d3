"""What an evaluation got wrong, against the same counted by hand."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from expt.dashboards.pictures import Review, by_class, worst_of
from expt.data.loading import Batch
from tests.late import Late

metrics: Any = Late("sklearn.metrics")


def test_the_confusion_matrix_and_the_worst_of_several_batches() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 3), torch.randint(3, (40,))
    images = torch.arange(40.0).view(40, 1, 1, 1)
    reviews = [Review(3, keep=4), Review(3, keep=4)]
    for index, part in enumerate(torch.arange(40).split(7)):
        reviews[index % 2](Batch(images[part], labels[part], len(part)), logits[part])
    expected = torch.zeros(3, 3, dtype=torch.int64)
    for label, guess in zip(labels.tolist(), logits.argmax(1).tolist(), strict=True):
        expected[label, guess] += 1
    assert reviews[0].confusion is not None
    assert reviews[1].confusion is not None
    assert torch.equal(reviews[0].confusion + reviews[1].confusion, expected)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    wrong = [
        index
        for index in losses.argsort(descending=True).tolist()
        if logits[index].argmax() != labels[index]
    ]
    found = worst_of([part for review in reviews if (part := review.mistakes())], keep=4)
    assert found is not None
    assert found.images.flatten().tolist() == wrong[:4]
    assert torch.allclose(found.losses, losses[wrong[:4]])
    assert torch.equal(found.predicted, logits[wrong[:4]].argmax(1))
    assert torch.allclose(found.probabilities, logits[wrong[:4]].softmax(1).amax(1))


def test_what_is_kept_of_an_evaluation_does_not_grow_with_it() -> None:
    review, shape = Review(3, keep=4), (1, 5, 7)
    for _ in range(100):
        review(Batch(torch.zeros(2, *shape), torch.tensor([0, 1]), 2), torch.eye(3)[[1, 2]])
    there = (each for each in gc.get_objects() if isinstance(each, torch.Tensor))
    assert sum(len(each) for each in there if each.shape[1:] == shape) < 20
    found = review.mistakes()
    assert found is not None
    assert len(found.images) == 4


def test_a_model_without_mistakes_has_none() -> None:
    review = Review(3, keep=4)
    review(
        Batch(torch.zeros(5, 1, 2, 2), torch.arange(5) % 3, 5),
        torch.eye(3)[torch.arange(5) % 3] * 9,
    )
    found = review.mistakes()
    assert found is not None
    assert len(found.labels) == 0
    assert Review(3, keep=4).mistakes() is None


def test_numbers_of_each_class_are_scikit_learns_whatever_the_samples_are() -> None:
    """One output more than there are classes, and a class without samples."""
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 5), torch.randint(3, (40,))
    review = Review(4, keep=0)
    review(Batch({"text": ["a"] * 40}, labels, 40), logits)
    seen = review.gathered()
    assert seen is not None
    found = by_class(seen[0], ["a", "b", "c", "d"])
    assert list(found) == ["a", "b", "c", "d", "4"]
    expected = metrics.precision_recall_fscore_support(
        labels, logits.argmax(1), labels=range(5), zero_division=float("nan")
    )
    for one, precision, recall, f1, samples in zip(found.values(), *expected, strict=True):
        assert one["samples"] == sum(one["predicted"].values()) == samples
        assert one["precision"] == pytest.approx(precision)
        if samples:
            assert (one["recall"], one["f1"]) == pytest.approx((recall, f1))
    assert found["d"]["recall"] is None
