"""Transforms of training images: by the seed, the epoch and the sample alone, and never of an
evaluation."""

import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from expt.config.schema import RunConfig
from expt.data import indexing
from expt.data.build import Data
from expt.errors import ConfigError, DataError
from expt.inference.tables import inputs_of
from expt.late import Late
from expt.worker.build import build_data
from tests.conftest import Configured
from tests.facade import Capture, as_typed
from tests.ranks import worker_of

v2: Any = Late("torchvision.transforms.v2")

CPU = torch.device("cpu")
FOLDER, SHAPE = 40, (10, 12)
CROP = "{_target_: torchvision.transforms.v2.RandomResizedCrop, size: [10, 12], scale: [0.2, 1.0]}"
LIST = (
    f"dataset.transforms=[{CROP}, {{_target_: torchvision.transforms.v2.RandAugment, num_ops: 1}}]"
)
PLAIN = (
    *as_typed("batch_size=8 drop_last=false seed=3 threads=1 dataset.mean=null"),
    *as_typed("dataset.std=null"),
)


class Wrong:
    """Transforms that do not do."""

    def __init__(self, factor: float = 1.0) -> None:
        self._factor = factor

    def __call__(self, image: Tensor) -> Any:
        return image.float() * self._factor if self._factor else "nothing"


class OwnNoise:
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, image: Tensor) -> Tensor:
        noisy: Tensor = image * self.generator.random()
        return noisy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of two classes and two sizes."""
    root = tmp_path_factory.mktemp("photos")
    drawn = np.random.default_rng(0)
    for part, number in (("train", FOLDER), ("test", 6)):
        for index in range(number):
            path = root / part / "ab"[index % 4 == 0] / f"{index:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            size = (20, 16) if index % 3 else (15, 30)
            Image.fromarray(drawn.integers(256, size=(*size, 3), dtype=np.uint8)).save(path)
    return root


@pytest.fixture
def photos(folder: Path, configured: Configured) -> Any:
    """`photos("dataset.sampling=balanced")`: that folder, configured, with images of 10x12."""

    def configure(*words: str) -> RunConfig:
        size = f"dataset.image_size=[{SHAPE[0]},{SHAPE[1]}]"
        return configured(
            "dataset=image_folder",
            f"dataset.root={folder}",
            size,
            "dataset.num_workers=0",
            *PLAIN,
            *words,
        )

    return configure


def data(config: RunConfig, rank: int = 0, world_size: int = 1) -> Data:
    return build_data(config, worker_of(rank, world_size))


def epoch(made: Data, number: int = 1, skip: int = 0) -> Tensor:
    return torch.cat(
        [batch.inputs for batch in made.train.epoch(number, skip) if not batch.weightless]
    )


def test_each_image_is_transformed_as_by_hand_from_the_original(photos: Any, folder: Path) -> None:
    found = epoch(data(photos(LIST)), 2)
    train, _ = indexing.split(FOLDER, 0.1, None)
    order = train[indexing.permutation(len(train), 3, 2)].tolist()
    files = sorted((folder / "train").glob("*/*.png"))
    by_hand: Any = v2.Compose(
        [v2.RandomResizedCrop([10, 12], scale=(0.2, 1.0)), v2.RandAugment(num_ops=1)]
    )
    for image, index in zip(found, order, strict=True):
        original = torch.from_numpy(np.array(Image.open(files[index]))).permute(2, 0, 1)
        torch.manual_seed(indexing.mix(3, 2, index))
        torch.testing.assert_close(image, by_hand(original).float() / 255)


def test_evaluations_and_predictions_have_transforms_of_their_own(
    photos: Any, folder: Path
) -> None:
    chosen = (
        "dataset.eval_transforms=[{_target_: torchvision.transforms.v2.Resize, size: 14},"
        " {_target_: torchvision.transforms.v2.CenterCrop, size: [10, 12]}]"
    )
    config = photos(chosen)
    made, plain = data(config), data(photos())
    assert made.test is not None
    found = torch.cat([batch.inputs for batch in made.test.evaluation()])
    by_hand: Any = v2.Compose([v2.Resize(14), v2.CenterCrop([10, 12])])
    files = sorted((folder / "test").glob("*/*.png"))
    preprocess = inputs_of(config.dataset, made.info.features, CPU)
    for image, file in zip(found, files, strict=True):
        expected = torch.from_numpy(np.array(by_hand(Image.open(file)))).permute(2, 0, 1)
        torch.testing.assert_close(image, expected.float() / 255)
        torch.testing.assert_close(preprocess(str(file))[0], image)
    assert torch.equal(epoch(made), epoch(plain)), "training has others"
    with pytest.raises(DataError, match=r"^dataset\.eval_transforms: make of sample 0 an image"):
        list(data(photos(chosen.replace("12", "11"))).test.evaluation())  # type: ignore[union-attr]


@pytest.mark.parametrize("source", ["photos", pytest.param("digits", marks=pytest.mark.slow)])
def test_workers_together_see_what_one_sees_and_so_does_who_goes_on(
    source: str, photos: Any, configured: Configured
) -> None:
    """With mixup and with classes taken equally often, too; the test's images stay as they are."""
    small = LIST.replace("10, 12", "8, 8")
    few = ("dataset.train_limit=45", *PLAIN)
    for more in ((), ("dataset.sampling=balanced", "cutmix=1.0", "dataset.augment.flip=true")):
        if source == "photos":
            config, plain = photos(LIST, *more), photos()
        else:
            config, plain = configured(small, *few, *more), configured(*few)
        alone, untransformed = data(config), data(plain)
        whole = epoch(alone)
        assert not torch.equal(whole, epoch(untransformed))
        assert not torch.equal(whole, epoch(alone, 2))
        assert torch.equal(epoch(alone, 1, skip=3), whole[24:])
        batches = [[*data(config, rank, 4).train.epoch(1)] for rank in range(4)]
        together = [
            part.inputs
            for parts in zip(*batches, strict=True)
            for part in parts
            if not part.weightless
        ]
        assert torch.equal(torch.cat(together), whole)
        for one, other in ((alone.val, untransformed.val), (alone.test, untransformed.test)):
            assert one is not None
            assert other is not None
            for batch, untouched in zip(one.evaluation(), other.evaluation(), strict=True):
                assert torch.equal(batch.inputs, untouched.inputs)


def test_a_sample_that_comes_again_is_transformed_anew(photos: Any) -> None:
    made = data(photos(f"dataset.transforms=[{CROP}]", "dataset.sampling=balanced"))
    taken = torch.cat([made.train.indices(1, number) for number in range(len(made.train))])
    images = epoch(made)
    again = next(index for index in taken.tolist() if (taken == index).sum() > 1)
    one, other = images[taken == again][:2]
    assert not torch.equal(one, other)
    assert made.info.class_counts == (27, 9)


def test_a_list_that_cannot_be_built_is_refused(configured: Configured) -> None:
    wrong = "{_target_: torchvision.transforms.v2.RandomCrop, size: [1, 2, 3]}"
    with pytest.raises(ConfigError, match=r"RandomCrop\(size=\[1, 2, 3\]\): ValueError: "):
        data(configured(f"dataset.transforms=[{wrong}]"))


@pytest.mark.parametrize(
    ("transforms", "said"),
    [
        ("{_target_: torchvision.transforms.v2.RandomCrop, size: 6}", "an image (1, 6, 6)"),
        (
            "{_target_: torchvision.transforms.v2.RandomCrop, size: 9}",
            "dataset.transforms.0: RandomCrop does not take sa",
        ),
        (f"{{_target_: {__name__}.Wrong}}", "pixels from 0 to 255, expected [0, 1]"),
        (f"{{_target_: {__name__}.Wrong, factor: 0}}", "no image: expected an image of uint8"),
    ],
)
def test_what_a_transform_makes_of_an_image_is_checked(
    transforms: str, said: str, configured: Configured
) -> None:
    with pytest.raises(DataError) as refused:
        epoch(data(configured(f"dataset.transforms=[{transforms}]", "threads=1")))
    traceback.clear_frames(
        refused.tb
    )  # else its reader is in a cycle, with which processes end 5 s late
    assert said in str(refused.value)


def test_a_generator_of_a_transforms_own_is_reported(
    configured: Configured, capfd: Capture
) -> None:
    data(configured(f"dataset.transforms=[{{_target_: {__name__}.OwnNoise}}]"))
    assert "dataset.transforms.0.generator" in capfd.readouterr().err
