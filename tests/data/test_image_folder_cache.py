"""A folder of images that fits in memory is decoded once, for all workers and runs."""

import importlib
import itertools
import json
import os
import pwd
import shutil
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import expt
from expt.data import cache as theirs
from expt.data import memory
from expt.data.checksums import Checksums
from expt.data.kinds import image_folder
from expt.data.kinds.image_folder import ImageFolder, Listing, list_parts
from expt.data.pictures import fit, open_picture
from expt.errors import ConfigError, DataError
from tests.facade import Capture, Patch, built, dataset

SIZE = (6, 8)


def decode(path: str) -> np.ndarray:
    pixels = np.array(fit(open_picture(path, "RGB").image, SIZE))
    return np.moveaxis(pixels, -1, 0)


@pytest.fixture
def cache(cache: Path) -> Path:
    return cache / "decoded"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 5)):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (9 + number % 3, 13, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "images"


def config(root: Path, **options: Any) -> Any:
    chosen = {"image_size": SIZE, "num_workers": 0, "mean": None, "std": None, **options}
    return dataset("dataset=image_folder dataset.root=x", root=str(root), **chosen)


def decoded(listing: Listing, dataset: ImageFolder) -> theirs.CachedImages | None:
    with Checksums.below(Path(dataset.root)) as sums:
        name = image_folder._entry(listing, dataset, sums.of_unchanged)
    found = theirs.read_entry(name, theirs.CachedImages) if name else None
    return found if found and found.are_whole else None


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def growing(root: Path, **options: Any) -> Any:
    """Return the loaders of a folder, of which nothing has been decoded."""
    dataset = config(root, **options)
    dataset.fingerprint()  # as when a run is typed
    dataset.prepare()
    return built(dataset, batch_size=8, drop_last=True, num_workers=1)


def fill(root: Path) -> None:
    """Have the cache hold all pictures of a folder."""
    data = growing(root)
    for loader in (data.train, data.val, data.test):
        [*loader.evaluation()]
    config(root).prepare()


def test_the_first_epoch_fills_the_cache(root: Path, cache: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(memory, "place", lambda images, device: images.clone())  # as a GPU does
    streamed = growing(root, cache=False).train
    data, readers = growing(root), list[int]()
    rows = theirs.read_entry(
        next(name for name in entries(cache) if "train" in name), theirs.CachedImages
    )
    assert rows is not None
    assert not any(map(rows.has, range(80)))
    [*data.val.evaluation()]  # these are all there then
    for epoch in (1, 2, 3):
        for one, other in zip(data.train.epoch(epoch), streamed.epoch(epoch), strict=True):
            assert torch.equal(one.inputs, other.inputs)
            assert torch.equal(one.targets, other.targets)
        readers.append(data.train._held is None)
    assert readers == [True, False, False], "an epoch leaves out less than a batch"
    assert all(map(rows.has, range(80)))
    assert decoded(list_parts(root)["train"], config(root)) is None
    config(root).prepare()
    arrays = decoded(list_parts(root)["train"], config(root))
    assert arrays is not None
    for row, file in enumerate(list_parts(root)["train"].files):
        assert np.array_equal(arrays.images[row], decode(file))


def test_what_a_killed_reader_has_half_written_is_not_read(
    root: Path, cache: Path, monkeypatch: Patch
) -> None:
    data = growing(root)
    rows = theirs.read_entry(
        next(name for name in entries(cache) if "train" in name), theirs.CachedImages
    )
    assert rows is not None
    whole = np.full(rows.images.shape[1:], 7, np.uint8)
    rows.images[3] = whole  # killed before the checksum
    rows.put(4, whole)
    rows.images[4, :, 3:] = 0  # a machine that lost a page
    assert not any(map(rows.has, (3, 4)))
    [*data.train.epoch(1)], [*data.val.evaluation()]
    files = list_parts(root)["train"].files
    for row in (3, 4):
        if rows.has(row):  # else it is what the epoch has dropped
            assert np.array_equal(rows.images[row], decode(files[row]))


@pytest.mark.parametrize("cached", ["auto", False])
def test_a_file_that_changes_meanwhile_is_refused(root: Path, cache: Path, cached: Any) -> None:
    data = growing(root, cache=cached)
    files = list_parts(root)["train"].files
    for file in files:
        Path(file).touch()  # as a backup may, which changes nothing
    [*data.val.evaluation()]
    for file, other in itertools.pairwise(files):
        shutil.copy(other, file)
    with pytest.raises(DataError, match="has changed"):
        [*data.train.epoch(1)]
    for file in files:
        Path(file).unlink()
    with pytest.raises(DataError, match=r"png .*cannot be read \(.*No such file.*; fix or replace"):
        [*data.train.epoch(1)]


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    root: Path, cache: Path, monkeypatch: Patch
) -> None:
    kept, files = growing(root).train._reading.dataset, list_parts(root)["train"].files

    def change(image: Any, image_size: tuple[int, int]) -> Any:
        shutil.copy(files[0], files[3])
        return fit(image, image_size)

    kept = replace(kept, pictures=replace(kept.pictures, resize=change))
    with pytest.raises(DataError, match="has changed"):
        kept[3]
    assert not kept.cached.has(3)


def test_a_changed_folder_is_decoded_again(root: Path, cache: Path) -> None:
    fill(root)
    listing = list_parts(root)["test"]
    assert isinstance(arrays := decoded(listing, config(root)), theirs.CachedImages)
    assert isinstance(arrays.images, np.memmap)
    shutil.copy(listing.files[1], listing.files[0])
    assert decoded(listing, config(root)) is None
    fill(root)
    assert isinstance(arrays := decoded(listing, config(root)), theirs.CachedImages)
    assert np.array_equal(arrays.images[0], arrays.images[1])
    assert len(entries(cache)) == 2, "the new entry has taken the place of the old one"


class Free(int):
    free = property(int)


def test_auto_leaves_what_does_not_fit_and_true_does_not(
    root: Path, cache: Path, monkeypatch: Patch
) -> None:
    size = 90 * 3 * SIZE[0] * SIZE[1]
    for owner, name in ((image_folder, "available_memory"), (shutil, "disk_usage")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *_: Free(4 * size - 1))
            config(root).prepare()
        assert not cache.exists()
    config(root, cache=False).prepare()
    assert not cache.exists()
    config(root, cache=True).prepare()
    assert len(entries(cache)) == 2


def test_a_cache_that_cannot_be_written(root: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EXPT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"dataset.cache=true: .*file/cache cannot be written"):
        config(root, cache=True).prepare()
    config(root).prepare()
    assert decoded(list_parts(root)["test"], config(root)) is None


@pytest.mark.parametrize("cores", [1, 2])
def test_all_unreadable_images_are_named(
    root: Path, cache: Path, cores: int, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(image_folder, "usable_cpus", lambda: cores)
    wrong = "train/cat/7.png", "train/dog/39.png", "test/dog/0.png"
    for name in wrong:
        (root / name).write_bytes(b"no image")
    for each in (config(root), config(root, cache=False)):
        with pytest.raises(DataError) as caught:
            each.prepare()
        problems = caught.value.problems
        assert [str(root / name) in line for name, line in zip(wrong, problems, strict=True)]


def test_an_image_is_decoded_as_torchvision_does(root: Path) -> None:
    datasets: Any = importlib.import_module("torchvision.datasets")
    functional: Any = importlib.import_module("torchvision.transforms.v2.functional")
    theirs = datasets.ImageFolder(root / "train")
    listing = list_parts(root)["train"]
    assert list(zip(listing.files, listing.labels, strict=True)) == theirs.samples
    for path in listing.files[:3]:
        image = Image.open(path).convert("RGB")
        scale = max(SIZE[0] / image.height, SIZE[1] / image.width)
        size = [max(SIZE[0], int(image.height * scale)), max(SIZE[1], int(image.width * scale))]
        expected = functional.center_crop(functional.resize(image, size), list(SIZE))
        assert np.array_equal(decode(path), np.asarray(expected).transpose(2, 0, 1))


def test_a_class_is_one_however_its_accents_are_composed(root: Path) -> None:
    for part, name in (("train", "caf\u00e9"), ("test", "cafe\u0301")):
        (root / part / "cat").rename(root / part / name)
    listings = list_parts(root)
    assert [each.classes for each in listings.values()] == [("caf\u00e9", "dog")] * 2
    assert [len(each.files) for each in listings.values()] == [80, 10]


def test_folders_beside_train_and_test_are_named(root: Path, cache: Path, capsys: Capture) -> None:
    shutil.copytree(root / "train" / "cat", root / "owl")
    config(root).prepare()
    assert f"warning: {root}: reads test, train, and leaves out owl" in capsys.readouterr().err


def test_pictures_that_are_enlarged_are_counted(root: Path, capsys: Capture) -> None:
    config(root).prepare()
    assert "dataset.image_size" not in capsys.readouterr().err
    config(root, image_size=(10, 13)).prepare()
    assert (
        f"{root}: pictures: 32 smaller than dataset.image_size=[10,13]," in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "damaged",
    [
        ["test/dog/3"],
        pytest.param(["train/cat/2", "train/dog/5", "test/cat/1"], marks=pytest.mark.slow),
    ],
)
def test_large_folders_are_looked_at_while_a_run_trains(root: Path, damaged: list[str]) -> None:
    """It would train for days: what is damaged ends it, all named at once."""
    noise = Image.effect_noise((1400, 1000), 100)
    for name in ("cat", "dog"):
        for number in range(8):
            noise.save(root / "train" / name / f"{number}.png", compress_level=0)
    bad = [str(root / f"{name}.png") for name in damaged]
    for path in bad:
        os.truncate(path, os.path.getsize(path) // 2)
    words = (f"dataset.root={root}", "dataset.image_size=[6,8]", "model=mlp", "epochs=1000000")
    folder = root.parent / "run"
    with pytest.raises(DataError) as caught:
        expt.run("dataset=image_folder", *words, "batch_size=16", f"hydra.run.dir={folder}")
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines if "cannot be read" in line] == bad
    if damaged[0].startswith("test"):  # else the run may have read it before a step was done
        assert json.loads((folder / "result.json").read_text())["error_kind"] == "DataError"
        assert (folder / "checkpoints" / "last.safetensors").exists()


def test_a_link_back_to_its_own_folder_adds_no_image(root: Path) -> None:
    before = list_parts(root)["train"].files
    (root / "train" / "cat" / "back").symlink_to("..")
    (root / "train" / "cat" / "self").symlink_to(".")
    assert list_parts(root)["train"].files == before
    for one, other in (("cat", "dog"), ("dog", "cat")):  # around two folders
        (root / "train" / one / "also").symlink_to(f"../{other}")
    assert len(list_parts(root)["train"].files) == 2 * len(before)


def test_what_a_killed_command_has_half_written_is_removed_by_the_next(
    root: Path, cache: Path
) -> None:
    begun, left = threading.Event(), threading.Event()

    def write(folder: Path) -> None:
        theirs.new_images(folder, 3, (1, 2, 2))
        begun.set()
        left.wait()

    writer = threading.Thread(
        target=theirs.fill_entry, args=("other-1.2", write, theirs.CachedImages)
    )
    writer.start()
    begun.wait()
    stale = [cache / ".new-image_folder-train-a.b", cache / ".new-as_of_an_older_version"]
    for folder in stale:
        folder.mkdir()
        (folder / "images.npy").write_bytes(b"x" * 1000)
    config(root).prepare()
    assert not any(folder.exists() for folder in stale)
    assert (cache / ".new-other-1.2").exists(), "somebody is writing there"
    left.set()
    writer.join()
    assert "other-1.2" in entries(cache)


def test_only_entries_make_room_in_a_folder_of_ones_own(
    root: Path, cache: Path, monkeypatch: Patch
) -> None:
    own = [cache / name / "mine" for name in ("holiday", "films.2020", "2020-12.raw")]
    for file in own:
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setenv("EXPT_CACHE_GB", "0")
    for name in ("a-1.1", "b-1.1"):
        theirs.fill_entry(name, lambda x: theirs.new_images(x, 3, (1, 2, 2)), theirs.CachedImages)
    assert all(file.exists() for file in own)
    assert not (cache / "a-1.1").exists()


def test_the_cache_keeps_within_its_limit(root: Path, cache: Path, monkeypatch: Patch) -> None:
    def fill(name: str) -> None:
        def write(folder: Path) -> None:
            rows = theirs.new_images(folder, 3, (1, 100, 100))
            for row in range(3):
                rows.put(row, np.zeros((1, 100, 100), np.uint8))

        theirs.fill_entry(name, write, theirs.CachedImages)

    names = ["a-1.1", "b-1.1", "c-1.1"]
    for second, name in enumerate(names):
        fill(name)
        os.utime(cache / name, (second, second))
    assert entries(cache) == names
    monkeypatch.setenv("EXPT_CACHE_GB", str(3.5 * 30_500 / 1e9))
    theirs.read_entry("a-1.1", theirs.CachedImages)  # used again
    fill("d-1.1")
    assert entries(cache) == ["a-1.1", "c-1.1", "d-1.1"]
    monkeypatch.setenv("EXPT_CACHE_GB", "much")
    with pytest.raises(ConfigError, match="EXPT_CACHE_GB=much: not a number"):
        fill("e-1.1")
    assert entries(cache) == ["a-1.1", "c-1.1", "d-1.1"], "it is refused before it is filled"


def test_without_a_home_the_cache_is_among_temporary_files(monkeypatch: Patch) -> None:
    for variable in ("EXPT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert theirs.cache_dir() == Path(tempfile.gettempdir()) / f"expt-cache-{os.getuid()}"
