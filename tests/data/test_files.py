"""Files of datasets: found, decoded once, checked; and the errors that say what to do."""

import gzip
import os
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expt import late
from expt.data.kinds.originals import DEBIAN_FASHION_MNIST, Downloaded
from expt.errors import DataError
from tests.facade import Patch, as_typed

NAMES = (
    *as_typed("train-images-idx3-ubyte train-labels-idx1-ubyte t10k-images-idx3-ubyte"),
    *as_typed("t10k-labels-idx1-ubyte"),
)


def config(name: str, root: Path | str | None, download: bool = False) -> Downloaded:
    return Downloaded(
        name=name,  # type: ignore[arg-type]
        root=None if root is None else str(root),
        download=download,
        val_fraction=0.1,
        train_limit=None,
        mean=None,
        std=None,
    )


def idx(array: np.ndarray) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_idx_set(
    folder: Path, suffix: str = "", dotted: bool = False, sizes: tuple[int, int] = (30, 20)
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, size in zip(("train", "t10k"), sizes, strict=True):
        images = np.arange(size * 6, dtype=np.uint8).reshape(size, 2, 3)
        labels = (np.arange(size) % 10).astype(np.uint8)
        for name, array in (
            (f"{prefix}-images-idx3-ubyte", images),
            (f"{prefix}-labels-idx1-ubyte", labels),
        ):
            spelled = name.replace("-idx", ".idx") if dotted else name
            data = idx(array)
            (folder / f"{spelled}{suffix}").write_bytes(gzip.compress(data) if suffix else data)


def cifar_members(name: str) -> dict[str, bytes]:
    batches, key = {
        "cifar10": ([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"], "labels"),
        "cifar100": (["train", "test"], "fine_labels"),
    }[name]
    members = {}
    for number, batch in enumerate(batches):
        data = np.full((4, 3072), number, np.uint8)
        data[:, 1024:2048] += 100
        members[batch] = pickle.dumps({"data": data, key: [number % 10] * 4}, protocol=2)
    return members


def write_batches(folder: Path, members: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for batch, content in members.items():
        (folder / batch).write_bytes(content)


def message(dataset: Downloaded) -> str:
    with pytest.raises(DataError) as caught:
        dataset.prepare()
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("layout", [".", "raw", "MNIST/raw"])
@pytest.mark.parametrize("dotted", [False, True])
def test_idx_files_are_found_plain_or_gzip_in_each_layout(
    tmp_path: Path, layout: str, suffix: str, dotted: bool
) -> None:
    write_idx_set(tmp_path / "root" / layout, suffix, dotted)
    dataset = config("mnist", tmp_path / "root")
    dataset.prepare()
    images, labels = dataset.load("train")
    assert (images.shape, images.dtype.name) == ((30, 1, 2, 3), "uint8")
    assert (labels.tolist(), labels.dtype.name) == ([*range(10)] * 3, "int64")
    assert images.ravel().tolist() == [value % 256 for value in range(180)]
    assert len(dataset.load("test").images) == 20


def test_the_folder_with_the_set_s_own_name_is_preferred(tmp_path: Path) -> None:
    write_idx_set(tmp_path, sizes=(30, 20))
    write_idx_set(tmp_path / "FashionMNIST/raw", sizes=(12, 10))
    assert len(config("fashion_mnist", tmp_path).load("train").images) == 12
    assert len(config("mnist", tmp_path).load("train").images) == 30


def test_the_default_root_lies_in_the_cache(cache: Path) -> None:
    write_idx_set(cache / "data/MNIST/raw")
    config("mnist", None).prepare()


def test_gzip_is_decoded_once_and_mapped(
    tmp_path: Path, cache: Path, monkeypatch: Patch, recwarn: pytest.WarningsRecorder
) -> None:
    write_idx_set(tmp_path, ".gz")
    dataset = config("mnist", tmp_path)
    dataset.prepare()
    assert len(list((cache / "decoded").glob("mnist-*/images.npy"))) == 2
    assert not list((cache / "decoded").glob(".new-*"))
    monkeypatch.setattr("expt.data.formats.read_idx", None)  # decoding again would fail
    images = dataset.load("train").images
    assert isinstance(images, np.memmap)
    assert images.flags.writeable  # copy-on-write: torch takes it without a warning
    images[:] = 0
    assert dataset.load("train").images.any()
    assert not recwarn


def test_a_changed_or_damaged_entry_is_decoded_again(tmp_path: Path, cache: Path) -> None:
    write_idx_set(tmp_path, ".gz")
    dataset = config("mnist", tmp_path)
    dataset.prepare()
    for path in (cache / "decoded").glob("*/images.npy"):
        path.write_bytes(path.read_bytes()[:140])
    assert len(dataset.load("train").images) == 30
    write_idx_set(tmp_path, ".gz", sizes=(25, 20))
    assert len(dataset.load("train").images) == 25


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_no_entry(tmp_path: Path, cache: Path, monkeypatch: Patch) -> None:
    def save(_path: Path, _array: np.ndarray) -> None:
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"1")

    write_idx_set(tmp_path, ".gz")
    monkeypatch.setattr(late.np, "save", save)
    assert len(config("mnist", tmp_path).load("train").images) == 30
    assert [path.name for path in (cache / "decoded").glob("[!.]*")] == []


def test_without_a_network_the_error_comes_at_once(tmp_path: Path, monkeypatch: Patch) -> None:
    for scheme in ("http", "https", "ftp"):
        monkeypatch.setenv(f"{scheme}_proxy", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("no_proxy", "")
    start = time.monotonic()
    text = message(config("fashion_mnist", tmp_path / "new/folder", download=True))
    assert all(name in text for name in NAMES)
    assert "the download failed (Error downloading train-images" in text
    assert "dataset.root=/usr/share/datasets/fashion-mnist" in text
    (tmp_path / "empty").mkdir()
    text = message(config("cifar10", tmp_path / "empty", download=True))
    assert "data_batch_1" in text
    assert f"put the files into {tmp_path}/empty/cifar-10-batches-py: they are in cifar-10-" in text
    assert time.monotonic() - start < 60, "it has tried again and again"
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"], "nothing is left"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_with_too_few_or_too_many_bytes(tmp_path: Path, suffix: str) -> None:
    write_idx_set(tmp_path, suffix)
    path = tmp_path / f"{NAMES[0]}{suffix}"
    whole = gzip.decompress(path.read_bytes()) if suffix else path.read_bytes()

    def rewrite(data: bytes) -> str:
        path.write_bytes(gzip.compress(data) if suffix else data)
        return message(config("mnist", tmp_path))

    for spoilt in (whole[:-6], whole + b"1", idx(np.empty((0, 2, 3), np.uint8))):
        assert f"{path} holds {len(spoilt)} bytes, and its shape" in rewrite(spoilt)
    for spoilt in (whole[:3], b"", b"<html>" + whole):
        assert "is not an IDX file of bytes with 3 dimensions" in rewrite(spoilt)


def test_a_gzip_file_cut_short_or_damaged(tmp_path: Path) -> None:
    write_idx_set(tmp_path, ".gz")
    path = tmp_path / f"{NAMES[0]}.gz"
    noise = np.random.default_rng(0).integers(0, 256, (30, 20, 20), np.uint8)
    whole = gzip.compress(idx(noise))
    for spoilt in (whole[:6000], whole[:6000] + b"\0" + whole[6001:], b"not gzip"):
        path.write_bytes(spoilt)
        assert f"{path} is damaged" in message(config("mnist", tmp_path))


def test_images_and_labels_that_do_not_belong_together(tmp_path: Path) -> None:
    write_idx_set(tmp_path)
    (tmp_path / NAMES[1]).write_bytes(idx(np.zeros(29, np.uint8)))
    assert "holds 30 images" in (text := message(config("mnist", tmp_path)))
    assert "29 labels" in text


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("layout", ["folder", "flat"])
def test_cifar_is_read_from_its_folder(tmp_path: Path, name: str, layout: str) -> None:
    members = cifar_members(name)
    own = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
    write_batches(tmp_path / own if layout == "folder" else tmp_path, members)
    dataset = config(name, tmp_path)
    dataset.prepare()
    images, labels = dataset.load("train")
    batches = len(members) - 1
    assert (images.shape, labels.dtype.name) == ((4 * batches, 3, 32, 32), "int64")
    assert labels.tolist() == [number for number in range(batches) for _ in range(4)]
    assert images[:, :, 5, 7].tolist() == [
        [number, number + 100, number] for number in labels.tolist()
    ]
    assert dataset.load("test").labels.tolist() == [batches] * 4


class _Attack:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_pickle_executes_nothing(tmp_path: Path) -> None:
    attack = pickle.dumps(_Attack(f"touch {tmp_path}/executed"))
    write_batches(tmp_path, {**cifar_members("cifar100"), "train": attack})
    text = message(config("cifar100", tmp_path))
    assert "system, which is refused" in text
    assert str(tmp_path) in text
    assert not (tmp_path / "executed").exists()


def test_damaged_cifar_files_are_named(tmp_path: Path) -> None:
    members = cifar_members("cifar100")
    dataset = config("cifar100", tmp_path)
    write_batches(tmp_path, {**members, "train": members["train"][:100]})
    assert f"{tmp_path}/train is not a CIFAR batch" in message(dataset)
    short = {"data": np.zeros((4, 3071), np.uint8), "fine_labels": [0] * 4}
    write_batches(tmp_path, {"train": pickle.dumps(short, protocol=2)})
    assert "expected images as uint8 (4, 3072), found uint8 (4, 3071)" in message(dataset)
    turned = {"data": np.zeros((4, 32, 32, 3), np.uint8), "fine_labels": [0] * 4}
    write_batches(tmp_path, {"train": pickle.dumps(turned, protocol=2)})
    assert "found uint8 (4, 32, 32, 3)" in message(dataset)
    write_batches(
        tmp_path,
        {"train": pickle.dumps({"data": np.zeros((0, 3071), np.uint8), "fine_labels": []})},
    )
    assert "found uint8 (0, 3071)" in message(dataset)


@pytest.mark.skipif(
    not DEBIAN_FASHION_MNIST.is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)
def test_fashion_mnist_of_debian_needs_no_download() -> None:
    dataset = config("fashion_mnist", None)
    dataset.prepare()
    dataset.prepare()
    images, labels = dataset.load("train")
    assert (images.shape, np.bincount(labels).tolist()) == ((60_000, 1, 28, 28), [6000] * 10)
    assert round(float(images.mean() / 255), 4) == 0.2860
    assert dataset.load("test").images.shape == (10_000, 1, 28, 28)
