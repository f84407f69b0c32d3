"""Folders of images and masks: what is read, and what is refused, by the file's name."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from expt.data.build import warn_of_absent
from expt.data.checked_samples import read_all
from expt.data.image_files import parts_there
from expt.data.images import MaskPictures
from expt.data.kinds import Opening
from expt.data.kinds.image_folder import list_pairs
from expt.errors import ConfigError, DataError
from expt.features import Mask
from expt.worker.build import build_data
from tests.conftest import Configured
from tests.worker.conftest import ALONE

VALUES = Mask(num_classes=3)


def save(path: Path, values: np.ndarray, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values)
    (image.convert(mode) if mode else image).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four images of 6x4, in subfolders too; masks are stripes of the classes 0, 1, 2 and of what
    is ignored.
    """
    mask = np.repeat(np.array([[0, 1, 2, 255]], np.uint8), 6, 0)
    for name in ("a", "b", "town/c", "town/d"):
        save(tmp_path / "train" / "images" / f"{name}.jpg", np.full((6, 4, 3), 100, np.uint8))
        save(tmp_path / "train" / "masks" / f"{name}.png", mask)
    return tmp_path


def folder(root: Path, size: tuple[int, int] = (6, 4)) -> MaskPictures:
    return MaskPictures(pairs=list_pairs(root / "train"), channels=3, size=size, values=VALUES)


def test_images_and_masks_of_a_stem_belong_together_and_are_resized(root: Path) -> None:
    pairs = list_pairs(root / "train")
    assert [Path(mask).stem for _, mask in pairs] == ["a", "b", "c", "d"]
    image, mask = folder(root, (3, 8))[2]
    assert (image.shape, image.dtype, mask.dtype) == ((3, 3, 8), torch.uint8, torch.int64)
    assert mask.tolist() == [[0, 0, 1, 1, 2, 2, 255, 255]] * 3, (
        "the nearest pixel: no class between two"
    )


def test_masks_may_be_palettes_and_of_one_and_sixteen_bits(root: Path) -> None:
    masks = root / "train" / "masks"
    palette = Image.fromarray(np.tile(np.array([[2, 1]], np.uint8), (6, 2)), mode="L").convert("P")
    palette.putdata([2, 1] * 12)
    palette.save(masks / "a.png")
    save(masks / "b.png", np.ones((6, 4), bool))
    save(masks / "town" / "c.png", np.full((6, 4), 2, np.uint16))
    found = [folder(root)[index][1].unique().tolist() for index in range(3)]
    assert found == [[1, 2], [1], [2]]
    big_endian = Image.fromarray(np.full((6, 4), 1, ">u2"))
    big_endian.save(masks / "town" / "c.png", format="TIFF")
    assert folder(root)[2][1].unique().tolist() == [1]


def _remove(path: str) -> Callable[[Path], None]:
    return lambda root: (root / path).unlink()


def _mask(values: np.ndarray) -> Callable[[Path], None]:
    return lambda root: save(root / "train" / "masks" / "b.png", values)


def _jpeg_mask(root: Path) -> None:
    (root / "train" / "masks" / "b.png").unlink()
    save(root / "train" / "masks" / "b.jpeg", np.full((6, 4), 9, np.uint8))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_remove("train/masks/b.png"), "images/b.jpg has no mask .*train/masks/b.png"),
        (_remove("train/images/town/c.jpg"), "masks/town/c.png has no image in .*train/images"),
        (_mask(np.zeros((6, 5), np.uint8)), "masks/b.png is 6x5, and its image 6x4"),
        (_mask(np.full((6, 4), 3, np.uint8)), r"masks/b.png holds the class 3, expected 0 to 2"),
        (_jpeg_mask, r"masks/b.jpeg holds the class .* PNG"),
        (_mask(np.zeros((6, 4, 3), np.uint8)), "masks/b.png is a picture of mode RGB"),
        (lambda root: (root / "train/masks/b.png").write_text("no"), "masks/b.png cannot be read"),
        (
            lambda root: save(root / "train/images/b.png", np.zeros((6, 4), np.uint8)),
            "b.jpg and .*b.png have one name",
        ),
        (lambda root: (root / "test").mkdir(), "no pictures in .*test/images: expected NAME.jpg"),
    ],
    ids=[
        "no mask",
        "no image",
        "another size",
        "another class",
        "jpeg",
        "colours",
        "no picture",
        "two of a name",
        "no folder",
    ],
)
def test_what_is_wrong_is_told_by_its_file(
    spoil: Callable[[Path], None], told: str, root: Path
) -> None:
    spoil(root)

    def read() -> None:
        for part in parts_there(root).values():
            list_pairs(part)
        folder(root)[1]

    with pytest.raises(DataError, match=told):
        read()


def test_a_persons_own_samples_are_checked() -> None:
    image, mask = torch.zeros(3, 2, 2), torch.tensor([[0, 1], [2, 255]])
    wrong = [(image, mask), (image, mask + 2), (image, mask.float()), (image, mask[0]), image]
    assert torch.equal(read_all(wrong, VALUES.check, [0])[0][1], mask)  # type: ignore[arg-type]
    told = (
        "sample 1: .* holds the class 3, expected 0 to 2",
        "float32",
        r"int64 \[2\], expected",
        "is a Tensor, exp",
    )
    for index, text in enumerate(told, 1):
        with pytest.raises(DataError, match=text):
            read_all(wrong, VALUES.check, [index])  # type: ignore[arg-type]


WORDS = ("task=segmentation", "dataset=segmentation_folder", "model=unet", "dataset.num_classes=3")


def test_a_class_in_no_mask_of_train_is_reported(
    root: Path, configured: Configured, capsys: pytest.CaptureFixture[str]
) -> None:
    """Masks of 0 and 255, and a class that only held-out masks have."""
    config = configured(*WORDS, f"dataset.root={root}")
    source = config.dataset.open(Opening(config.task, torch.device("cpu"), 0))
    warn_of_absent(config.dataset, source, torch.arange(4))
    assert capsys.readouterr().err == ""
    for name in ("a", "b", "town/c"):
        save(root / "train/masks" / f"{name}.png", np.tile(np.array([[0, 255]], np.uint8), (6, 2)))
    for number, absent in ((4, []), (3, ["1", "2"])):
        train = torch.arange(number)
        found = source.features.targets.absent(lambda: source.known_targets(train))  # noqa: B023
        assert found == absent
    warn_of_absent(config.dataset, source, torch.arange(3))
    assert "task.ignore_index" in capsys.readouterr().err


def test_a_changed_mask_is_another_experiment(root: Path, configured: Configured) -> None:
    dataset = configured(*WORDS, f"dataset.root={root}").dataset
    before = dataset.fingerprint()
    save(root / "train" / "masks" / "a.png", np.ones((6, 4), np.uint8))
    assert dataset.fingerprint() != before


def test_an_example_is_like_a_sample(root: Path, configured: Configured) -> None:
    data = build_data(configured(*WORDS, f"dataset.root={root}", "batch_size=1"), ALONE)
    batch = next(iter(data.train.epoch(1)))
    for example, samples in zip(data.example, (batch.inputs, batch.targets), strict=True):
        assert example.shape == samples.shape[1:]
    assert data.example[1].dtype == torch.int64


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (WORDS[1:], ("task=classification: dataset=segmentation_folder is for task=segmentation")),
        (("task=segmentation",), "task=segmentation: dataset=digits is for task=classification"),
        ((*WORDS, "task.num_classes=4"), "task.num_classes=4: dataset=segmentation_folder has 3"),
        ((*WORDS, "+dataset.augment.flip=true"), "dataset.augment: moves images without their"),
    ],
)
def test_what_cannot_go_together_is_refused(
    words: tuple[str, ...], told: str, configured: Configured
) -> None:
    root = ("dataset.root=pictures",) if "dataset=segmentation_folder" in words else ()
    with pytest.raises(ConfigError) as caught:
        configured(*words, *root)
    assert told in str(caught.value)
