"""Images of a Hugging Face dataset with numbers, labels or masks in place of classes."""

import csv
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from expt.data import build
from expt.data.loading import LoaderOptions
from expt.errors import ConfigError, DataError
from expt.features import Numbers
from expt.late import Late
from expt.worker.build import build_data, build_learner
from tests.conftest import Configured
from tests.data.test_huggingface import of, pixels
from tests.facade import as_typed
from tests.worker.conftest import ALONE

pytestmark = [  # the library leaves a folder's metadata.csv open
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
hf: Any = Late("datasets")


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()  # here, where that is known, and not in whatever test comes next


@pytest.fixture
def people(tmp_path: Path) -> list[dict[str, str]]:
    """A folder of pictures and a CSV of what is known of each, as the library reads an
    imagefolder."""
    known = list[dict[str, str]]()
    for part, number in (("train", 12), ("test", 4)):
        (tmp_path / "set" / part).mkdir(parents=True)
        rows = [{"file_name": f"{i}.png", "age": f"{20.5 + 3 * i}", "old": f"{int(i > 5)}",
            "tall": f"{i % 2}"}
                for i in range(number)]  # fmt: skip
        for index in range(number):
            Image.fromarray(pixels(index)).save(tmp_path / "set" / part / f"{index}.png")
        with (tmp_path / "set" / part / "metadata.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        known = known or rows
    return known


AGES = ("task=regression", "dataset.target=age", "dataset.val_fraction=0.25")


def test_a_folder_of_pictures_with_a_csv_of_numbers(people: Any, chosen: Configured) -> None:
    config = chosen(*AGES, "dataset.mean=[0.5,0.5,0.5]", "dataset.augment.flip=true")
    data = build_data(config, ALONE)
    assert data.info.features.shapes == {"channels": 3, "image_size": (6, 5), "num_classes": 1}
    assert (data.info.train_size, data.info.val_size, data.info.test_size) == (9, 3, 4)
    assert data.info.features.targets == Numbers(names=("age",), shape=(1,))
    images, ages = of(data, "test")
    assert ages.tolist() == [[20.5 + 3 * index] for index in range(4)]
    expected = (
        torch.stack([torch.from_numpy(pixels(index)).permute(2, 0, 1) / 255 for index in range(4)])
        - 0.5
    )
    torch.testing.assert_close(images, expected)
    assert build_learner(config, data, ALONE).module(data.blank(2).inputs).shape == (2, 1)


def test_numbers_are_standardised_by_those_that_are_trained_on(
    people: Any, chosen: Configured
) -> None:
    config = chosen(*AGES, "dataset.standardise_targets=true")
    data = build_data(config, ALONE)
    ages = of(data, "train")[1].double()
    assert float(ages.mean()) == pytest.approx(0, abs=1e-6)
    assert float(ages.std(correction=0)) == pytest.approx(1)
    mean, std = data.info.features.targets.scales["age"]
    assert of(data, "test")[1][2].item() == pytest.approx((26.5 - mean) / std)
    options = LoaderOptions(batch_size=4, device=ALONE.device)
    again = build.load(config.dataset, config.task, "test", data.info.features, options, own=True)
    torch.testing.assert_close(
        torch.cat([batch.targets for batch in again.evaluation()]), of(data, "test")[1]
    )
    other = chosen("task=regression", "dataset.target=old").dataset  # a single one of another name
    again = build.load(other, config.task, "test", data.info.features, options, own=False)
    (batch,) = again.evaluation()
    torch.testing.assert_close(batch.targets, torch.full((4, 1), -mean / std))


def test_transforms_and_labels(people: Any, chosen: Configured) -> None:
    crop = "dataset.transforms=[{_target_: torchvision.transforms.v2.RandomCrop, size: [4, 4]}]"
    words = (
        *as_typed("task=multilabel dataset.target=[old,tall] dataset.image_size=[4,4]"),
        "dataset.channels=1",
        crop,
    )
    data = build_data(chosen(*words), ALONE)
    batch = next(data.train.epoch(1))
    assert (batch.inputs.shape, batch.targets.shape) == ((4, 1, 4, 4), (4, 2))
    assert of(data, "test")[1].tolist() == [[0, 0], [0, 1], [0, 0], [0, 1]]
    with pytest.raises(DataError, match=r"set: column age, row 1 of train: 20.5 is not a label"):
        build_data(chosen("task=multilabel", "dataset.target=age"), ALONE)
    for more, told in (
        (["dataset.target=image", "dataset.input=[old]"], "dataset.target=image: holds "),
        (["dataset.input=[image]"], "dataset.input=image: holds "),
        (["dataset.target=[age,age]"], "dataset.target=age: is named twice; name it once"),
        (["dataset.input=[old,age]"], "dataset.input and dataset.target=age: is named twice"),
    ):
        with pytest.raises((ConfigError, DataError), match=re.escape(told)):
            build_data(chosen(*AGES, *more), ALONE)


@pytest.mark.parametrize(("channels", "expected"), [("null", 1), (3, 3)])
def test_pictures_with_masks_are_read_as_the_first_is(
    chosen: Configured, tmp_path: Path, channels: object, expected: int
) -> None:
    grey = [Image.fromarray(pixels(index, 1)) for index in range(8)]
    masks = [Image.fromarray(pixels(index, 1) % 3) for index in range(8)]
    features = hf.Features({"image": hf.Image(), "mask": hf.Image()})
    hf.Dataset.from_dict({"image": grey, "mask": masks}, features=features).save_to_disk(
        tmp_path / "set"
    )
    words = as_typed("task=segmentation task.num_classes=3 model=unet model.widths=[2,2]")
    config = chosen(*words, "dataset.target=mask", f"dataset.channels={channels}")
    assert build_data(config, ALONE).info.features.shapes["channels"] == expected


def test_masks_of_a_column(chosen: Configured, tmp_path: Path) -> None:
    masks = [Image.fromarray(pixels(index, 1) % 3) for index in range(8)]
    images = [Image.fromarray(pixels(index)) for index in range(8)]
    features = hf.Features({"image": hf.Image(), "mask": hf.Image(), "kind": hf.Value("int64")})
    found = hf.Dataset.from_dict(
        {"image": images, "mask": masks, "kind": [0] * 8}, features=features
    )
    found.save_to_disk(tmp_path / "set")
    words = (
        *as_typed("task=segmentation model=unet model.widths=[2,2] dataset.target=mask"),
        "dataset.val_fraction=0.5",
    )
    data = build_data(chosen(*words, "task.num_classes=3"), ALONE)
    assert data.info.features.shapes == {"channels": 3, "image_size": (6, 5), "num_classes": 3}
    (batch,) = data.train.epoch(1)
    assert batch.inputs.shape == (4, 3, 6, 5)
    assert batch.targets.shape == (4, 6, 5)
    assert batch.targets.dtype == torch.int64
    images_read, masks_read = of(data, "train")
    places = {pixels(index).tobytes(): index for index in range(8)}
    for image, mask in zip(images_read, masks_read, strict=True):
        index = places[(image * 255).round().byte().permute(1, 2, 0).numpy().tobytes()]
        assert torch.equal(mask, torch.from_numpy(pixels(index, 1) % 3).long())
    with pytest.raises(DataError, match=r"dataset.target=kind: holds int64, and is to hold images"):
        build_data(chosen(*words, "task.num_classes=3", "dataset.target=kind"), ALONE)
    with pytest.raises(DataError, match=r"sample \d+: its mask holds the class 2, expected 0 to 1"):
        of(build_data(chosen(*words, "task.num_classes=2"), ALONE), "train")
    with pytest.raises(
        ConfigError, match=re.escape("task.num_classes: dataset=huggingface has none; use")
    ):
        chosen(*words)
