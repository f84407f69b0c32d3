"""What an evaluation got wrong, against the same counted by hand."""

from __future__ import annotations

import torch

from expt.data.loading import Batch
from expt.tensorboard.mistakes import Review, worst_of
from expt.tensorboard.norms import layers, norms, parameter_table


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
    wrong = [index for index in losses.argsort(descending=True).tolist() if logits[index].argmax() != labels[index]]
    found = worst_of([part for review in reviews if (part := review.mistakes())], keep=4)
    assert found is not None
    assert found.images.flatten().tolist() == wrong[:4]
    assert torch.allclose(found.losses, losses[wrong[:4]])
    assert torch.equal(found.predicted, logits[wrong[:4]].argmax(1))
    assert torch.allclose(found.probabilities, logits[wrong[:4]].softmax(1).amax(1))


def test_a_model_without_mistakes_has_none() -> None:
    review = Review(3, keep=4)
    review(Batch(torch.zeros(5, 1, 2, 2), torch.arange(5) % 3, 5), torch.eye(3)[torch.arange(5) % 3] * 9)
    found = review.mistakes()
    assert found is not None
    assert len(found.labels) == 0
    assert Review(3, keep=4).mistakes() is None


def test_norms_of_layers() -> None:
    frozen = torch.nn.Linear(4, 2, bias=False).requires_grad_(False)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), frozen)
    found = layers(model)
    assert {layer: [name for name, _ in own] for layer, own in found.items()} == {"0": ["0.weight", "0.bias"]}
    both = [[p.detach() for p in model[0].parameters()], [frozen.weight]]
    expected = [torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in group])) for group in both]
    assert torch.allclose(norms(both), torch.stack(expected))
    table = parameter_table(model)
    assert "| 0.weight | Linear | 4 x 3 | float32 | 12 |" in table
    assert "| 2.weight | Linear | 2 x 4 | float32 | 8 (not trained) |" in table
    assert "| **16 trained** | | | | **24** |" in table
