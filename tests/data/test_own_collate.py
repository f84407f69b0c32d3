"""A method `collate` of a person's own Dataset whose samples have classes: it makes the batches,
whatever they hold."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

from expt.data import custom
from expt.data.augment import Mixing
from expt.data.kinds.custom import Custom
from expt.data.loading import Batch, LoaderOptions
from expt.data.source import Source
from expt.errors import DataError
from expt.tasks.classification import Config as Classification
from expt.training.strategy import can_be_cut, micro_batches
from tests.worker.conftest import TrainAlone, train_alone

__all__ = ["train_alone"]

CPU = torch.device("cpu")
PIXELS = torch.arange(8 * 2 * 3 * 3.0).view(8, 2, 3, 3) / 144


class Pictures(Dataset[Any]):
    """Images of two channels and of unequal heights, which `collate` pads."""

    def __init__(self, train: bool, kind: str) -> None:
        self.kind, self.pixels = kind, PIXELS.clone()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        image = self.pixels[index]
        if self.kind == "bytes":
            image = (image * 144).byte()
        return (image[:, : 2 + index % 2] if self.kind == "heights" else image), index % 2

    def collate(self, samples: list[Any]) -> Any:
        if self.kind == "raises":
            raise RuntimeError("collate was called")
        labels = torch.tensor([label for _, label in samples])
        if self.kind == "view":
            return samples[0][0][None], labels
        images = [functional.pad(image, (0, 0, 0, 3 - image.shape[1])) for image, _ in samples]
        targets: dict[str, Any] = {
            "fractions": labels + 0.7,
            "shares": torch.eye(2)[labels],
            "percent": 100 * torch.eye(2)[labels],
            "negative": 3 * torch.eye(2)[labels] - 1,
            "nan": torch.eye(2)[labels] * float("nan"),
            "no targets": None,
        }
        if self.kind == "nothing":
            return None
        if self.kind == "draws":
            return torch.rand(len(images), 2, 3, 3, requires_grad=True), labels
        return torch.stack(images), targets.get(self.kind, labels)


class Stream(IterableDataset[Any]):
    def __init__(self, train: bool, kind: str) -> None:
        self.pictures = Pictures(train, kind)
        self.collate = self.pictures.collate

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return map(self.pictures.__getitem__, range(8))


def opened(kind: str, name: str = "Pictures", readers: int = 0) -> Source:
    config = Custom(target=f"{__name__}.{name}", kwargs={"kind": kind}, num_classes=2)
    return custom.source(config, readers, Classification())


def batches(kind: str, name: str = "Pictures", **options: Any) -> list[Batch]:
    source = opened(kind, name)
    assert source.features.inputs.is_image
    shapes = source.features.shapes
    assert (shapes["channels"], shapes["num_classes"]) == (2, 2)
    options = {"batch_size": 4, "device": CPU, **options}
    return [*source.train.load(torch.arange(8), LoaderOptions(**options)).epoch(1)]


@pytest.mark.parametrize("name", ["Pictures", "Stream"])
@pytest.mark.parametrize("kind", ["heights", "bytes"])
def test_images_of_classes_are_collated_and_then_normalised(kind: str, name: str) -> None:
    found = batches(kind, name, mean=[0.5, 0.25], std=[0.1, 0.2])
    expected = PIXELS.clone() if kind == "heights" else (PIXELS * 144).byte() / 255
    if kind == "heights":
        expected[::2, :, 2] = 0
    mean, std = torch.tensor([[0.5, 0.25], [0.1, 0.2]]).view(2, 2, 1, 1)
    expected = (expected - mean) / std
    torch.testing.assert_close(torch.cat([batch.inputs for batch in found]), expected)
    assert torch.cat([batch.targets for batch in found]).tolist() == [0, 1] * 4


@pytest.mark.parametrize("name", ["Pictures", "Stream"])
def test_what_collate_draws_is_the_same_from_any_number_of_processes(name: str) -> None:
    options, drawn = LoaderOptions(batch_size=2, device=CPU), []
    for readers in (0, 2):
        loader = opened("draws", name, readers).train.load(torch.arange(8), options)
        drawn.append(torch.cat([batch.inputs for batch in loader.epoch(1)]))
    assert all(torch.equal(drawn[0], each) and not each.requires_grad for each in drawn)
    assert len(drawn[0].unique()) == drawn[0].numel()


def test_what_collate_passes_on_of_the_dataset_is_not_overwritten() -> None:
    options = LoaderOptions(batch_size=1, device=CPU, mean=[0.5, 0.5], std=[0.1, 0.1])
    loader = opened("view").train.load(torch.arange(8), options)
    first, second = (torch.cat([batch.inputs for batch in loader.epoch(epoch)]) for epoch in (1, 2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            "raises",
            (
                "samples cannot be made a batch: RuntimeError: collate was called; fix the"
                " dataset's method collate"
            ),
        ),
        ("nothing", "a batch (NoneType) must"),
        ("fractions", "collate makes targets of float32 [4]; let them be class numbers"),
        ("no targets", "collate makes targets of a NoneType; let them be class numbers"),
    ],
)
@pytest.mark.parametrize("name", ["Pictures", "Stream"])
def test_what_collate_may_not_make_of_samples_with_classes(kind: str, told: str, name: str) -> None:
    with pytest.raises(DataError) as caught:
        batches(kind, name)
    assert str(caught.value).startswith(told.partition(";")[0])
    assert told.partition("; ")[2] in str(caught.value)


class Rows(Pictures):
    def collate(self, samples: list[Any]) -> Any:
        images, targets = super().collate(samples)
        return images.flatten(1), targets


def test_shares_of_classes_are_taken_but_for_pictures() -> None:
    load, options = opened("shares", "Rows").train.load, LoaderOptions(batch_size=8, device=CPU)
    (batch,) = load(torch.arange(8), options).epoch(1)
    assert batch.targets.tolist() == [[1, 0], [0, 1]] * 4
    mixed = load(torch.arange(8), dataclasses.replace(options, mixing=Mixing(2, mixup=1.0)))
    targets = next(mixed.epoch(1)).targets
    assert torch.allclose(targets.sum(1), torch.ones(len(targets)))
    assert set(targets.flatten().tolist()) != {0.0, 1.0}
    with pytest.raises(DataError, match=r"float32 \[\d, 2\]; let them be class numbers"):
        batches("shares")


@pytest.mark.parametrize("kind", ["percent", "negative", "nan"])
def test_shares_that_are_none_are_refused(kind: str) -> None:
    load, options = opened(kind, "Rows").train.load, LoaderOptions(batch_size=8, device=CPU)
    with pytest.raises(DataError, match="shares of classes that are negative, or do not add up"):
        next(load(torch.arange(8), options).epoch(1))


@pytest.mark.parametrize("samples", [2, 4])
def test_a_run_trains_and_is_evaluated_by_shares_of_classes(
    samples: int, train_alone: TrainAlone
) -> None:
    """Also where a batch has as many samples as there are classes, and by double outputs."""
    done = train_alone(
        *("~dataset", "~model", f"+dataset._target_={__name__}.Rows", "+dataset.kind=shares"),
        *("+dataset.num_classes=2", f"+model._target_={__name__}.Double"),
        *("epochs=1", f"batch_size={samples}", "eval_split=test"),
    )
    data, model = Rows(train=False, kind="shares"), done.run.learner.module.eval()
    inputs, shares = data.collate([data[index] for index in range(8)])
    outputs = model(inputs)
    loss = functional.cross_entropy(outputs, shares.double()).item()
    assert done.result["metrics"]["loss/test"] == pytest.approx(loss, rel=1e-5)
    right = (outputs.argmax(1) == shares.argmax(1)).float().mean().item()
    assert done.result["metrics"]["accuracy/test"] == pytest.approx(right)


class Double(nn.Linear):
    """Has outputs in double of rows of 18 numbers."""

    def __init__(self) -> None:
        super().__init__(18, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


class Structures(Dataset[Any]):
    """Samples whose batches are lists, of a length that follows the samples or not."""

    def __init__(self, train: bool, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.full((2, index + 2), index), index

    def collate(self, samples: list[Any]) -> Any:
        images, labels = zip(*samples, strict=True)
        targets = torch.tensor(labels)
        boxes = [{"boxes": image, "name": str(image)} for image in images]
        cut = torch.stack([image[:, :2] for image in images])
        found: dict[str, Any] = {
            "lists": (list(images), boxes),
            "nested": ({"images": images, "sizes": targets}, boxes),
            "views": ([cut, cut + 1], targets),
            "nodes": (torch.cat(images, 1).T, None, len(samples)),
            "only": list(images),
            "short": (torch.cat(images, 1).T, None, len(samples) - 1),
        }
        return found[self.kind]


def of_structure(kind: str, batch_size: int) -> list[Batch]:
    config = Custom(target=f"{__name__}.Structures", kwargs={"kind": kind})
    source = custom.source(config, 0, None)
    options = LoaderOptions(batch_size=batch_size, device=CPU)
    return [*source.train.load(torch.arange(6), options).epoch(1)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["lists", "nested", "only"])
def test_a_list_of_an_item_for_each_sample_is_cut_like_a_tensor(kind: str, batch_size: int) -> None:
    batch = of_structure(kind, batch_size)[0]
    assert batch.size == batch_size
    parts = micro_batches(batch, batch_size)
    assert [part.size for part in parts] == [1] * batch_size
    for index, part in enumerate(parts):
        images = part.inputs["images"] if kind == "nested" else part.inputs
        assert [*images[0].shape] == [2, index + 2]
        if kind != "only":
            assert len(part.targets) == 1
            assert part.targets[0]["boxes"].shape == images[0].shape


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_list_of_views_is_not_one_of_samples(batch_size: int) -> None:
    batch = of_structure("views", batch_size)[0]
    last = micro_batches(batch, batch_size)[-1]
    assert [view.shape[0] for view in last.inputs] == [1, 1]
    assert torch.equal(last.inputs[0] + 1, last.inputs[1])


def test_a_batch_of_another_order_says_its_size() -> None:
    (batch,) = of_structure("nodes", 6)
    assert (batch.size, len(batch.inputs)) == (6, sum(range(2, 8)))
    assert not can_be_cut(batch)
    with pytest.raises(DataError, match="size 0 for 1 samples"):
        of_structure("short", 6)


def test_a_nested_tensor_is_not_cut() -> None:
    rows = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    batch = Batch(rows, torch.zeros(2), 2)
    assert (batch.size, can_be_cut(batch)) == (2, False)


class Lengths(Dataset[Any]):
    def __init__(self, train: bool) -> None:
        self.lengths = torch.tensor([3, 4])

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return {"rows": torch.ones(4), "length": self.lengths[index]}, 1.0


def test_a_blank_sample_is_a_real_one() -> None:
    """Zeros may be no lengths of sequences, as torch packs them."""
    source = custom.source(Custom(target=f"{__name__}.Lengths", kwargs={}), 0, None)
    assert source.example[0]["length"] == 3
