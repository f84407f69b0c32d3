"""torchvision's datasets of masks by name, and those that no task takes: files in their own
layouts, made here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from expt.config.schema import RunConfig
from expt.data.fingerprint import content_of
from expt.data.torchvision_masks import CITYSCAPES
from expt.errors import ConfigError, DataError
from expt.training.collectives import Worker
from expt.worker.build import build_data
from tests.conftest import Configured
from tests.data.test_torchvision_sets import chosen as chosen
from tests.data.test_torchvision_sets import picture

ALONE = Worker(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))
SEGMENT = ("task=segmentation", "model=unet", "model.widths=[2,2]")


def numbers(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(path)


def voc(root: Path) -> None:
    base = root / "VOCdevkit" / "VOC2012"
    lists = base / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    for part, names in (("train", range(6)), ("val", range(6, 9))):
        for number in names:
            picture(base / "JPEGImages" / f"{number}.jpg", number, (8, 6 + number % 2))
            stripes = np.tile(np.array([0, 20, 255, 3, 3, 3, 3])[: 6 + number % 2], (8, 1))
            numbers(base / "SegmentationClass" / f"{number}.png", stripes)
        (lists / f"{part}.txt").write_text("".join(f"{number}\n" for number in names))


def cityscapes(root: Path) -> None:
    for part, count in (("train", 3), ("val", 2)):
        for number in range(count):
            name = f"ulm_{number:06}_000019"
            picture(root / "leftImg8bit" / part / "ulm" / f"{name}_leftImg8bit.png", number, (4, 6))
            labels = np.tile(
                np.array([0, 7, 8, 26, 33, 1]), (4, 1)
            )  # none, road, sidewalk, car, bicycle, none
            numbers(root / "gtFine" / part / "ulm" / f"{name}_gtFine_labelIds.png", labels)


def pets(root: Path) -> None:
    base = root / "oxford-iiit-pet"
    lines = {"trainval": range(4), "test": range(4, 6)}
    for split, names in lines.items():
        rows = []
        for number in names:
            picture(base / "images" / f"Cat_{number}.jpg", number, (4, 6))
            numbers(
                base / "annotations" / "trimaps" / f"Cat_{number}.png",
                np.tile([1, 1, 2, 2, 3, 3], (4, 1)),
            )
            rows.append(f"Cat_{number} {1 + number % 37} 1 1\n")
        (base / "annotations" / f"{split}.txt").write_text("".join(rows))


@pytest.mark.parametrize(
    ("make", "name", "size", "sizes", "classes", "column"),
    [
        (voc, "VOCSegmentation", (8, 7), (6, 3, 0), 21, None),
        (cityscapes, "Cityscapes", None, (3, 2, 0), 19, [255, 0, 1, 13, 18, 255]),
        (pets, "OxfordIIITPet", None, (4, 0, 2), 3, [0, 0, 1, 1, 2, 2]),
    ],
)
def test_masks_hold_the_classes_of_their_benchmark(
    make: Callable[[Path], None],
    name: str,
    size: tuple[int, int] | None,
    sizes: tuple[int, int, int],
    classes: int,
    column: list[int] | None,
    chosen: Callable[..., RunConfig],
    tmp_path: Path,
) -> None:
    make(tmp_path / "data")
    words = (*SEGMENT, *([f"dataset.image_size=[{size[0]},{size[1]}]"] if size else []))
    rest = () if sizes[1] else ("dataset.val_fraction=0", "eval_split=test")
    data = build_data(chosen(name, *words, *rest, "drop_last=false"), ALONE)
    info = data.info
    assert (info.train_size, info.val_size, info.test_size, info.num_classes) == (*sizes, classes)
    loader = data.val or data.test
    assert loader is not None
    (batch,) = loader.evaluation()
    expected = size or (4, 6)
    assert batch.inputs.shape == (batch.size, 3, *expected)
    assert batch.targets.shape == (batch.size, *expected)
    if column:
        assert batch.targets[0].tolist() == [column] * expected[0]
    else:
        assert batch.targets.unique().tolist() == [0, 3, 20, 255]


def test_the_classes_of_cityscapes_are_those_of_its_benchmark() -> None:
    from torchvision.datasets import Cityscapes

    counted = {
        each.train_id: each.id
        for each in Cityscapes.classes
        if not each.ignore_in_eval and each.id >= 0
    }
    assert tuple(counted[number] for number in range(19)) == CITYSCAPES


def test_what_they_need_is_told(chosen: Callable[..., RunConfig], tmp_path: Path) -> None:
    voc(tmp_path / "data")
    before = content_of(chosen("VOCSegmentation", *SEGMENT)).data
    numbers(tmp_path / "data/VOCdevkit/VOC2012/SegmentationClass/1.png", np.full((8, 7), 30))
    assert content_of(chosen("VOCSegmentation", *SEGMENT)).data not in (None, before)
    data = build_data(chosen("VOCSegmentation", *SEGMENT, "batch_size=2"), ALONE)
    with pytest.raises(
        DataError,
        match=r"image_size=null: image 1 is 8x7, and the first 8x6|sample 1: its mask holds",
    ):
        list(data.train.evaluation())
    sized = build_data(
        chosen("VOCSegmentation", *SEGMENT, "dataset.image_size=[8,8]", "batch_size=2"), ALONE
    )
    with pytest.raises(
        DataError, match="sample 1: its mask holds the class 30, expected 0 to 20, or 255"
    ):
        list(sized.train.evaluation())
    with pytest.raises(
        DataError, match=r"gtFine, leftImg8bit not found in .*, and its owners give it to those who"
    ):
        content_of(chosen("Cityscapes", *SEGMENT))


@pytest.mark.parametrize(
    ("name", "words", "told"),
    [
        (
            "VOCSegmentation",
            (),
            (
                "task=classification: torchvision's VOCSegmentation has a mask for each image; use"
                " task"
            ),
        ),
        (
            "SVHN",
            SEGMENT,
            (
                "task=segmentation: torchvision's SVHN has no masks; use dataset.set=Cityscapes or"
                " OxfordI"
            ),
        ),
        (
            "VOCSegmentation",
            (*SEGMENT, "dataset.augment.flip=true"),
            "dataset.augment: would move images and leave th",
        ),
        (
            "VOCSegmentation",
            (*SEGMENT, "dataset.transforms=[{_target_: a.B}]"),
            "dataset.transforms: would move images",
        ),
        (
            "OxfordIIITPet",
            (*SEGMENT, "task.num_classes=37"),
            "task.num_classes=37: torchvision's num_classes=3; leave it",
        ),
        (
            "CocoDetection",
            (),
            (
                "dataset.set=CocoDetection: has boxes, of which no task here makes a loss; give it"
                " as a da"
            ),
        ),
        ("UCF101", (), "dataset.set=UCF101: has videos, of which"),
        ("ImageNet", (), "dataset.set=ImageNet: use dataset=image_folder"),
    ],
)
def test_what_does_not_go_together_is_refused(
    name: str,
    words: tuple[str, ...],
    told: str,
    chosen: Callable[..., RunConfig],
    configured: Configured,
) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(name, *words)
    assert told in str(caught.value)
    assert len(caught.value.problems) == 1
