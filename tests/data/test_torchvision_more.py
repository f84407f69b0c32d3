"""torchvision's datasets of labels, numbers and of classes that their files alone say: made here,
in their layouts.
"""

from __future__ import annotations

import contextlib
import io
import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from expt.config.schema import RunConfig
from expt.data import evaluation
from expt.data.fingerprint import content_of
from expt.data.loading import LoaderOptions
from expt.errors import ConfigError, DataError
from expt.worker.build import build_data
from tests.conftest import Configured
from tests.data.test_torchvision_sets import ALONE, GREY, Kept, idx, parts, picture
from tests.data.test_torchvision_sets import chosen as chosen

POINTS = [[10 * image + place for place in range(10)] for image in range(12)]
LABELS = [[(image >> bit) & 1 for bit in range(3)] for image in range(12)]
SPLITS = [0] * 6 + [1] * 3 + [2] * 3


@pytest.fixture(autouse=True)
def any_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """These files are not the originals, of which torchvision knows the checksums."""
    for name in ("celeba", "fer2013", "lfw", "omniglot", "places365"):
        monkeypatch.setattr(
            f"torchvision.datasets.{name}.check_integrity",
            lambda path, md5=None: Path(path).is_file(),
        )


def table(path: Path, rows: Iterable[Iterable[object]], *head: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(f"{line}\n" for line in [*head, *(" ".join(map(str, row)) for row in rows)])
    )


def celeba(root: Path) -> None:
    base, names = root / "celeba", [f"{number:06}.jpg" for number in range(12)]
    for number, name in enumerate(names):
        picture(base / "img_align_celeba" / name, number, (6, 5))
    table(base / "list_eval_partition.txt", zip(names, SPLITS, strict=True))
    table(
        base / "identity_CelebA.txt",
        ((name, 7 + 5 * (number % 4)) for number, name in enumerate(names)),
    )
    signs = (
        (name, *(2 * each - 1 for each in labels))
        for name, labels in zip(names, LABELS, strict=True)
    )
    table(base / "list_attr_celeba.txt", signs, "12", "Bald Smiling Young ")
    boxes = ((name, 1, 2, 3 + number, 4) for number, name in enumerate(names))
    table(base / "list_bbox_celeba.txt", boxes, "12", "image_id x_1 y_1 width height")
    points = ((name, *values) for name, values in zip(names, POINTS, strict=True))
    table(base / "list_landmarks_align_celeba.txt", points, "12", "lefteye_x ...")


def clevr(root: Path) -> None:
    base = root / "clevr" / "CLEVR_v1.0"
    for part, count in (("train", 8), ("val", 3), ("test", 2)):
        scenes = []
        for number in range(count):
            name = f"CLEVR_{part}_{number:06}.png"
            picture(base / "images" / part / name, number, (6, 8))
            scenes.append({"image_filename": name, "objects": [{}] * (3 + number)})
        (base / "scenes").mkdir(exist_ok=True)
        (base / "scenes" / f"CLEVR_{part}_scenes.json").write_text(json.dumps({"scenes": scenes}))


def fer(root: Path, name: str = "fer2013.csv") -> None:
    (root / "fer2013").mkdir(parents=True, exist_ok=True)
    grey = " ".join(["7"] * 48 * 48)
    usage = ["Training"] * 10 + ["PublicTest"] * 3 + ["PrivateTest"] * 2
    rows = [f"{number % 7},{grey},{each}\n" for number, each in enumerate(usage)]
    if name == "train.csv":
        (root / "fer2013" / "test.csv").write_text(f"pixels\n{grey}\n")
    (root / "fer2013" / name).write_text("emotion,pixels,Usage\n" + "".join(rows))


def inaturalist(root: Path) -> None:
    for version, count in (("2021_train", 4), ("2021_valid", 1)):
        for species in range(6):
            levels = f"K_P_C{species % 2}_O_F_G{species // 2}_s{species}"
            for number in range(count):
                picture(
                    root / version / f"{species:05}_{levels}" / f"{9 - number}.jpg", species, (6, 6)
                )
    for species in (0, 1, 2):
        picture(
            root / "2018" / ("Birds" if species else "Apes") / str(species) / "a.jpg",
            species,
            (6, 6),
        )


def lfw(root: Path) -> None:
    base, people = root / "lfw-py", {"Ann_A": 3, "Bob_B": 1, "Cy_C": 4}
    for name, count in people.items():
        for number in range(1, count + 1):
            picture(base / "lfw_funneled" / name / f"{name}_{number:04}.jpg", number, (6, 6))
    (base / "lfw-funneled.tgz").touch()
    (base / "lfw-names.txt").write_text(
        "".join(f"{name}\t{count}\n" for name, count in people.items())
    )
    lines = [f"{name}\t{count}\n" for name, count in people.items()]
    (base / "people.txt").write_text("2\n2\n" + "".join(lines[:2]) + "1\n" + lines[2])
    (base / "peopleDevTrain.txt").write_text("1\n" + lines[0])


def omniglot(root: Path) -> None:
    for folder, alphabets in (("background", "zyx"), ("evaluation", "k")):
        for alphabet in alphabets:
            for character in "ba":
                for number in (3, 1, 2):
                    where = root / "omniglot-py" / f"images_{folder}" / alphabet / character
                    picture(where / f"{number}.png", number, (7, 7), "1")
        (root / "omniglot-py" / f"images_{folder}.zip").touch()


def places(root: Path) -> None:
    table(root / "categories_places365.txt", ((f"/p/{number:03}", number) for number in range(365)))
    for part, folder, count in (("train_standard", "data_256_standard", 8), ("val", "val_256", 3)):
        rows = [(f"/s/{number}.jpg", 40 * number) for number in range(count)]
        table(root / f"places365_{part}.txt", rows)
        for name, number in rows:
            picture(root / f"{folder}{name}", number, (6, 6))


def qmnist(root: Path) -> None:
    (raw := root / "QMNIST" / "raw").mkdir(parents=True)
    for part, count in (("train", 60), ("test", 20)):
        (raw / f"qmnist-{part}-images-idx3-ubyte").write_bytes(idx(GREY[:count]))
        about = np.arange(count * 8, dtype=">i4").reshape(count, 8)
        about[:, 0] = np.arange(count) % 10
        head = struct.pack(">HBB2I", 0, 12, 2, count, 8)
        (raw / f"qmnist-{part}-labels-idx2-int").write_bytes(head + about.tobytes())


def emnist(root: Path) -> None:
    (raw := root / "EMNIST" / "raw").mkdir(parents=True)
    for part, count in (("train", 60), ("test", 20)):
        (raw / f"emnist-letters-{part}-images-idx3-ubyte").write_bytes(idx(GREY[:count]))
        labels = 1 + np.arange(count, dtype=np.uint8) % 26
        (raw / f"emnist-letters-{part}-labels-idx1-ubyte").write_bytes(idx(labels))


def sun(root: Path) -> None:
    base, names = root / "SUN397", [f"/{number // 100}/c{number:03}" for number in range(397)]
    for number in (3, 2, 1, 0, 396):
        for count in (2, 1):
            picture(base / names[number][1:] / f"sun_{count}.jpg", number, (6, 6))
    (base / "ClassName.txt").write_text("".join(f"{name}\n" for name in names))


IN_A = "dataset.options={%s}"


SETS = [
    Kept(
        celeba,
        "CelebA",
        (IN_A % "target_type: identity", "dataset.val_fraction=0.25"),
        (3, 6, 5),
        (9, 3, 0),
        4,
    ),
    Kept(clevr, "CLEVRClassification", (), (3, 6, 8), (8, 3, 0), 11),
    Kept(fer, "FER2013", ("dataset.val_fraction=0.2",), (1, 48, 48), (8, 2, 5), 7),
    Kept(lambda root: fer(root, "train.csv"), "FER2013", (), (1, 48, 48), (13, 2, 0), 7),
    Kept(inaturalist, "INaturalist", (), (3, 6, 6), (24, 6, 0), 6),
    Kept(inaturalist, "INaturalist", (IN_A % "target_type: class",), (3, 6, 6), (24, 6, 0), 2),
    Kept(
        inaturalist,
        "INaturalist",
        (IN_A % "version: 2018, target_type: super",),
        (3, 6, 6),
        (2, 1, 0),
        2,
    ),
    Kept(lfw, "LFWPeople", ("dataset.val_fraction=0.25",), (3, 6, 6), (6, 2, 0), 3),
    Kept(omniglot, "Omniglot", ("dataset.val_fraction=0.5",), (1, 7, 7), (9, 9, 0), 6),
    Kept(omniglot, "Omniglot", (IN_A % "background: false",), (1, 7, 7), (5, 1, 0), 2),
    Kept(places, "Places365", (IN_A % "small: true",), (3, 6, 6), (8, 3, 0), 365),
    Kept(qmnist, "QMNIST", (), (1, 28, 28), (54, 6, 20), 10),
    Kept(emnist, "EMNIST", (IN_A % "split: letters",), (1, 28, 28), (54, 6, 20), 27),
    Kept(sun, "SUN397", (), (3, 6, 6), (9, 1, 0), 397),
]


@pytest.mark.parametrize("kept", SETS, ids=lambda kept: " ".join([kept.name, *kept.words]))
def test_each_has_its_parts(kept: Kept, chosen: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = chosen(kept.name, *kept.words, "drop_last=false")
    assert len(kept.found_in(tmp_path / "data", config).info.class_names) == kept.classes
    assert content_of(config).data is not None


def test_classes_are_those_of_the_files(chosen: Callable[..., RunConfig], tmp_path: Path) -> None:
    root = tmp_path / "data"
    for make in (celeba, inaturalist, lfw, places):
        make(root)
    persons = build_data(
        chosen("CelebA", IN_A % "target_type: identity", "dataset.val_fraction=0.25"), ALONE
    )
    assert persons.info.class_names == ("7", "12", "17", "22")
    assert sorted(torch.cat([labels for _, labels in parts(persons).values()]).tolist()) == sorted(
        [0, 1, 2, 3] * 3
    )
    levels = build_data(chosen("INaturalist", IN_A % "target_type: genus"), ALONE)
    assert levels.info.class_names == ("G0", "G1", "G2")
    assert parts(levels)["val"][1].tolist() == [0, 0, 1, 1, 2, 2]
    assert build_data(chosen("LFWPeople", "drop_last=false"), ALONE).info.class_names == (
        "Ann_A",
        "Bob_B",
        "Cy_C",
    )
    scenes = build_data(chosen("Places365", IN_A % "small: true"), ALONE)
    assert parts(scenes)["val"][1].tolist() == [0, 40, 80]
    (root / "2021_valid" / "00005_K_P_C1_O_F_G2_s5").rename(
        root / "2021_valid" / "00005_K_P_C1_O_F_G2_other"
    )
    with pytest.raises(
        DataError, match=r"dataset.set=INaturalist: its val has other classes than its train; fetch"
    ):
        build_data(chosen("INaturalist"), ALONE)


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (omniglot, "Omniglot", ()),
        (sun, "SUN397", ()),
        (inaturalist, "INaturalist", ()),
        (lfw, "LFWPeople", ()),
    ],
)
def test_samples_come_in_one_order_however_the_disk_lists_them(
    make: Callable[[Path], None],
    name: str,
    words: tuple[str, ...],
    chosen: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hosts with the files would else share the samples out wrongly."""
    import os

    make(tmp_path / "data")
    config = chosen(name, *words, "drop_last=false", "dataset.val_fraction=0.25")
    before, listed, found = parts(build_data(config, ALONE)), os.listdir, Path.rglob
    monkeypatch.setattr(os, "listdir", lambda path=".": sorted(listed(path))[::-1])
    monkeypatch.setattr(Path, "rglob", lambda path, pattern: sorted(found(path, pattern))[::-1])
    after = parts(build_data(config, ALONE))
    for part, (images, labels) in before.items():
        assert torch.equal(images, after[part][0]), part
        assert torch.equal(labels, after[part][1]), part


def test_labels_and_numbers_of_celeba(chosen: Callable[..., RunConfig], tmp_path: Path) -> None:
    celeba(tmp_path / "data")
    labelled = build_data(chosen("CelebA", "task=multilabel", "drop_last=false"), ALONE)
    info, found = labelled.info, parts(labelled)
    assert (info.train_size, info.val_size, info.test_size, info.num_classes) == (6, 3, 3, 3)
    assert info.target_names == ("Bald", "Smiling", "Young")
    assert torch.cat([found[part][1] for part in ("train", "val", "test")]).tolist() == LABELS
    points = (IN_A % "target_type: landmarks", "task=regression", "drop_last=false")
    plain = build_data(chosen("CelebA", *points), ALONE)
    assert parts(plain)["test"][1].tolist() == POINTS[9:]
    assert plain.info.target_names[:3] == ("lefteye_x", "lefteye_y", "righteye_x")
    config = chosen("CelebA", *points, "dataset.standardise_targets=true")
    scaled = build_data(config, ALONE)
    values = torch.tensor(POINTS[:6]).double()
    expected = (torch.tensor(POINTS[9:]) - values.mean(0)) / values.std(0, correction=0)
    torch.testing.assert_close(parts(scaled)["test"][1], expected.float())
    options = LoaderOptions(batch_size=8, device=torch.device("cpu"))
    again = evaluation.load(
        config.dataset, config.task, "test", scaled.info.told, options, own=True
    )
    torch.testing.assert_close(
        next(again.batches()).targets, expected.float(), msg="in the units of the run"
    )
    boxes = build_data(chosen("CelebA", IN_A % "target_type: bbox", *points[1:]), ALONE)
    assert parts(boxes)["val"][1].tolist() == [[1, 2, 3 + number, 4] for number in (6, 7, 8)]


def test_clevr_counts_objects(chosen: Callable[..., RunConfig], tmp_path: Path) -> None:
    clevr(tmp_path / "data")
    data = build_data(chosen("CLEVRClassification", "task=regression"), ALONE)
    assert parts(data)["val"][1].tolist() == [[3], [4], [5]]
    assert data.info.target_names == ("objects",)


def test_lsun_is_read_from_its_databases(
    chosen: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lmdb: Any = pytest.importorskip("lmdb")
    root, here = tmp_path / "data", tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for part, counts in (("train", (5, 3)), ("val", (1, 2))):
        for scene, count in zip(("bedroom", "tower"), counts, strict=True):
            (root / f"{scene}_{part}_lmdb").mkdir(parents=True)
            with contextlib.closing(lmdb.open(str(root / f"{scene}_{part}_lmdb"))) as database:
                for number in range(count):
                    with database.begin(write=True) as writing, io.BytesIO() as file:
                        Image.new("RGB", (6, 6), (count, number, 0)).save(file, "PNG")
                        writing.put(f"{number}".encode(), file.getvalue())
    words = (IN_A % "classes: [bedroom,tower]", "dataset.num_workers=2")
    data = build_data(chosen("LSUN", *words), ALONE)
    images, labels = parts(data)["train"]
    assert labels.tolist() == [0] * 5 + [1] * 3
    assert (images[:, 0, 0, 0] * 255).round().tolist() == [5] * 5 + [3] * 3
    assert data.info.class_names == ("bedroom", "tower")
    assert not list(here.iterdir())
    with pytest.raises(
        DataError,
        match=r"bridge_train_lmdb, .* not found in .*, and torchvision cannot download it",
    ):
        content_of(chosen("LSUN"))


@pytest.mark.parametrize(
    ("name", "words", "told"),
    [
        (
            "CelebA",
            (),
            (
                "task=classification: torchvision's CelebA has labels of 0 and 1 for each image;"
                " use task=multi"
            ),
        ),
        (
            "CelebA",
            ("task=regression",),
            "has labels of 0 and 1 for each image; use task=multilabel, or another targ",
        ),
        (
            "CelebA",
            (IN_A % "target_type: bbox", "task=multilabel"),
            "has numbers to predict for each image; use task",
        ),
        (
            "SVHN",
            ("task=multilabel",),
            "task=multilabel: torchvision's SVHN has one class for each image; use task=cl",
        ),
        (
            "SVHN",
            ("dataset.standardise_targets=true",),
            "dataset.standardise_targets=true: is of numbers to predict;",
        ),
        ("SVHN", (IN_A % "train: true",), "dataset.options.train: is none of SVHN, it takes none."),
        (
            "EMNIST",
            (IN_A % "splt: letters",),
            "is none of EMNIST, it takes split. Did you mean 'split'?",
        ),
        (
            "EMNIST",
            (IN_A % "split: leters",),
            "split=leters: not of balanced, byclass, bymerge, letters, digits, mnist",
        ),
        ("Places365", (IN_A % "small: 3",), "dataset.options.small=3: not of false, true."),
        (
            "LSUN",
            (IN_A % "classes: tower",),
            "dataset.options.classes=tower: not of bedroom, bridge",
        ),
        (
            "INaturalist",
            (IN_A % "target_type: super",),
            "version 2021_train of INaturalist has none; use full, or a",
        ),
        (
            "INaturalist",
            (IN_A % "version: 2018, target_type: genus",),
            "version 2018 of INaturalist has none; use full",
        ),
        (
            "Kitti2015Stereo",
            (),
            "dataset.set=Kitti2015Stereo: has pairs of images with disparities, of which no task",
        ),
        (
            "CelebA",
            (IN_A % "target_type: landmarks", "task=regression", "dataset.augment.flip=true"),
            "dataset.augment: would move images, and not their landmarks; leave it out",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(
    name: str, words: tuple[str, ...], told: str, chosen: Callable[..., RunConfig]
) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(name, *words)
    assert told in str(caught.value)
    assert len(caught.value.problems) == 1


def test_a_year_may_be_typed_as_a_number(
    chosen: Callable[..., RunConfig], configured: Configured
) -> None:
    words = ("task=segmentation", "model=unet", IN_A % "year: 2011")
    with pytest.raises(DataError, match=r"dataset.set=VOCSegmentation: VOC2011 not found in "):
        content_of(chosen("VOCSegmentation", *words))
