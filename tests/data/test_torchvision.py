"""torchvision's datasets by name: from files in their own formats, made here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from expt.config.schema import RunConfig
from expt.data.build import Data
from expt.data.fingerprint import content_of
from expt.data.kinds.torchvision import Torchvision
from expt.errors import ConfigError, DataError
from expt.worker.build import build_data
from tests.conftest import Configured, as_typed
from tests.data.test_files import idx
from tests.worker.conftest import ALONE

GREY = np.random.default_rng(0).integers(256, size=(60, 28, 28), dtype=np.uint8)


def kmnist(root: Path) -> None:
    raw = root / "KMNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, images in (("train", GREY), ("t10k", GREY[:20] // 2)):
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(
            idx(np.arange(len(images), dtype=np.uint8) % 10)
        )


def picture(path: Path, number: int, size: tuple[int, int], mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(256, size=(*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def eurosat(root: Path) -> None:
    for number in range(40):
        name = f"class{number % 10}"
        picture(root / "eurosat" / "2750" / name / f"{name}_{number}.png", number, (9, 8))


def dtd(root: Path) -> None:
    """Three parts, one image of them grey."""
    base = root / "dtd" / "dtd"
    for place, part in enumerate(("train", "val", "test")):
        names = [f"texture{index:02}/{part}_{index:02}.jpg" for index in range(47)]
        for index, name in enumerate(names):
            picture(
                base / "images" / name, place * 100 + index, (10, 13), "L" if index == 3 else "RGB"
            )
        (base / "labels").mkdir(exist_ok=True)
        (base / "labels" / f"{part}1.txt").write_text("\n".join(names) + "\n")


@pytest.fixture
def chosen(tmp_path: Path, configured: Configured) -> Callable[..., RunConfig]:
    """`chosen("KMNIST", "batch_size=8")`, of files below the test's folder."""

    def configure(name: str, *words: str) -> RunConfig:
        where = (
            *as_typed(f"dataset.root={tmp_path / 'data'} dataset.download=false"),
            "dataset.num_workers=0",
        )
        return configured(
            "dataset=torchvision", f"dataset.set={name}", *where, "batch_size=8", *words
        )

    return configure


def parts(data: Data) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The images and labels of each part, the training's in the order of the dataset."""
    found = {}
    for name in ("train", "val", "test"):
        loader = getattr(data, name)
        if loader is not None:
            batches = list(loader.evaluation())
            found[name] = (
                torch.cat([b.inputs for b in batches]),
                torch.cat([b.targets for b in batches]),
            )
    return found


class Kept(NamedTuple):
    """What `make` writes of a set, and what is to be found in it."""

    make: Callable[[Path], None]
    name: str
    words: tuple[str, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, int, int]
    classes: int

    def found_in(self, root: Path, config: RunConfig) -> Data:
        """The set of `config` as it is in `root`, whose parts are those expected."""
        self.make(root)
        data = build_data(config, ALONE)
        info, found = data.info, parts(data)
        assert (info.train_size, info.val_size, info.test_size, info.shapes["num_classes"]) == (
            *self.sizes,
            self.classes,
        )
        assert all(images.shape[1:] == self.shape for images, _ in found.values())
        counted = torch.bincount(found["train"][1], minlength=self.classes)
        assert torch.equal(counted, torch.tensor(info.class_counts)), (
            "known before an image is read"
        )
        return data


SETS = [
    Kept(kmnist, "KMNIST", (), (1, 28, 28), (54, 6, 20), 10),
    Kept(kmnist, "KMNIST", ("dataset.image_size=[32,30]",), (1, 32, 30), (54, 6, 20), 10),
    Kept(
        eurosat,
        "EuroSAT",
        ("dataset.val_fraction=0.25", "dataset.train_limit=20"),
        (3, 9, 8),
        (20, 10, 0),
        10,
    ),
    Kept(dtd, "DTD", ("dataset.options={partition: 1}",), (3, 10, 13), (47, 47, 47), 47),
]


@pytest.mark.parametrize("kept", SETS, ids=lambda kept: " ".join([kept.name, *kept.words]))
def test_each_has_its_parts(kept: Kept, chosen: Callable[..., RunConfig], tmp_path: Path) -> None:
    data = kept.found_in(tmp_path / "data", chosen(kept.name, *kept.words))
    assert sum(data.info.class_counts) == data.info.train_size
    assert next(data.train.epoch(1)).inputs.shape == (8, *kept.shape)


def test_images_and_labels_are_the_files(chosen: Callable[..., RunConfig], tmp_path: Path) -> None:
    for make in (kmnist, dtd):
        make(tmp_path / "data")
    images, labels = parts(build_data(chosen("KMNIST"), ALONE))["test"]
    torch.testing.assert_close(images[:, 0], torch.from_numpy(GREY[:20] // 2) / 255)
    assert labels.tolist() == [index % 10 for index in range(20)]
    data = build_data(chosen("DTD"), ALONE)
    images, labels = parts(data)["val"]
    with Image.open(tmp_path / "data/dtd/dtd/images/texture03/val_03.jpg") as picture:
        expected = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1) / 255
    torch.testing.assert_close(images[3], expected)
    assert labels.tolist() == list(range(47))
    assert data.info.class_names[3] == "texture03"


def test_the_content_is_part_of_what_a_run_is(
    chosen: Callable[..., RunConfig], tmp_path: Path
) -> None:
    root = tmp_path / "data"
    kmnist(root)
    first = content_of(chosen("KMNIST"))["data"]
    assert first is not None
    (root / "KMNIST" / "raw" / "train-images-idx3-ubyte.gz").write_bytes(
        b"the archive that it came from"
    )
    assert content_of(chosen("KMNIST"))["data"] == first, "archives may go"
    root.rename(tmp_path / "elsewhere")
    moved = chosen("KMNIST", f"dataset.root={tmp_path / 'elsewhere'}")
    assert content_of(moved)["data"] == first
    labels = tmp_path / "elsewhere" / "KMNIST" / "raw" / "t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[::-1])
    assert content_of(moved)["data"] != first


def test_what_is_missing_or_damaged_is_told_with_its_folder(
    chosen: Callable[..., RunConfig], tmp_path: Path
) -> None:
    root, config = tmp_path / "data", chosen("KMNIST")
    with pytest.raises(
        DataError, match=f"dataset.set=KMNIST: no files in {root}; .*dataset.download is fa"
    ):
        content_of(config)
    assert content_of(config, fetch=False)["data"] is None, "a dry run fetches nothing"
    assert not root.exists()
    (root / "KMNIST").mkdir(parents=True)
    (root / "KMNIST" / "notes.txt").touch()
    with pytest.raises(DataError, match=rf"its files in {root} cannot be read \(Dataset not found"):
        build_data(config, ALONE)
    eurosat(root)
    picture(root / "eurosat" / "2750" / "class0" / "zz.png", 1, (5, 5))
    with pytest.raises(DataError, match="image_size=null: image 4 is 5x5, and the first 9x8"):
        parts(build_data(chosen("EuroSAT", "dataset.val_fraction=0.5"), ALONE))


def test_a_download_comes_whole_or_not_at_all(
    chosen: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision.datasets

    dataset = chosen("GTSRB").dataset
    assert isinstance(dataset, Torchvision)
    dataset, seen = dataclasses.replace(dataset, download=True), list[Any]()

    def fetches(fails: bool) -> Callable[..., None]:
        def fetch(root: str, download: bool, split: str) -> None:
            if split not in ("train", "test"):
                raise ValueError(f"Unknown value '{split}' for argument split.")
            seen.append((download, split))
            if not (Path(root) / "gtsrb").exists():
                (Path(root) / "gtsrb").mkdir()
                (Path(root) / "gtsrb" / "00000.ppm").touch()
            if fails and split == "test":
                raise OSError("the line is dead")

        return fetch

    monkeypatch.setattr(torchvision.datasets, "GTSRB", fetches(fails=True))
    with pytest.raises(DataError, match=r"GTSRB: no files in .*the download failed"):
        dataset.prepare()
    assert not (tmp_path / "data").exists(), "nothing is left"
    monkeypatch.setattr(torchvision.datasets, "GTSRB", fetches(fails=False))
    dataset.prepare()
    dataset.prepare()
    assert seen == [(True, "train"), (True, "test")] * 2, "once"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["gtsrb"]
    assert dataset.fingerprint() is not None


def pets(root: Path) -> None:
    base = root / "oxford-iiit-pet"
    names = [f"cat_{number}" for number in range(12)]
    for number, name in enumerate(names):
        picture(base / "images" / f"{name}.jpg", number, (10, 12))
        trimap = np.random.default_rng(number).integers(1, 4, size=(10, 12), dtype=np.uint8)
        (base / "annotations" / "trimaps").mkdir(parents=True, exist_ok=True)
        Image.fromarray(trimap).save(base / "annotations" / "trimaps" / f"{name}.png")
    for split, there in (("trainval", names[:8]), ("test", names[8:])):
        lines = "".join(f"{name} 1 1 1\n" for name in there)
        (base / "annotations" / f"{split}.txt").write_text(lines)


def test_masks_count_classes_from_0(chosen: Callable[..., RunConfig], tmp_path: Path) -> None:
    pets(tmp_path / "data")
    words = ("task=segmentation", "model=unet", "dataset.image_size=[8,8]", "batch_size=2")
    found = parts(build_data(chosen("OxfordIIITPet", *words), ALONE))
    with Image.open(tmp_path / "data/oxford-iiit-pet/annotations/trimaps/cat_8.png") as mask:
        numbers = np.array(mask)
    masks = found["test"][1]
    assert set(masks.unique().tolist()) == {0, 1, 2}
    assert masks[0, 0, 0] == numbers[0, 0] - 1
    with pytest.raises(ConfigError, match=r"task.num_classes=4: dataset=torchvision has 3"):
        chosen("OxfordIIITPet", *words, "task.num_classes=4")


def test_numbers_and_labels_are_the_targets(
    chosen: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of CelebA: what a sample's target holds is what is predicted."""
    import torchvision.datasets

    class Faces:
        attr_names = ("bald", "smiling", "")

        def __init__(self, root: str, split: str, target_type: str = "attr") -> None:
            self.type = target_type

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[Any, torch.Tensor]:
            attr, place = torch.tensor([index % 2, 1]), torch.tensor([index, 2 * index, 1000])
            pixels = np.full((6, 5, 3), index, np.uint8)
            return Image.fromarray(pixels), attr if self.type == "attr" else place

    monkeypatch.setattr(torchvision.datasets, "CelebA", Faces)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "faces").touch()
    labels = build_data(chosen("CelebA", "task=multilabel"), ALONE)
    assert labels.info.target_names == ("bald", "smiling")
    assert parts(labels)["test"][1].tolist() == [[index % 2, 1.0] for index in range(20)]
    words = ("task=regression", "dataset.options={target_type: landmarks}")
    numbers = build_data(chosen("CelebA", *words), ALONE)
    assert parts(numbers)["test"][1][3].tolist() == [3.0, 6.0, 1000.0]
    assert numbers.info.shapes["num_classes"] == 3


def test_a_wrong_name_is_answered_with_the_nearest(chosen: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match=r"dataset.set=SVNH: .* Did you mean 'SVHN'"):
        chosen("SVNH").dataset.prepare()


def test_what_a_class_needs_is_asked_for(
    chosen: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision.datasets

    def needy(root: str) -> None:
        raise ImportError("No module named 'scipy'")

    monkeypatch.setattr(torchvision.datasets, "Flowers102", needy)
    with pytest.raises(ConfigError, match=r"dataset.set=Flowers102: .*scipy.*install"):
        build_data(chosen("Flowers102"), ALONE)
    kmnist(tmp_path / "data")
    with pytest.raises(ConfigError, match=r"dataset.set=EMNIST: .*split.*dataset.options"):
        build_data(chosen("EMNIST"), ALONE)
