"""From a configuration to loaders: each kind of dataset, and the errors of a person's own data."""

import dataclasses
import functools
import multiprocessing
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from expt import features
from expt.config.rules import refuse_missing_folders
from expt.data.build import Data
from expt.data.fingerprint import content_of
from expt.data.images import Pictures
from expt.data.kinds.custom import Custom
from expt.data.kinds.image_folder import Listing, list_parts
from expt.data.loader import Loader
from expt.data.loading import Shard
from expt.errors import ConfigError, DataError
from expt.features import Classes, Features, Labels
from tests.conftest import Configured
from tests.data.test_files import idx
from tests.facade import Capture, Patch, built, dataset


def image_files(listing: Listing) -> Pictures:
    return Pictures([*zip(listing.files, listing.labels, strict=True)], 3, (8, 10))


def write_folder(root: Path, classes: tuple[str, ...] = ("cat", "dog"), test: str = "test") -> Path:
    for split, size in (("train", 6), (test, 3)):
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(size):
                Image.new("RGB", (20 + number, 12), (100 * label, 10 * number, 7)).save(
                    folder / f"{number}.png"
                )
    return root


def folder_config(root: Path, **options: Any) -> Any:
    chosen = {"image_size": (8, 10), "num_workers": 0, "mean": None, "std": None, **options}
    chosen = {"root": str(root), "val_fraction": 0.25, **chosen}
    return dataset("dataset=image_folder dataset.root=x", **chosen)


def test_a_folder_of_images(tmp_path: Path) -> None:
    images = image_files(list_parts(write_folder(tmp_path))["test"])
    assert len(images) == 6
    image, label = images[4]
    assert (image.shape, image.dtype, label) == ((3, 8, 10), torch.uint8, 1)
    assert image.float().mean((1, 2)).tolist() == [100, 10, 7]
    data = build_data(folder_config(tmp_path))
    assert data.info.features.shapes["channels"] == 3
    assert data.info.features.shapes["image_size"] == (8, 10)
    assert data.info.features.targets.names == ("cat", "dog")
    assert (data.info.train_size, data.info.val_size, data.info.test_size) == (9, 3, 6)
    assert [batch.inputs.shape for batch in data.train.epoch(0)] == [(4, 3, 8, 10)] * 2


@pytest.mark.parametrize(
    ("batch_size", "limit", "warns"), [(64, 100, True), (64, 131, False), (50, 100, False)]
)
def test_a_last_batch_that_is_much_of_the_data_is_not_dropped_in_silence(
    batch_size: int, limit: int, warns: bool, configured: Configured, capfd: Any
) -> None:
    build_data(configured(f"dataset.train_limit={limit}").dataset, batch_size=batch_size)
    assert ("drop_last=true" in capfd.readouterr().err) == warns


@pytest.mark.parametrize("cache", [True, False])
def test_a_val_folder_validates(tmp_path: Path, cache: bool, monkeypatch: Patch) -> None:
    """Nothing is held out of train then, and nothing is a test set but test/."""
    dataset = folder_config(write_folder(tmp_path / "images", test="val"), cache=cache)
    dataset.prepare()
    data = build_data(dataset)
    assert (data.info.train_size, data.info.val_size, data.info.test_size) == (12, 6, 0)
    assert data.test is None
    assert data.val is not None
    (batch,) = data.val.evaluation()
    expected = [0, 0, 0, 100, 100, 100]
    assert [round(value) for value in (255 * batch.inputs[:, 0].mean((1, 2))).tolist()] == expected
    assert batch.targets.tolist() == [0, 0, 0, 1, 1, 1]


def test_nothing_is_trained_on_a_test_alone(tmp_path: Path, configured: Configured) -> None:
    root = write_folder(tmp_path)
    config = configured("dataset=image_folder", f"dataset.root={root}")
    both = content_of(config)
    shutil.rmtree(root / "train")
    with pytest.raises(DataError, match=f"dataset.root={root}: holds no folder train"):
        refuse_missing_folders(config)
    assert content_of(config) != both, "an evaluation knows it by what there is"


def test_a_folder_may_be_read_grey(tmp_path: Path, monkeypatch: Patch) -> None:
    root = write_folder(tmp_path / "photos")
    for cache in (True, False):
        colour, grey = (folder_config(root, channels=channels, cache=cache) for channels in (3, 1))
        for each in (colour, grey, colour):
            each.prepare()
        tests = [build_data(each).test for each in (colour, grey)]
        (in_colour,), (in_grey,) = (list(test.evaluation()) for test in tests if test)
        assert (in_colour.inputs.shape[1], in_grey.inputs.shape[1]) == (3, 1)
        luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
        torch.testing.assert_close(
            in_grey.inputs, (in_colour.inputs * luma).sum(1, keepdim=True), atol=0.01, rtol=0
        )


def test_a_malformed_folder_is_explained(tmp_path: Path) -> None:
    def raised(root: Path) -> str:
        with pytest.raises(DataError) as caught:
            list_parts(root)
        return str(caught.value)

    assert f"no folder {tmp_path}/none" in raised(tmp_path / "none")
    (tmp_path / "bare/train").mkdir(parents=True)
    (tmp_path / "bare/test").mkdir()
    assert f"no class folders in {tmp_path}/bare/train" in raised(tmp_path / "bare")
    (tmp_path / "single/images").mkdir(parents=True)
    assert "single/CLASS/IMAGE of several classes" in raised(tmp_path / "single")
    root = write_folder(tmp_path / "full")
    (root / "train/emu").mkdir()
    assert f"no images in the class folder {root}/train/emu" in raised(root)
    shutil.copytree(root / "test/cat", root / "test/fox")
    with pytest.raises(DataError) as caught:
        folder_config(root).prepare()  # the driver says so before any worker starts
    assert [name in line for name, line in zip(("emu", "fox"), caught.value.problems, strict=True)]


def test_classes_are_those_of_train(tmp_path: Path, capsys: Capture) -> None:
    root = write_folder(tmp_path)
    shutil.rmtree(root / "test/cat")
    (root / "test/emu").mkdir()
    dataset = folder_config(root, cache=False)
    dataset.prepare()
    assert "test has no image of cat" in capsys.readouterr().err
    data = build_data(dataset)
    assert (data.info.features.targets.names, data.info.test_size) == (("cat", "dog"), 3)
    assert data.test is not None
    assert [batch.targets.tolist() for batch in data.test.evaluation()] == [[1, 1, 1]]
    for file in (root / "test/dog").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"dataset\.splits"):
        dataset.prepare()
    data = build_data(folder_config(root, cache=False, splits=("train",)))
    assert (data.info.train_size, data.test) == (9, None)


def test_a_label_that_no_training_sample_has_is_known() -> None:
    labels, rows = Labels(names=("a", "b")), torch.tensor([[0, 1], [0, 1], [1, 1]])
    assert labels.absent(lambda: rows[:2]) == ["a"]
    assert labels.absent(lambda: rows) == []


def build_data(dataset: Any, **options: Any) -> Data:
    return built(dataset, **{"drop_last": True, **options})


def of_test(data: Data) -> Loader:
    assert data.test is not None
    return data.test


digits = functools.partial(dataset, "dataset=digits")


def synthetic(**options: Any) -> Any:
    size: Any = {"train_size": 1500, "test_size": 200, "channels": 2, "image_size": (6, 5)}
    return dataset("dataset=synthetic", **size, num_classes=7, val_fraction=0.0, **options)


def test_a_limit_beyond_what_there_is_says_so_once(capsys: Capture) -> None:
    for rank in (0, 1):
        build_data(digits(train_limit=2000), shard=Shard(rank, 2))
    build_data(digits(train_limit=1293))
    told = "warning: dataset.train_limit=2000: there are 1293 samples to train on, all are used\n"
    assert capsys.readouterr().err == told


def test_too_few_images_for_a_batch() -> None:
    with pytest.raises(DataError, match=r"set has 50 samples, fewer than batch_size=64"):
        build_data(digits(train_limit=50), batch_size=64)
    with pytest.raises(
        DataError, match="; use batch_size=48, or drop_last=false"
    ):  # what is told is not refused
        build_data(digits(train_limit=50), batch_size=64, batch_parts=4)
    with pytest.raises(DataError, match="; use drop_last=false"):
        build_data(digits(train_limit=50), batch_size=64, batch_parts=64)
    (batch,) = build_data(digits(train_limit=50), batch_size=64, drop_last=False).train.epoch(0)
    assert batch.global_size == 50


def test_mean_and_std_need_a_value_per_channel() -> None:
    with pytest.raises(ConfigError) as caught:
        build_data(digits(mean=(0.1, 0.2, 0.3), std=(1.0, 1.0)))
    assert "dataset.mean has 3 values, but the images have 1 channels" in str(caught.value)
    assert len(caught.value.problems) == 2


def test_synthetic_images_show_their_class() -> None:
    data = build_data(synthetic(), batch_size=1500)
    (train,), (test,) = data.train.epoch(0), of_test(data).evaluation()
    assert data.info.features.targets.names == tuple("0123456")
    means = torch.stack(
        [train.inputs[train.targets == label].mean(0).flatten() for label in range(7)]
    )
    assert (
        torch.cdist(test.inputs.flatten(1), means).argmin(1) == test.targets
    ).float().mean() > 0.9
    (again,) = build_data(synthetic(), batch_size=1500).train.epoch(0)
    assert torch.equal(again.inputs, train.inputs)
    (different,) = of_test(build_data(synthetic(seed=1))).evaluation()
    assert not torch.equal(different.inputs, test.inputs)


class Own(Dataset[Any]):
    """A person's dataset: grey images of 5x4, `size` of them to train on."""

    def __init__(self, size: int, train: bool, shape: tuple[int, ...] = (5, 4)) -> None:
        self.size = size if train else 6
        self.shape = shape

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(self.shape, index, np.uint8), index % 3


class Sorted(Own):
    """With its labels in `targets`, class by class, as torchvision's datasets have them."""

    def __init__(self, size: int, train: bool) -> None:
        super().__init__(size, train)
        self.targets = [3 * index // self.size for index in range(self.size)]

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(self.shape, index, np.uint8), self.targets[index]


def test_a_class_of_torchvisions_is_a_custom_dataset(tmp_path: Path) -> None:
    raw = tmp_path / "KMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, size in (("train", 30), ("t10k", 20)):
        labels = np.arange(size, dtype=np.uint8) % 10
        images = labels[:, None, None].repeat(12, 1).repeat(9, 2)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    crop = {"_target_": "torchvision.transforms.v2.CenterCrop", "size": 8}
    kwargs = {"root": str(tmp_path), "transform": crop}
    kmnist = Custom(target="torchvision.datasets.KMNIST", num_classes=10, kwargs=kwargs)
    data = build_data(kmnist)
    assert (data.info.train_size, data.info.val_size, data.info.test_size) == (27, 3, 20)
    assert data.info.features.shapes["image_size"] == (8, 8)
    assert sum(data.info.class_counts) == 27, "known before an image is read"
    for batch in of_test(data).evaluation():
        assert torch.equal((255 * batch.inputs[:, 0, 0, 0]).round().long(), batch.targets)


class Named(Own):
    classes = ("a", "b", "c", "d")


def own(name: str = "Own", num_classes: int = 3, **kwargs: Any) -> Custom:
    return Custom(
        target=f"{__name__}.{name}", num_classes=num_classes, kwargs={"size": 40, **kwargs}
    )


def test_a_person_s_own_dataset() -> None:
    data = build_data(own(), batch_size=9, num_workers=1)
    info = data.info
    assert info.features == Features(
        features.Image(channels=1, image_size=(5, 4)), Classes(names=("0", "1", "2"))
    )
    assert (info.train_size, info.val_size, info.test_size) == (36, 4, 6)
    assert len(list(data.train.epoch(0))) == len(data.train) == 4
    assert [batch.targets.tolist() for batch in of_test(data).evaluation()] == [[0, 1, 2, 0, 1, 2]]
    expected = ("a", "b", "c", "d")
    assert build_data(own("Named", num_classes=4)).info.features.targets.names == expected


def test_an_own_dataset_has_its_own_val_and_its_order_if_that_is_wanted() -> None:
    """Its parts are built with what is given for each; the last are held out where that is said."""

    def images(loader: Loader | None) -> list[int]:
        assert loader is not None
        batches = [*loader.epoch(1)]
        return (255 * torch.cat([batch.inputs[:, 0, 0, 0] for batch in batches])).long().tolist()

    part: dict[str, Any] = {"train": {"train": True}, "val": {"train": False}, "test": None}
    data = build_data(dataclasses.replace(own(), shuffle=False, **part), batch_size=8)
    assert (data.info.train_size, data.info.val_size, data.test) == (40, 6, None)
    assert images(data.train) == [*range(40)]
    for limit, trained in ((None, [*range(30)]), (16, [*range(14, 30)])):
        held_out: dict[str, Any] = {"val_split": "last", "train_limit": limit, "shuffle": False}
        of_last = dataclasses.replace(own(), val_fraction=0.25, **held_out)
        data = build_data(of_last, batch_size=2)
        assert (images(data.train), images(data.val)) == (trained, [*range(30, 40)])


class Slow(Own):
    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        time.sleep(0.01)
        return super().__getitem__(index)


@pytest.mark.parametrize(("name", "processes"), [("Own", 0), ("Slow", 1)])
def test_cheap_samples_need_no_processes(name: str, processes: int) -> None:
    batches = build_data(own(name), batch_size=9, num_workers=1).train.epoch(0)
    next(batches)
    assert len(multiprocessing.active_children()) == processes


def test_a_limit_takes_from_all_of_an_own_dataset() -> None:
    """By its classes where it tells them, else from anywhere in it."""
    limited = dataclasses.replace(own("Sorted"), train_limit=9, val_fraction=0.0)
    (batch,) = build_data(limited, batch_size=9).train.epoch(0)
    assert batch.targets.bincount().tolist() == [3, 3, 3]
    (batch,) = build_data(
        dataclasses.replace(limited, target=f"{__name__}.Own"), batch_size=9
    ).train.epoch(0)
    assert (255 * batch.inputs).max() > 20


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (own(colour=1), r"cannot be built as Own\(size=40, colour=1, train=True\)"),
        (own("Named"), "dataset.num_classes=3: .*Named.classes has 4; use dataset.num_classes=4"),
        (own("Path"), "is not a subclass of torch.utils.data"),
        (own(size=0), "its train part has no samples"),
        (dataclasses.replace(own(), test={"part": 1}), "takes no 'part' of .*dataset.test="),
    ],
)
def test_a_dataset_that_does_not_fit_is_explained(dataset: Custom, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_data(dataset)
