"""What is drawn for the IMAGES tab, read back as pixels."""

import gc
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

import expt
from expt.dashboards.events import pictures_of_evaluations
from expt.dashboards.pictures import (
    WIDTH,
    Review,
    by_class,
    caption,
    confusion_matrix,
    image_grid,
    worst_of,
)
from expt.dashboards.tensorboard import layers, norm
from expt.data.loading import Batch
from expt.late import Late
from tests.conftest import Trained

NAMES = (
    "T-shirt/top",
    "Trouser",
    "a name that is far too long for its place in a picture of any size at all",
)


def pixels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture.convert("RGB"))


def test_a_grid_holds_every_image_unblurred() -> None:
    images = np.zeros((10, 8, 8, 1), np.uint8)
    images[:, :4] = np.arange(10, dtype=np.uint8)[:, None, None, None] * 20 + 40
    drawn = pixels(image_grid(images, ["a"] * 10))
    assert drawn.shape[1] == WIDTH
    tile = 80  # the largest multiple of 8 of which four fit a card
    for index in range(10):
        left, top = index % 4 * 87 + 2, index // 4 * (tile + 13 + 8)
        own = drawn[top : top + tile, left : left + tile]
        assert (own[: tile // 2] == 40 + 20 * index).all()
        assert (own[tile // 2 :] == 0).all()


def test_colours_stay_and_large_images_shrink() -> None:
    images = np.zeros((1, 300, 200, 3), np.uint8)
    images[..., 1] = 200
    drawn = pixels(image_grid(images, ["a\nb"]))
    assert drawn.shape == (84 + 2 * 13 + 8, WIDTH, 3)
    assert tuple(drawn[40, 40]) == (0, 200, 0)
    assert tuple(drawn[40, 5]) == (255, 255, 255), "still higher than wide"


def test_a_cell_is_the_darker_the_more_of_its_true_class_it_holds() -> None:
    counts = np.array([[100, 0, 0], [25, 75, 0], [0, 0, 0]])
    picture = confusion_matrix(counts, NAMES)
    drawn = pixels(picture).astype(int).sum(2)
    margin = picture.height - 2 - 13 - 3 * 44
    corners = [
        [drawn[margin + 44 * row + 3, margin + 44 * column + 3] for column in range(3)]
        for row in range(3)
    ]
    assert corners[0][0] < corners[1][1] < corners[1][0] < corners[0][1] == 3 * 255
    assert corners[2] == [3 * 255] * 3, "a class without samples"
    assert (drawn[: margin - 1, : margin - 1] == 3 * 255).all()
    assert (drawn[margin:-16, :margin] < 400).any(), "the names are written"


@pytest.mark.parametrize("classes", [2, 10, 21, 100, 101, 400])
def test_any_number_of_classes_fits(classes: int) -> None:
    picture = confusion_matrix(
        np.eye(classes, dtype=np.int64), [f"class {number}" for number in range(classes)]
    )
    assert picture.width == WIDTH if classes <= 10 else WIDTH < picture.width <= 1300
    picture.save(file := io.BytesIO(), "PNG")
    assert len(file.getvalue()) < 200_000


def test_a_mixed_image_is_told_with_its_shares() -> None:
    names = ("cat", "dog", "bird")
    assert caption(names, torch.tensor(2)) == "bird"
    assert caption(names, torch.tensor([0.25, 0.0, 0.75])) == "bird 75%\ncat 25%"
    assert caption(names, torch.tensor([0.0, 1.0, 0.0])) == "dog 100%"


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


@pytest.mark.parametrize("are_shares", [False, True])
def test_numbers_of_each_class_are_scikit_learns_whatever_the_samples_are(
    are_shares: bool,
) -> None:
    """One output more than there are classes, and a class without samples."""
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 5), torch.randint(3, (40,))
    review, targets = Review(4, keep=0), labels
    if are_shares:
        targets = 0.1 + 0.6 * functional.one_hot(labels, 4)
    review(Batch({"text": ["a"] * 40}, targets, 40), logits)
    seen = review.gather()
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


def test_norms_of_layers() -> None:
    frozen = torch.nn.Linear(4, 2, bias=False).requires_grad_(False)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), frozen)
    model.empty = torch.nn.Parameter(torch.zeros(0, 3))
    found = layers(model)
    assert {layer: [*own] for layer, own in found.items()} == {"0": ["0.weight", "0.bias"]}
    both = [[p.detach() for p in model[0].parameters()], [frozen.weight]]
    expected = [
        torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in group]))
        for group in both
    ]
    assert torch.allclose(torch.stack([norm(group) for group in both]), torch.stack(expected))


FALLS = "scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 1, gamma: 1000}"


def counts_of(run: Path, split: Any) -> tuple[np.ndarray, list[str]]:
    found = expt.predict(run, split=split)
    names = [*found[0]["probabilities"]]
    counts = np.zeros((len(names), len(names)), np.int64)
    for record in found:
        counts[names.index(record["target"]), names.index(record["class"])] += 1
    return counts, names


@pytest.mark.slow
def test_the_end_of_a_run_is_drawn_with_the_best_weights(trained: Trained, tmp_path: Path) -> None:
    """Of a table, too; the second epoch destroys what the first has learned."""
    x = np.random.default_rng(2).normal(size=200)
    rows = "\n".join(f"{each},{'low' if each < 0 else 'high'}" for each in x)
    (tmp_path / "x.csv").write_text(f"x,kind\n{rows}\n")
    table = (f"dataset.path={tmp_path / 'x.csv'}", "dataset.targets=kind", "model.hidden=[4]")
    few = ("epochs=2", "batch_size=8", "world_size=2", "tensorboard.images=end", FALLS)
    for words in (("dataset=table", *table), ("dataset.train_limit=320",)):
        run = trained(*words, *few, name=words[0])
        assert run.result["best"]["epoch"] == 1
        found = pictures_of_evaluations(run.paths)
        for split in ("val", "test"):
            drawn = Image.open(io.BytesIO(found[f"confusion/{split}"]))
            expected = confusion_matrix(*counts_of(run.folder, split))
            assert (pixels(drawn) == pixels(expected)).all()
    expt.evaluate(run.folder, "world_size=1", flips=True, quiet=True)
    assert [*(run.folder / "evaluations" / "test-flips").glob("events*")]
    assert pictures_of_evaluations(run.paths) == found, "those of mirror images are another model's"
