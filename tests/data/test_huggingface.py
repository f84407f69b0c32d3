"""Hugging Face datasets in folders that the library itself has written here."""

import functools
import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from expt import features
from expt.data import build
from expt.data.build import Data
from expt.data.fingerprint import content_of
from expt.data.kinds import Opening
from expt.data.loading import LoaderOptions
from expt.errors import ConfigError, DataError, OutOfMemory
from expt.features import Classes, Features
from expt.inference.tables import inputs_of
from expt.late import Late
from expt.worker.build import build_data, build_learner
from tests.conftest import Configured
from tests.facade import Capture, Patch
from tests.worker.conftest import ALONE

hf: Any = Late("datasets")
NAMES = ["ant", "bee", "cat"]


def pixels(number: int, channels: int = 3) -> np.ndarray:
    drawn = np.random.default_rng(number).integers(256, size=(6, 5, channels), dtype=np.uint8)
    return drawn.squeeze()


def rows(number: int, first: int = 0, *, labels: Any = None, **more: Any) -> Any:
    """Images of three classes, as ClassLabel where nothing else is said."""
    images = [Image.fromarray(pixels(first + index)) for index in range(number)]
    found = [index % 3 for index in range(number)] if labels is None else labels
    label = (
        hf.ClassLabel(names=NAMES)
        if labels is None
        else hf.Value("string" if isinstance(labels[0], str) else "int64")
    )
    features = hf.Features(
        {"image": hf.Image(), "label": label, **{name: hf.Value("float32") for name in more}}
    )
    return hf.Dataset.from_dict({"image": images, "label": found, **more}, features=features)


def of(data: Data, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of a part."""
    batches = list(getattr(data, part).evaluation())
    inputs, targets = zip(*((batch.inputs, batch.targets) for batch in batches), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def as_saved(splits: Any, folder: Path) -> None:
    splits.save_to_disk(folder)


def as_parquet(splits: Any, folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    for name, split in splits.items():
        split.to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")


def as_images(splits: Any, folder: Path) -> None:
    for name, split in splits.items():
        for index, row in enumerate(split):
            path = folder / name / NAMES[row["label"]] / f"{index:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            row["image"].save(path)


def formatted(kind: str, **more: Any) -> Any:
    """Return how a set is saved with a format, which may hide the pictures."""

    def write(splits: Any, folder: Path) -> None:
        splits.set_format(kind, **more)
        splits.save_to_disk(folder)

    return write


def as_bytes(splits: Any, folder: Path, *, are_large: bool = True) -> None:
    """As other libraries write pictures: the content of their files, without the type of one."""
    (folder / "data").mkdir(parents=True)
    for name, split in splits.items():
        table = split.cast_column("image", hf.Image(decode=False)).with_format("arrow")[:]
        image, label = table["image"], split["label"]
        if are_large:
            image = pa.array([each["bytes"].as_py() for each in image], pa.large_binary())
        found = pa.table({"image": image, "label": [NAMES[each] for each in label]})
        parquet.write_table(found, folder / "data" / f"{name}-00000-of-00001.parquet")


@pytest.mark.parametrize("write", [
    as_saved, as_parquet, as_images, formatted("torch", columns=["label"]), formatted("pandas"),
    as_bytes, functools.partial(as_bytes, are_large=False),
])  # fmt: skip
def test_each_layout_gives_its_parts(write: Any, chosen: Configured, tmp_path: Path) -> None:
    """The folder's name would be a pattern of other folders."""
    splits = hf.DatasetDict({"train": rows(12), "validation": rows(6, 100), "test": rows(3, 200)})
    folder = tmp_path / "set[1] {2}*"
    write(splits, folder)
    chosen = functools.partial(chosen, f"dataset.path='{folder}'")
    content = content_of(chosen())["data"]
    data = build_data(chosen(), ALONE)
    assert (data.info.train_size, data.info.val_size, data.info.test_size) == (12, 6, 3)
    assert (data.info.features.targets.names, data.info.class_counts) == (tuple(NAMES), (4, 4, 4))
    for part, first, number in (("val", 100, 6), ("test", 200, 3)):
        images, labels = of(data, part)
        order = (
            sorted(range(number), key=lambda index: (index % 3, index))
            if write is as_images
            else range(number)
        )
        assert labels.tolist() == [index % 3 for index in order]
        expected = torch.stack(
            [torch.from_numpy(pixels(first + index)).permute(2, 0, 1) / 255 for index in order]
        )
        torch.testing.assert_close(images, expected)
    assert content is not None
    assert content_of(chosen())["data"] == content, "to read it leaves it as it is"
    file = next(path for path in folder.rglob("*") if path.suffix in (".arrow", ".parquet", ".png"))
    file.write_bytes(file.read_bytes() + b"\0")
    assert content_of(chosen())["data"] != content


def test_pictures_are_read_as_a_viewer_shows_them(
    chosen: Configured, tmp_path: Path, capsys: Capture
) -> None:
    """An orientation, whatever lies hidden, and a mask that lies as its picture in the file."""
    exif, files = Image.Exif(), dict[str, list[str]](image=[], mask=[])
    exif[0x0112] = 6
    for number in range(4):
        picture = np.dstack([pixels(number), np.full((6, 5), 255 * (number % 2), np.uint8)])
        for column, found in (("image", picture), ("mask", pixels(number)[..., 0] % 3)):
            files[column].append(str(tmp_path / f"{column}{number}.png"))
            Image.fromarray(found).save(files[column][-1], exif=exif if column == "image" else None)
    found = hf.Dataset.from_dict(files).cast(hf.Features({name: hf.Image() for name in files}))
    as_parquet({"train": found.map(lambda row: row)}, tmp_path / "set")
    config = chosen(*"task=segmentation task.num_classes=3 dataset.target=mask model=unet".split())
    source = config.dataset.open(Opening(config.task, torch.device("cpu"), 0))
    options = LoaderOptions(batch_size=4, device=torch.device("cpu"))
    (batch,) = source.train.whole(options).evaluation()
    for number in range(4):
        shown = np.rot90(pixels(number), -1) if number % 2 else np.full((5, 6, 3), 255)
        assert np.array_equal(batch.inputs[number].permute(1, 2, 0).mul(255).round(), shown)
        assert np.array_equal(batch.targets[number], np.rot90(pixels(number)[..., 0] % 3, -1))


def test_a_file_in_the_place_of_another_is_read_anew(chosen: Configured, tmp_path: Path) -> None:
    """The library keeps what it has read by the file's time alone."""
    as_parquet({"train": rows(6)}, tmp_path / "set")
    (file,) = (tmp_path / "set").rglob("*.parquet")
    config = chosen("dataset.val_fraction=0", "eval_split=test")
    stat, device = file.stat(), torch.device("cpu")
    first = config.dataset.open(Opening(config.task, device, 0)).classes
    rows(6, labels=[2, 1, 0] * 2).cast_column("label", hf.ClassLabel(names=NAMES)).to_parquet(file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = config.dataset.open(Opening(config.task, device, 0)).classes
    assert (first.tolist(), again.tolist()) == ([0, 1, 2] * 2, [2, 1, 0] * 2)


@pytest.mark.parametrize("write", [as_parquet, as_images], ids=["parquet", "images"])
def test_all_damaged_pictures_are_named_before_training(
    write: Any, chosen: Configured, tmp_path: Path
) -> None:
    """Of every part, and in whatever holds them."""
    write({"train": rows(6), "test": rows(3)}, tmp_path / "set")
    files = [*(tmp_path / "set").rglob("*.parquet"), *(tmp_path / "set").rglob("*01.png")]
    for path in files:
        content = path.read_bytes().replace(b"IHDR", b"IDHR", 2)
        path.write_bytes(content.replace(b"IDHR", b"IHDR", 1) if write is as_parquet else content)
    for _ in range(2):  # what is wrong is not noted
        with pytest.raises(DataError) as caught:
            build_data(chosen(), ALONE)
        assert len(caught.value.problems) == len(files) == 2


def test_colours_below_transparent_pixels_are_hidden_in_a_column_of_one_mode(
    chosen: Configured, tmp_path: Path, capsys: Capture
) -> None:
    clear = [
        Image.fromarray(np.dstack([pixels(each), np.zeros((6, 5), np.uint8)])) for each in (0, 1)
    ]
    features = hf.Features({"image": hf.Image(mode="RGB"), "label": hf.ClassLabel(names=NAMES)})
    raw = hf.Dataset.from_dict({"image": clear, "label": [0, 1]}).cast(features)
    as_saved(hf.DatasetDict({"train": raw, "test": raw}), tmp_path / "set")
    data = build_data(chosen("batch_size=2", "dataset.val_fraction=0", "eval_split=test"), ALONE)
    assert bool((of(data, "test")[0] == 1).all())
    assert "4 with transparency" in capsys.readouterr().err


def test_what_is_left_out_and_a_single_class_are_reported(
    chosen: Configured, tmp_path: Path, capsys: Capture
) -> None:
    """The library reads no HEIC, and in a .csv 007 as 7."""
    as_parquet({part: rows(4, labels=[7] * 4) for part in ("train", "test")}, tmp_path / "set")
    (tmp_path / "set" / "a.HEIC").touch()
    config = chosen("dataset.val_fraction=0", "eval_split=test")
    config.dataset.prepare()
    build_data(config, ALONE)
    said = capsys.readouterr().err
    assert ".heic 1" in said
    assert "of one class" in said


def test_an_evaluation_needs_no_train(chosen: Configured, tmp_path: Path) -> None:
    as_saved(hf.DatasetDict({"test": rows(3)}), tmp_path / "set")
    config = chosen()
    with pytest.raises(DataError, match="no rows to train on"):
        build_data(config, ALONE)
    record = Features(features.Image(channels=3, image_size=(6, 5)), Classes(names=tuple(NAMES)))
    options = LoaderOptions(batch_size=4, device=ALONE.device)
    found = build.load(config.dataset, config.task, "test", record, options, own=False)
    assert found.size == 3


def test_a_single_split_is_trained_on_and_its_classes_may_be_texts(
    chosen: Configured, tmp_path: Path
) -> None:
    rows(8, labels=["dog", "cow"] * 4).save_to_disk(tmp_path / "set")
    crop = "dataset.transforms=[{_target_: torchvision.transforms.v2.RandomCrop, size: [4, 4]}]"
    config = chosen(
        "dataset.val_fraction=0.25",
        "dataset.image_size=[4,4]",
        crop,
        "mixup=0.2",
        "dataset.sampling=balanced",
    )
    data = build_data(config, ALONE)
    assert (data.info.train_size, data.info.val_size, data.test) == (6, 2, None)
    assert data.info.features.targets.names == ("cow", "dog")
    assert next(data.train.epoch(1)).inputs.shape == (4, 3, 4, 4)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("dataset.input=picture", "train has no such column"),
        ("dataset.target=kind", "train has no such column"),
        ("dataset.input=weight", "holds float32"),
    ],
)
def test_columns_that_do_not_fit_are_told(
    word: str, said: str, chosen: Configured, tmp_path: Path
) -> None:
    rows(8, weight=[1.5] * 8).save_to_disk(tmp_path / "set")
    with pytest.raises((ConfigError, DataError), match=f"{word}: {said}"):
        build_data(chosen(word), ALONE)


def test_a_class_that_is_not_trained_on_is_told(chosen: Configured, tmp_path: Path) -> None:
    splits = hf.DatasetDict({"train": rows(4, labels=[3, 7, 3, 7]), "test": rows(2, labels=[7, 5])})
    splits.save_to_disk(tmp_path / "set")
    with pytest.raises(DataError, match=r"dataset.target=label: row 2 of test has 5"):
        build_data(chosen(), ALONE)


def test_a_folder_that_is_no_dataset_is_told(chosen: Configured, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set: holds no dataset; nothing is fetched from the Hub"):
        content_of(chosen())
    (tmp_path / "set").mkdir()
    with pytest.raises(DataError, match=r"set: holds no dataset"):
        content_of(chosen())
    (tmp_path / "set" / "train.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match=r"set: cannot be read as a dataset \("):
        build_data(chosen(), ALONE)


@pytest.mark.parametrize("error", [MemoryError(), pa.ArrowMemoryError("malloc of size 64")])
def test_a_lack_of_memory_is_no_fault_of_the_files(
    error: MemoryError, chosen: Configured, tmp_path: Path, monkeypatch: Patch
) -> None:
    def load(_: str) -> None:
        raise RuntimeError("An error occurred while generating the dataset") from error

    rows(4).save_to_disk(tmp_path / "set")
    monkeypatch.setattr("datasets.load_from_disk", load)
    with pytest.raises(OutOfMemory, match=r"^dataset\.path="):
        build_data(chosen(), ALONE)


def test_the_library_is_asked_for_where_it_is_missing(
    chosen: Configured, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package datasets"):
        content_of(chosen())


def table_of(size: int, seed: int) -> Any:
    drawn = np.random.default_rng(seed)
    a, b = drawn.normal(5, 2, size), drawn.normal(size=(size, 2))
    kinds = [["cold", "warm"][int(value > 5)] for value in a]
    found = {
        "a": a,
        "b": b.tolist(),
        "y": a * 3 + b[:, 0],
        "kind": kinds,
        "odd": (a > 5).astype(int),
        "even": [0] * size,
    }
    return hf.Dataset.from_dict(found)


@pytest.fixture
def numbers(tmp_path: Path) -> dict[str, Any]:
    splits = {"train": table_of(40, 0), "validation": table_of(8, 1), "test": table_of(9, 2)}
    as_parquet(splits, tmp_path / "set")
    return splits


MODEL = ("dataset.input=[a,b]", "model=mlp")


def test_columns_of_numbers_are_rows_standardised_by_those_of_train(
    numbers: dict[str, Any], chosen: Configured
) -> None:
    config = chosen(
        *MODEL, "dataset.target=y", "task=regression", "dataset.standardise_targets=true"
    )
    data = build_data(config, ALONE)
    assert data.info.features.shapes == {"channels": 1, "image_size": (1, 3), "num_classes": 1}
    assert (data.info.train_size, data.info.val_size, data.info.test_size) == (40, 8, 9)
    both = data.info.features
    assert [[*each.scales] for each in both] == [["a", "b[0]", "b[1]"], ["y"]]
    assert not both.inputs.is_image
    assert data.test is not None
    columns = {part: split.with_format("numpy") for part, split in numbers.items()}
    for part, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        inputs, targets = of(data, part)
        for found, column in ((inputs[:, 0], "a"), (targets[:, 0], "y")):
            train = columns["train"][column][:]
            expected = (columns[name][column][:] - train.mean()) / train.std()
            assert found.numpy() == pytest.approx(expected, abs=1e-5), (part, column)
    model = build_learner(config, data, ALONE).module
    assert model(data.blank(2).inputs).shape == (2, 1)
    found = inputs_of(config.dataset, both, ALONE.device)([5.0, 0.0, 0.0])
    mean, std = both.inputs.scales["a"]
    assert found.shape == data.blank(1).inputs.shape == (1, 3)
    assert found[0, 0].item() == pytest.approx((5 - mean) / std)
    options = LoaderOptions(batch_size=4, device=ALONE.device)
    again = build.load(config.dataset, config.task, "test", both, options, own=True)
    for mine, theirs in zip(again.evaluation(), data.test.evaluation(), strict=True):
        torch.testing.assert_close(mine.inputs, theirs.inputs)
        torch.testing.assert_close(mine.targets, theirs.targets)


def test_classes_are_known_by_their_names_where_a_split_counts_them_otherwise(
    chosen: Configured, tmp_path: Path
) -> None:
    def split(names: list[str], labels: list[int]) -> Any:
        return rows(3, labels=labels).cast_column("label", hf.ClassLabel(names=names))

    train, test = (
        split(names, [0, 1, 2]) for names in (["ant", "bee", "None"], ["None", "bee", "ant"])
    )
    as_saved(hf.DatasetDict({"train": train, "validation": train, "test": test}), tmp_path / "set")
    data = build_data(chosen("batch_size=3"), ALONE)
    assert data.info.features.targets.names == ("ant", "bee", "None")
    assert [of(data, part)[1].tolist() for part in ("val", "test")] == [[0, 1, 2], [2, 1, 0]]
    unlabelled = split(["ant", "bee"], [0, -1, 1])
    as_saved(hf.DatasetDict({"train": unlabelled}), tmp_path / "other")
    with pytest.raises(DataError, match="row 2 of train: -1 is none of"):
        build_data(chosen(f"dataset.path={tmp_path / 'other'}"), ALONE)
